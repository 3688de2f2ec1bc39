#include "switchyard/core/dtype.h"

#include <array>

#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  size_t bits;
};

// Ordered as the enum.
constexpr std::array kDTypes = {
    DTypeRow{DType::kF64, "F64", 64},       DTypeRow{DType::kF32, "F32", 32},
    DTypeRow{DType::kF16, "F16", 16},       DTypeRow{DType::kBF16, "BF16", 16},
    DTypeRow{DType::kI64, "I64", 64},       DTypeRow{DType::kI32, "I32", 32},
    DTypeRow{DType::kI16, "I16", 16},       DTypeRow{DType::kI8, "I8", 8},
    DTypeRow{DType::kU8, "U8", 8},          DTypeRow{DType::kBool, "BOOL", 8},
    DTypeRow{DType::kF8E4M3, "F8_E4M3", 8}, DTypeRow{DType::kF8E5M2, "F8_E5M2", 8},
    DTypeRow{DType::kF8E8M0, "F8_E8M0", 8}, DTypeRow{DType::kI4, "I4", 4},
    DTypeRow{DType::kU4, "U4", 4},          DTypeRow{DType::kF4E2M1, "F4_E2M1", 4},
};

}  // namespace

size_t DTypeBits(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bits; }
size_t DTypeBytes(DType dtype) {
  SY_CHECK(DTypeBits(dtype) >= 8);
  return DTypeBits(dtype) / 8;
}
std::string_view DTypeName(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

bool ParseDType(std::string_view name, DType& dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name && row.bits >= 8) {
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
