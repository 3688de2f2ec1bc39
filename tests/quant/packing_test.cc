// Packings: round trips, and words written by hand.
#include "quant/packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/decode/decode.h"
#include "quant/expert_matmul.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::quant {
namespace {

template <typename T>
std::vector<T> RandomInts(std::mt19937_64& random, size_t count) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(random());
  return values;
}

std::vector<F16> RandomHalves(std::mt19937_64& random, size_t count) {
  std::vector<F16> values;
  for (float value : testing::RandomFloats(random, count, 0.01f))
    values.push_back(ToF16(std::fabs(value) + 0.001f));
  return values;
}

RawScales Raw(const std::vector<float>& scales) {
  return {DType::kF32, std::as_bytes(std::span(scales))};
}

double CodeOf(const QuantMatrix& matrix, size_t n, size_t k) {
  return kernels::CodeAt(matrix.format.dtype,
                         matrix.data.data() + BytesOf(matrix.format.dtype, n * matrix.stride), k);
}

double ElementOf(const QuantMatrix& matrix, size_t n, size_t k) {
  std::vector<QuantMatrix> one;
  one.push_back(matrix);
  const MatrixBank bank(std::move(one));
  return MatrixElement(bank.View(), 0, n, k);
}

bool SameBits(const std::vector<F16>& a, const std::vector<F16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(F16)) == 0;
}

TEST(Words, OrdersAreInverse) {
  auto random = testing::MakeRandom(71);
  const std::vector<int32_t> words = RandomInts<int32_t>(random, 100);
  for (NibbleOrder order : {NibbleOrder::kLinear, NibbleOrder::kSplit})
    EXPECT_EQ(PackWords(UnpackWords(words, order), order), words);
  const std::vector<int32_t> word = {0x76543210};
  EXPECT_EQ(UnpackWords(word, NibbleOrder::kLinear),
            (std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(UnpackWords(word, NibbleOrder::kSplit), (std::vector<uint8_t>{0, 4, 1, 5, 2, 6, 3, 7}));
  // Quark's form of the same order: nibble i holds element [0, 2, 4, 6, 1, 3, 5, 7][i].
  const std::vector<uint8_t> elements = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(PackWords(elements, NibbleOrder::kSplit), (std::vector<int32_t>{0x75316420}));
  testing::ExpectError(ErrorCode::kInvalidArgument, {"7", "multiple of 8"},
                       [&] { PackWords(std::span(elements).first(7), NibbleOrder::kLinear); });
}

TEST(Awq, RoundTripAndByHand) {
  auto random = testing::MakeRandom(72);
  const PackedShape shape{"experts.3.up_proj", 16, 70, 32};  // a ragged last group
  const OwnedAwq file{RandomInts<int32_t>(random, 70 * 2), RandomInts<int32_t>(random, 3 * 2),
                      RandomHalves(random, 3 * 16)};
  const QuantMatrix matrix =
      ImportAwq(shape, {file.qweight, file.qzeros, RawScales::Of(file.scales)});
  EXPECT_EQ(matrix.format, (MatrixFormat{DType::kU4, DType::kF16, 1, 32, true}));
  const OwnedAwq back = ExportAwq(matrix);
  EXPECT_EQ(back.qweight, file.qweight);
  EXPECT_EQ(back.qzeros, file.qzeros);
  EXPECT_TRUE(SameBits(back.scales, file.scales));
  // Output 11 = column 3 of word 1, nibble 5; input 40 lies in group 1.
  const auto nibble = [](int32_t word) { return (static_cast<uint32_t>(word) >> 20) & 15u; };
  const double code = nibble(file.qweight[40 * 2 + 1]);
  const double zero = nibble(file.qzeros[1 * 2 + 1]);
  EXPECT_EQ(ElementOf(matrix, 11, 40), (code - zero) * double{ToFloat(file.scales[16 + 11])});
}

TEST(Awq, RefusesWrongSizes) {
  const std::vector<int32_t> words(8);
  const std::vector<F16> scales(16);
  testing::ExpectError(ErrorCode::kCorruptData, {"layer x", "qzeros", "8", "2"}, [&] {
    ImportAwq({"layer x", 16, 4, 0}, {words, words, RawScales::Of(scales)});
  });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"layer x", "N = 12"}, [&] {
    ImportAwq({"layer x", 12, 4, 0}, {words, words, RawScales::Of(scales)});
  });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"awq", "I8"}, [&] {
    ExportAwq(QuantMatrix::Make({DType::kI8, DType::kF32, 1, 0, false}, 8, 8));
  });
}

class GptqTest : public ::testing::TestWithParam<size_t> {};

