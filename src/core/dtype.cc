#include "switchyard/core/dtype.h"

#include <array>

#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

// `block` elements lie in `bytes` bytes.
struct DTypeRow {
  DType dtype;
  std::string_view name;
  size_t block;
  size_t bytes;
};

// Ordered as the enum.
constexpr std::array kDTypes = {
    DTypeRow{DType::kF64, "F64", 1, 8},
    DTypeRow{DType::kF32, "F32", 1, 4},
    DTypeRow{DType::kF16, "F16", 1, 2},
    DTypeRow{DType::kBF16, "BF16", 1, 2},
    DTypeRow{DType::kI64, "I64", 1, 8},
    DTypeRow{DType::kI32, "I32", 1, 4},
    DTypeRow{DType::kI16, "I16", 1, 2},
    DTypeRow{DType::kI8, "I8", 1, 1},
    DTypeRow{DType::kU8, "U8", 1, 1},
    DTypeRow{DType::kBool, "BOOL", 1, 1},
    DTypeRow{DType::kF8E4M3, "F8_E4M3", 1, 1},
    DTypeRow{DType::kF8E5M2, "F8_E5M2", 1, 1},
    DTypeRow{DType::kF8E8M0, "F8_E8M0", 1, 1},
    DTypeRow{DType::kI4, "I4", 2, 1},
    DTypeRow{DType::kU4, "U4", 2, 1},
    DTypeRow{DType::kF4E2M1, "F4_E2M1", 2, 1},
    DTypeRow{DType::kGgmlQ40, "Q4_0", 32, 18},
    DTypeRow{DType::kGgmlQ41, "Q4_1", 32, 20},
    DTypeRow{DType::kGgmlQ50, "Q5_0", 32, 22},
    DTypeRow{DType::kGgmlQ51, "Q5_1", 32, 24},
    DTypeRow{DType::kGgmlQ80, "Q8_0", 32, 34},
    DTypeRow{DType::kGgmlQ2K, "Q2_K", 256, 84},
    DTypeRow{DType::kGgmlQ3K, "Q3_K", 256, 110},
    DTypeRow{DType::kGgmlQ4K, "Q4_K", 256, 144},
    DTypeRow{DType::kGgmlQ5K, "Q5_K", 256, 176},
    DTypeRow{DType::kGgmlQ6K, "Q6_K", 256, 210},
    DTypeRow{DType::kGgmlIq4Nl, "IQ4_NL", 32, 18},
    DTypeRow{DType::kGgmlIq4Xs, "IQ4_XS", 256, 136},
    DTypeRow{DType::kGgmlIq3S, "IQ3_S", 256, 110},
    DTypeRow{DType::kGgmlIq3Xxs, "IQ3_XXS", 256, 98},
    DTypeRow{DType::kGgmlIq2S, "IQ2_S", 256, 82},
    DTypeRow{DType::kGgmlIq2Xs, "IQ2_XS", 256, 74},
    DTypeRow{DType::kGgmlIq2Xxs, "IQ2_XXS", 256, 66},
    DTypeRow{DType::kGgmlIq1S, "IQ1_S", 256, 50},
    DTypeRow{DType::kGgmlIq1M, "IQ1_M", 256, 56},
    DTypeRow{DType::kGgmlTq10, "TQ1_0", 256, 54},
    DTypeRow{DType::kGgmlTq20, "TQ2_0", 256, 66},
    DTypeRow{DType::kGgmlMxFp4, "MXFP4", 32, 17},
};

constexpr bool OrderedAsTheEnum() {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].dtype != static_cast<DType>(i)) return false;
  }
  return kDTypes.back().dtype == kLastGgmlBlock;
}
static_assert(OrderedAsTheEnum());

const DTypeRow& RowOf(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace

size_t DTypeBlock(DType dtype) { return RowOf(dtype).block; }
size_t DTypeBlockBytes(DType dtype) { return RowOf(dtype).bytes; }
size_t DTypeBits(DType dtype) {
  SY_CHECK(!IsGgmlBlock(dtype));
  return RowOf(dtype).bytes * 8 / RowOf(dtype).block;
}
double BitsPerElement(DType dtype) {
  return static_cast<double>(RowOf(dtype).bytes * 8) / static_cast<double>(RowOf(dtype).block);
}
size_t DTypeBytes(DType dtype) {
  SY_CHECK(DTypeBlock(dtype) == 1);
  return RowOf(dtype).bytes;
}
std::string_view DTypeName(DType dtype) { return RowOf(dtype).name; }

bool ParseDType(std::string_view name, DType& dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name && row.block == 1) {
      dtype = row.dtype;
      return true;
    }
  }
  return false;
}

float ToFloat(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    // Subnormal: mantissa x 2^-24, exact in f32.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

BF16 ToBF16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return BF16{static_cast<uint16_t>(bits >> 16)};
}

F16 ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return F16{static_cast<uint16_t>(sign | 0x7e00u)};
  // 65520 is the first value that rounds to infinity.
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f))
    return F16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    // Subnormal result: adding 0.5 makes the f32 adder round at 2^-24, ties to even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return F16{static_cast<uint16_t>(
        sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return F16{static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

}  // namespace switchyard
