// Element types of tensors, and conversions of single 16-bit floats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace switchyard {

// Types that tensors are stored in. kF16 is IEEE binary16, kBF16 the upper half of an f32.
//   kF8E4M3: OCP e4m3fn (no infinity, 448 is the largest, 0x7f and 0xff are NaN); kF8E5M2: OCP
//   e5m2; kF8E8M0: a power of two, 2^(byte - 127), 255 = NaN; kF4E2M1: 0 .5 1 1.5 2 3 4 6 and their
//   negatives. The 4-bit types (kI4 two's complement, kU4, kF4E2M1) lie two in a byte, the element
//   with the even index in the low nibble.
//   kGgml*: blocks of ggml, codes and their scales together; a row holds whole blocks. Source: the
//   GGUF format (gguf/quants.py of the gguf package); src/kernels/ggml has their layouts.
enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI4,
  kU4,
  kF4E2M1,
  kGgmlQ40,
  kGgmlQ41,
  kGgmlQ50,
  kGgmlQ51,
  kGgmlQ80,
  kGgmlQ2K,
  kGgmlQ3K,
  kGgmlQ4K,
  kGgmlQ5K,
  kGgmlQ6K,
  kGgmlIq4Nl,
  kGgmlIq4Xs,
  kGgmlIq3S,
  kGgmlIq3Xxs,
  kGgmlIq2S,
  kGgmlIq2Xs,
  kGgmlIq2Xxs,
  kGgmlIq1S,
  kGgmlIq1M,
  kGgmlTq10,
  kGgmlTq20,
  kGgmlMxFp4
};

inline constexpr DType kFirstGgmlBlock = DType::kGgmlQ40;
inline constexpr DType kLastGgmlBlock = DType::kGgmlMxFp4;

// Whether elements exist only in ggml's blocks. Such a type has no bits or bytes of one element.
constexpr bool IsGgmlBlock(DType dtype) { return dtype >= kFirstGgmlBlock; }

// Elements that are stored as a whole: 32 or 256 in a block of ggml, 2 of a 4-bit type, else 1.
size_t DTypeBlock(DType dtype);

// Bytes of those elements.
size_t DTypeBlockBytes(DType dtype);

// Bits of one element: 4 to 64. Not for the blocks of ggml (SY_CHECK): ask BitsPerElement.
size_t DTypeBits(DType dtype);

// Bits that one element takes on average, what a block stores beside its codes included.
double BitsPerElement(DType dtype);

// Bytes of one element. Not for types that share bytes (SY_CHECK): ask BytesOf.
size_t DTypeBytes(DType dtype);

// Bytes of `count` elements in a row, rounded up to whole blocks.
inline size_t BytesOf(DType dtype, size_t count) {
  const size_t block = DTypeBlock(dtype);
  const size_t blocks = block == 1 ? count : (count + block - 1) / block;
  return blocks * DTypeBlockBytes(dtype);
}

// The safetensors spelling: "F32", "BF16", "F8_E4M3", …; "I4", "U4" and "F4_E2M1" are ours. Blocks
// of ggml have ggml's: "Q4_K".
std::string_view DTypeName(DType dtype);

// Reverse of DTypeName, for the types of safetensors files: those of at least a byte. False if the
// name is not one of them; `dtype` is then unchanged.
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