TEST_P(GptqTest, RoundTripInBothFormats) {
  auto random = testing::MakeRandom(73);
  const size_t bits = GetParam();
  const size_t words_k = 64 * bits / 32;
  const size_t words_n = 16 * bits / 32;
  const PackedShape shape{"w", 16, 64, 32};
  for (GptqFormat format : {GptqFormat::kV1, GptqFormat::kV2}) {
    const bool v1 = format == GptqFormat::kV1;
    OwnedGptq file{RandomInts<int32_t>(random, words_k * 16),
                   RandomInts<int32_t>(random, 2 * words_n), RandomHalves(random, 2 * 16)};
    if (bits == 8) {  // 255 + 1 has no u8
      for (int32_t& word : file.qzeros) word &= 0x7f7f7f7f;
    }
    std::vector<int32_t> g_idx(64);
    for (size_t k = 0; k < 64; ++k) g_idx[k] = static_cast<int32_t>(k / 32);
    const QuantMatrix matrix = ImportGptq(
        shape, {format, bits, file.qweight, file.qzeros, RawScales::Of(file.scales), g_idx});
    EXPECT_EQ(matrix.format.dtype, bits == 4 ? DType::kU4 : DType::kU8);
    const OwnedGptq back = ExportGptq(matrix, format);
    EXPECT_EQ(back.qweight, file.qweight);
    EXPECT_EQ(back.qzeros, file.qzeros);
    EXPECT_TRUE(SameBits(back.scales, file.scales));
    // Output 9, input 37 (group 1), by the formula of the format.
    const size_t per_word = 32 / bits;
    const uint32_t mask = (1u << bits) - 1;
    const auto word = static_cast<uint32_t>(file.qweight[37 / per_word * 16 + 9]);
    const auto zeros = static_cast<uint32_t>(file.qzeros[words_n + 9 / per_word]);
    const double code = (word >> (37 % per_word * bits)) & mask;
    const double zero = ((zeros >> (9 % per_word * bits)) & mask) + (v1 ? 1u : 0u);
    EXPECT_EQ(ElementOf(matrix, 9, 37), (code - zero) * double{ToFloat(file.scales[16 + 9])});
  }
}
INSTANTIATE_TEST_SUITE_P(Bits, GptqTest, ::testing::Values(4, 8));

TEST(Gptq, SymmetricFilesHaveTheMiddleAsZero) {
  const std::vector<int32_t> qweight(8, static_cast<int32_t>(0xfedcba98));
  const std::vector<int32_t> qzeros = {0x77777777};  // 7 + 1
  const std::vector<F16> scales(8, ToF16(1.0f));
  const QuantMatrix matrix =
      ImportGptq({"w", 8, 8, 0}, {GptqFormat::kV1, 4, qweight, qzeros, RawScales::Of(scales), {}});
  for (size_t k = 0; k < 8; ++k) EXPECT_EQ(ElementOf(matrix, 3, k), static_cast<double>(k));
}

// With desc_act the group of a column is what g_idx says.
TEST(Gptq, GroupsMayLieInAnyOrder) {
  auto random = testing::MakeRandom(77);
  const std::vector<int32_t> qweight = RandomInts<int32_t>(random, 8);
  const std::vector<int32_t> qzeros = {0x01234567, 0x07654321};
  std::vector<F16> scales;
  for (size_t i = 0; i < 16; ++i) scales.push_back(ToF16(0.5f + static_cast<float>(i)));
  const std::vector<int32_t> g_idx = {0, 1, 0, 0, 1, 1, 0, 1};
  const QuantMatrix matrix = ImportGptq(
      {"w", 8, 8, 4}, {GptqFormat::kV1, 4, qweight, qzeros, RawScales::Of(scales), g_idx});
  const auto nibble = [](int32_t word, size_t i) {
    return static_cast<double>((static_cast<uint32_t>(word) >> (4 * i)) & 15u);
  };
  const WeightMatrix view = matrix.View();
  for (size_t n = 0; n < 8; ++n) {
    std::vector<float> row(8);
    DecodeMatrixRow(view.AsBank(), 0, n, row.data());
    for (size_t k = 0; k < 8; ++k) {
      const auto group = static_cast<size_t>(g_idx[k]);
      const double zero = nibble(qzeros[group], n) + 1;
      const double expected =
          (nibble(qweight[n], k) - zero) * double{ToFloat(scales[group * 8 + n])};
      EXPECT_EQ(MatrixElement(view.AsBank(), 0, n, k), expected) << n << ", " << k;
      EXPECT_EQ(double{row[k]}, expected) << n << ", " << k;
    }
  }
}

