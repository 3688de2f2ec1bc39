// ggml's blocks against the values that gguf-py gives, bit for bit, on every instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/decode/decode.h"
#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"
#include "testing/goldens.h"
#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::GuardedBuffer;

std::vector<DType> BlockTypes() {
  std::vector<DType> types;
  for (auto i = static_cast<uint8_t>(kFirstGgmlBlock); i <= static_cast<uint8_t>(kLastGgmlBlock);
       ++i)
    types.push_back(static_cast<DType>(i));
  return types;
}

// Both forms of DecodeRow and CodeAt give `expected`, to the bit, for the row at `bytes`.
void CheckRow(DType dtype, const std::byte* bytes, const float* expected, size_t n) {
  GuardedBuffer<std::byte> blocks(BytesOf(dtype, n));
  std::memcpy(blocks.data(), bytes, blocks.size());
  const CodeRow row{dtype, blocks.data(), n, DType::kF32, nullptr, nullptr, 1};
  GuardedBuffer<float> out(n);
  DecodeRow(row, out.data());
  EXPECT_EQ(std::memcmp(out.data(), expected, n * sizeof(float)), 0) << DTypeName(dtype);
  DecodeRowReference(row, out.data());
  EXPECT_EQ(std::memcmp(out.data(), expected, n * sizeof(float)), 0) << DTypeName(dtype);
  for (size_t i = 0; i < n; i += 37) EXPECT_EQ(CodeAt(dtype, blocks.data(), i), expected[i]) << i;
}

// Every TYPE.<kind>.bytes of a golden that has values.
void CheckGolden(const std::filesystem::path& path, std::string_view kind) {
  const auto files = ModelFiles::OpenFolder(path.parent_path());
  const std::string name = path.filename().string();
  const SafetensorsFile golden = SafetensorsFile::Parse(name, files->Map(name));
  for (DType dtype : BlockTypes()) {
    const std::string prefix = std::string(DTypeName(dtype)) + "." + std::string(kind);
    const TensorInfo* bytes = golden.Find(prefix + ".bytes");
    if (bytes == nullptr) continue;
    const TensorInfo* values = golden.Find(prefix + ".f32");
    ASSERT_NE(values, nullptr) << prefix;
    const TensorView in = golden.View(*bytes);
    const TensorView out = golden.View(*values);
    const size_t n = out.shape[1];
    ASSERT_EQ(in.shape[1], BytesOf(dtype, n));
    const auto* expected = reinterpret_cast<const float*>(out.data);
    for (size_t r = 0; r < in.shape[0]; ++r)
      CheckRow(dtype, in.data + r * in.shape[1], expected + r * n, n);
  }
}

TEST(GgmlRow, RandomBlocksDecodeAsGgufPyDoes) {
  const auto path = testing::LocalGoldenDir() / "ggml_blocks.safetensors";
  const auto files = ModelFiles::OpenFolder(path.parent_path());
  const SafetensorsFile golden = SafetensorsFile::Parse("", files->Map(path.filename().string()));
  for (DType dtype : BlockTypes())
    EXPECT_NE(golden.Find(std::string(DTypeName(dtype)) + ".random.f32"), nullptr)
        << DTypeName(dtype);
  testing::ForEachTarget([&] { CheckGolden(path, "random"); });
}

TEST(GgmlRow, TheLargeSetDecodesAsGgufPyDoes) {
  SY_SKIP_WITHOUT_GOLDENS();
  const auto path = *testing::GoldenDir() / "gguf" / "blocks.safetensors";
  testing::ForEachTarget([&] {
    CheckGolden(path, "random");
    CheckGolden(path, "gauss");
  });
}

// Rows of any number of blocks, scales that are infinite or NaN included: every target gives the
// bits of the portable one and touches nothing else. (The bits of a NaN are its own business.)
TEST(GgmlRow, EveryTargetAgrees) {
  testing::ForEachTarget([] {
    auto random = testing::MakeRandom(71);
    for (DType dtype : BlockTypes()) {
      for (size_t blocks : {0u, 1u, 2u, 3u, 5u, 6u, 7u, 28u, 90u}) {  // 32 * 90 = 2880
        const size_t n = blocks * DTypeBlock(dtype);
        GuardedBuffer<uint8_t> q(BytesOf(dtype, n));
        for (uint8_t& byte : q.span()) byte = static_cast<uint8_t>(random());
        const CodeRow row{dtype, q.data(), n, DType::kF32, nullptr, nullptr, 1};
        GuardedBuffer<float> out(n);
        std::vector<float> expected(n);
        DecodeRow(row, out.data());
        DecodeRowReference(row, expected.data());
        for (size_t i = 0; i < n; ++i) {
          if (std::isnan(expected[i])) {
            ASSERT_TRUE(std::isnan(out[i])) << DTypeName(dtype) << " " << i;
          } else {
            ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected[i]))
                << DTypeName(dtype) << " " << i;
          }
        }
      }
    }
  });
}

TEST(GgmlTypes, SizesAndNames) {
  for (DType dtype : BlockTypes()) {
    EXPECT_TRUE(IsGgmlBlock(dtype));
    const size_t block = DTypeBlock(dtype);
    const size_t bytes = DTypeBlockBytes(dtype);
    EXPECT_EQ(BytesOf(dtype, 0), 0u);
    EXPECT_EQ(BytesOf(dtype, 1), bytes);
    EXPECT_EQ(BytesOf(dtype, block), bytes);
    EXPECT_EQ(BytesOf(dtype, block + 1), 2 * bytes);
    EXPECT_EQ(BitsPerElement(dtype), static_cast<double>(bytes * 8) / static_cast<double>(block));
    EXPECT_ANY_THROW(DTypeBits(dtype));
    EXPECT_ANY_THROW(DTypeBytes(dtype));
    DType parsed = DType::kF64;
    EXPECT_FALSE(ParseDType(DTypeName(dtype), parsed));
  }
  EXPECT_EQ(DTypeName(DType::kGgmlQ4K), "Q4_K");
  EXPECT_EQ(BitsPerElement(DType::kGgmlQ4K), 4.5);
  EXPECT_EQ(DTypeBlock(DType::kI4), 2u);
  EXPECT_EQ(DTypeBlock(DType::kBF16), 1u);
  EXPECT_FALSE(IsGgmlBlock(DType::kF4E2M1));
}

}  // namespace
}  // namespace switchyard::kernels
