// The scan for values that no intact weight has: what it finds in blocks of ggml is what decodes
// to something that is not finite.
#include "model/value_scan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <vector>

#include "kernels/ggml/ggml.h"
#include "testing/random.h"

namespace switchyard {
namespace {

std::vector<std::byte> Bytes(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

ValueFindings Scan(const std::vector<std::byte>& bytes, DType dtype, size_t count,
                   TensorRole role) {
  return ScanValues({bytes.data(), dtype, Shape{count}}, role);
}

TEST(ValueScan, NanCodesOfFp8) {
  const ValueFindings e4m3 =
      Scan(Bytes({0x00, 0x7e, 0x7f, 0xfe, 0xff}), DType::kF8E4M3, 5, TensorRole::kCodes);
  EXPECT_EQ(e4m3.nan, 2u);
  EXPECT_EQ(e4m3.inf, 0u);
  EXPECT_EQ(e4m3.first_index, 2u);
  const ValueFindings e5m2 =
      Scan(Bytes({0x7b, 0x7c, 0xfc, 0x7d, 0xff}), DType::kF8E5M2, 5, TensorRole::kCodes);
  EXPECT_EQ(e5m2.nan, 2u);
  EXPECT_EQ(e5m2.inf, 2u);
  EXPECT_EQ(e5m2.first_index, 1u);
  EXPECT_EQ(e5m2.first_value, INFINITY);
}

TEST(ValueScan, Scales) {
  // bf16: 1, -1, 0, NaN; the bytes lie at an odd address.
  const std::vector<std::byte> bf16 = Bytes({0, 0x80, 0x3f, 0x80, 0xbf, 0, 0, 0xc0, 0x7f});
  const ValueFindings found =
      ScanValues({bf16.data() + 1, DType::kBF16, Shape{4}}, TensorRole::kScales);
  EXPECT_EQ(found.nan, 1u);
  EXPECT_EQ(found.negative, 1u);
  EXPECT_EQ(found.zero, 1u);
  EXPECT_EQ(found.first_index, 1u);
  EXPECT_EQ(found.first_value, -1.0f);
  const ValueFindings powers = Scan(Bytes({0, 254, 255}), DType::kU8, 3, TensorRole::kScales);
  EXPECT_EQ(powers.nan, 1u);
  EXPECT_EQ(powers.first_index, 2u);
  // Bytes that are no scales have no wrong values.
  EXPECT_FALSE(Scan(Bytes({0, 254, 255}), DType::kU8, 3, TensorRole::kCodes).any());
}

TEST(ValueScan, FindsTheBlocksThatDecodeToSomethingNotFinite) {
  std::mt19937_64 random = testing::MakeRandom();
  for (auto i = static_cast<int>(kFirstGgmlBlock); i <= static_cast<int>(kLastGgmlBlock); ++i) {
    const auto dtype = static_cast<DType>(i);
    SCOPED_TRACE(DTypeName(dtype));
    const size_t block = DTypeBlock(dtype), block_bytes = DTypeBlockBytes(dtype);
    size_t bad_blocks = 0;
    for (size_t round = 0; round < 4000; ++round) {
      std::vector<std::byte> bytes(block_bytes);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 255u);
      // An infinity or a NaN at a place by chance makes them frequent.
      const size_t at = random() % (block_bytes - 1);
      bytes[at + 1] = std::byte{0x7c} | bytes[at + 1];
      // Large powers of two times a code leave f32, and are no wrong scales.
      if (dtype == DType::kGgmlMxFp4) bytes[0] = static_cast<std::byte>(round % 2 == 0 ? 255 : 99);
      std::vector<float> values(block);
      kernels::DecodeGgmlRow(dtype, bytes.data(), block, values.data());
      bool is_bad = false;
      for (float value : values) is_bad = is_bad || !std::isfinite(value);
      ASSERT_EQ(Scan(bytes, dtype, block, TensorRole::kMatrix).any(), is_bad);
      bad_blocks += is_bad ? 1 : 0;
    }
    EXPECT_GT(bad_blocks, 5u);
  }
}

TEST(ValueScan, LinesNameFileTensorIndexAndValue) {
  ThreadPool pool(2);
  std::vector<float> values(6, 1.0f);
  values[4] = -INFINITY;
  const TensorView view{reinterpret_cast<const std::byte*>(values.data()), DType::kF32,
                        Shape{2, 3}};
  const LocatedTensor tensor{
      {"a.weight", "f.safetensors", DType::kF32, view.shape, 24, TensorRole::kMatrix, "a.weight"},
      view};
  const Verification found = ScanTensors({&tensor, 1}, pool);
  ASSERT_EQ(found.problems.size(), 1u);
  EXPECT_EQ(found.problems[0],
            "f.safetensors: a.weight: 0 NaN and 1 infinite values, the first at [1, 1] of [2, 3]: "
            "-inf");
  EXPECT_TRUE(found.remarks.empty());
}

}  // namespace
}  // namespace switchyard