TEST(Gptq, RefusesGroupsThatDoNotExistAndOtherBits) {
  const std::vector<int32_t> words(8);
  const std::vector<F16> scales(16);
  std::vector<int32_t> g_idx = {0, 0, 0, 0, 1, 1, 2, 1};
  testing::ExpectError(ErrorCode::kCorruptData, {"down_proj", "g_idx", "input 6", "group 2"}, [&] {
    ImportGptq({"down_proj", 8, 8, 4}, {GptqFormat::kV1, 4, words, std::span(words).first(2),
                                        RawScales::Of(scales), g_idx});
  });
  testing::ExpectError(ErrorCode::kUnsupported, {"3 bits"}, [&] {
    ImportGptq({"w", 8, 8, 4}, {GptqFormat::kV1, 3, words, words, RawScales::Of(scales), {}});
  });
}

TEST(Int4, EveryPackingRoundTrips) {
  auto random = testing::MakeRandom(74);
  const PackedShape shape{"w", 16, 24, 8};
  const std::vector<float> scales = testing::RandomFloats(random, 16 * 3);
  const std::vector<int32_t> words = RandomInts<int32_t>(random, 16 * 24 / 8);
  EXPECT_EQ(ExportWna16(ImportWna16(shape, words, Raw(scales))), words);
  EXPECT_EQ(ExportQuarkInt4(ImportQuarkInt4(shape, words, Raw(scales))), words);
  EXPECT_EQ(ExportNpuInt4(ImportNpuInt4(shape, words, Raw(scales))), words);
  const std::vector<int8_t> pairs = RandomInts<int8_t>(random, 8 * 24);
  const QuantMatrix matrix = ImportPairedRows(shape, 8, pairs, Raw(scales));
  EXPECT_EQ(ExportPairedRows(matrix), pairs);
  const std::vector<int8_t> bytes = ExportInt4Bytes(matrix);
  const QuantMatrix again = ImportInt4Bytes(shape, 16, bytes, Raw(scales));
  EXPECT_EQ(again.data, matrix.data);
  EXPECT_EQ(again.scale, matrix.scale);
  // All packings of one matrix mean the same codes.
  EXPECT_EQ(ImportWna16(shape, ExportWna16(matrix), Raw(scales)).data, matrix.data);
  EXPECT_EQ(ImportQuarkInt4(shape, ExportQuarkInt4(matrix), Raw(scales)).data, matrix.data);
  EXPECT_EQ(ImportNpuInt4(shape, ExportNpuInt4(matrix), Raw(scales)).data, matrix.data);
}

TEST(Int4, ByHand) {
  const std::vector<float> scales(8, 0.5f);
  const std::vector<int32_t> word = {0x0008000f};  // nibble 0 = 15, nibble 4 = 8
  const std::vector<int32_t> rows8(8, word[0]);
  const QuantMatrix offset = ImportWna16({"w", 1, 8, 0}, word, Raw({0.5f}));
  EXPECT_EQ(CodeOf(offset, 0, 0), 7);
  EXPECT_EQ(CodeOf(offset, 0, 1), -8);
  EXPECT_EQ(CodeOf(offset, 0, 4), 0);
  EXPECT_EQ(ElementOf(offset, 0, 1), -4.0);
  const QuantMatrix quark = ImportQuarkInt4({"w", 1, 8, 0}, word, Raw({0.5f}));
  EXPECT_EQ(CodeOf(quark, 0, 0), -1);
  EXPECT_EQ(CodeOf(quark, 0, 1), -8);  // element 1 lies in nibble 4
  const QuantMatrix npu = ImportNpuInt4({"w", 8, 1, 0}, word, Raw(scales));
  EXPECT_EQ(CodeOf(npu, 4, 0), -8);
  const QuantMatrix paired = ImportPairedRows(
      {"w", 2, 1, 0}, 1, std::vector<int8_t>{static_cast<int8_t>(0x7f)}, Raw({1.0f, 1.0f}));
  EXPECT_EQ(CodeOf(paired, 0, 0), -1);
  EXPECT_EQ(CodeOf(paired, 1, 0), 7);
}

TEST(Int4, TheOtherPackingIsNamed) {
  const std::vector<float> scales(16, 1.0f);
  const std::vector<int8_t> codes(16 * 4);
  testing::ExpectError(ErrorCode::kCorruptData, {"w13", "old packing"}, [&] {
    ImportPairedRows({"w13", 16, 4, 0}, 16, codes, Raw(scales));
  });
  testing::ExpectError(ErrorCode::kCorruptData, {"w13", "new packing"}, [&] {
    ImportInt4Bytes({"w13", 16, 4, 0}, 8, codes, Raw(scales));
  });
  std::vector<int8_t> wide = codes;
  wide[4 + 2] = -9;
  testing::ExpectError(ErrorCode::kCorruptData, {"(1, 2)", "-9"}, [&] {
    ImportInt4Bytes({"w13", 16, 4, 0}, 16, wide, Raw(scales));
  });
  testing::ExpectError(ErrorCode::kCorruptData, {"scale", "16", "32"}, [&] {
    ImportInt4Bytes({"w13", 16, 4, 2}, 16, codes, Raw(scales));
  });
}

