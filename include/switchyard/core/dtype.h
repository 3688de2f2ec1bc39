// Element types of tensors, and conversions of single 16-bit floats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace switchyard {

// Types that tensors are stored in. kF16 is IEEE binary16, kBF16 the upper half of an f32.
enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool };

// Bytes of one element.
size_t DTypeBytes(DType dtype);

// The safetensors spelling: "F32", "BF16", …
std::string_view DTypeName(DType dtype);

// Reverse of DTypeName. False if the name is not one of ours; `dtype` is then unchanged.
bool ParseDType(std::string_view name, DType& dtype);

// Storage of a bfloat16: the upper half of an IEEE f32.
struct BF16 {
  uint16_t bits;
};

// Storage of an IEEE binary16.
struct F16 {
  uint16_t bits;
};

// The exact value as f32.
inline float ToFloat(float value) { return value; }
inline float ToFloat(BF16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
float ToFloat(F16 value);

// Round to nearest, ties to even; a NaN stays a (quiet) NaN, values too large for f16 become
// infinity.
BF16 ToBF16(float value);
F16 ToF16(float value);

}  // namespace switchyard