TEST(NvFp4, ScalesAreMultiplied) {
  const std::vector<uint8_t> packed = {0x72, 0, 0, 0, 0, 0, 0, 0xf0};
  const std::vector<uint8_t> scales = {EncodeE4M3(1.5f)};
  const QuantMatrix matrix = ImportNvFp4({"w", 1, 16, 16}, packed, scales, 0.25f);
  EXPECT_EQ(ElementOf(matrix, 0, 0), 1.0 * 0.375);
  EXPECT_EQ(ElementOf(matrix, 0, 1), 6.0 * 0.375);
  EXPECT_EQ(ElementOf(matrix, 0, 15), -6.0 * 0.375);
}

TEST(Scales, BitsAndPairsRoundTrip) {
  auto random = testing::MakeRandom(75);
  const std::vector<float> scales = testing::RandomFloats(random, 40);
  std::vector<int64_t> bits = WidenScaleBits(scales);
  for (int64_t value : bits) EXPECT_EQ(value >> 32, 0);
  EXPECT_EQ(NarrowScaleBits("s", bits), scales);
  EXPECT_EQ(WidenScaleBits(std::vector<float>{1.0f}), std::vector<int64_t>{0x3f800000});
  for (int64_t& value : bits) value = static_cast<int32_t>(value);  // with the sign carried on
  EXPECT_EQ(NarrowScaleBits("s", bits), scales);
  testing::ExpectError(ErrorCode::kCorruptData, {"w2 scale", "element 0"}, [&] {
    NarrowScaleBits("w2 scale", std::vector<int64_t>{int64_t{1} << 40});
  });

  const std::vector<uint8_t> mx = RandomInts<uint8_t>(random, 3 * 4);
  const std::vector<uint8_t> pairs = SplitScalePairs("s", mx, 3);
  EXPECT_EQ(JoinScalePairs("s", pairs, 3), mx);
  EXPECT_EQ(pairs[(1 * 3 + 2) * 2 + 1], mx[2 * 4 + 3]);  // block 3 of row 2
  testing::ExpectError(ErrorCode::kInvalidArgument, {"w13 scale", "3"},
                       [&] { SplitScalePairs("w13 scale", std::span(mx).first(6), 2); });
}

TEST(Scales, GroupScalesAreRoundedToHalf) {
  const std::vector<float> channel = {0.1f, 2.0f};
  const std::vector<float> second = {0.3f, 1.0f, 0.7f, 1.5f};
  const std::vector<F16> combined = CombineGroupScales(channel, second);
  ASSERT_EQ(combined.size(), 4u);
  EXPECT_EQ(combined[0].bits, ToF16(0.1f * 0.3f).bits);
  EXPECT_EQ(combined[1].bits, ToF16(0.1f).bits);
  EXPECT_EQ(combined[3].bits, ToF16(3.0f).bits);
}

TEST(ScaleBias, IsAChecksum) {
  auto random = testing::MakeRandom(76);
  const PackedShape shape{"w", 4, 64, 0};
  const std::vector<float> scales = testing::RandomFloats(random, 4);
  std::vector<QuantMatrix> one;
  one.push_back(ImportPairedRows(shape, 2, RandomInts<int8_t>(random, 2 * 64), Raw(scales)));
  const MatrixBank bank(std::move(one));
  std::vector<float> bias(4 * 2);  // in two parts
  for (size_t n = 0; n < 4; ++n) {
    double sum = 0;
    for (size_t k = 0; k < 64; ++k) sum += 8 * MatrixElement(bank.View(), 0, n, k);
    bias[2 * n] = static_cast<float>(sum / 4);
    bias[2 * n + 1] = static_cast<float>(sum * 3 / 4);
  }
  EXPECT_LE(ScaleBiasDeviation("b", bank.View(), 0, bias), 1e-6);
  bias[3] += 1.0f;
  EXPECT_GE(ScaleBiasDeviation("b", bank.View(), 0, bias), 1e-4);
  bias[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(ScaleBiasDeviation("b", bank.View(), 0, bias) <= 1e9);
  testing::ExpectError(ErrorCode::kCorruptData, {"bias w2"}, [&] {
    ScaleBiasDeviation("bias w2", bank.View(), 0, std::span(bias).first(7));
  });
}

}  // namespace
}  // namespace switchyard::quant
