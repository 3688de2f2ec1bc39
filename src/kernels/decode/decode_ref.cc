#include "kernels/decode/decode.h"
#include "kernels/ggml/ggml.h"
#include "kernels/reference.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::kernels {
namespace {

uint8_t NibbleAt(const void* q, size_t i) {
  const uint8_t byte = static_cast<const uint8_t*>(q)[i / 2];
  return i % 2 == 0 ? byte & 15 : byte >> 4;
}

// The element of a block of ggml, whose definition is that of the whole block.
float GgmlElementAt(DType dtype, const void* q, size_t i) {
  float block[256];
  const size_t elements = DTypeBlock(dtype);
  const auto* bytes = static_cast<const uint8_t*>(q) + i / elements * DTypeBlockBytes(dtype);
  DecodeGgmlRowReference(dtype, bytes, elements, block);
  return block[i % elements];
}

}  // namespace

float ScaleAt(DType scale_dtype, const void* scale, size_t i) {
  switch (scale_dtype) {
    case DType::kF32: return static_cast<const float*>(scale)[i];
    case DType::kF16: return ToFloat(static_cast<const F16*>(scale)[i]);
    case DType::kBF16: return ToFloat(static_cast<const BF16*>(scale)[i]);
    case DType::kF8E8M0: return DecodeE8M0(static_cast<const uint8_t*>(scale)[i]);
    case DType::kF8E4M3: return DecodeE4M3(static_cast<const uint8_t*>(scale)[i]);
    default: SY_CHECK(false && "a dtype of scales"); return 0;
  }
}

namespace {

size_t GroupOfColumn(const CodeRow& row, size_t k) {
  return row.column_group == nullptr ? k / row.group : static_cast<size_t>(row.column_group[k]);
}

}  // namespace

float ScaleOfColumn(const CodeRow& row, size_t k) {
  if (row.scale == nullptr) return 1.0f;
  return ScaleAt(row.scale_dtype, row.scale, GroupOfColumn(row, k)) * row.tensor_scale;
}

float ZeroOfColumn(const CodeRow& row, size_t k) {
  return row.zero == nullptr ? 0.0f : static_cast<float>(row.zero[GroupOfColumn(row, k)]);
}

double CodeAt(DType dtype, const void* q, size_t i) {
  switch (dtype) {
    case DType::kI8: return static_cast<const int8_t*>(q)[i];
    case DType::kU8: return static_cast<const uint8_t*>(q)[i];
    case DType::kI4: return (NibbleAt(q, i) ^ 8) - 8;
    case DType::kU4: return NibbleAt(q, i);
    case DType::kF8E4M3: return DecodeE4M3(static_cast<const uint8_t*>(q)[i]);
    case DType::kF4E2M1: return DecodeE2M1(NibbleAt(q, i));
    default: return IsGgmlBlock(dtype) ? GgmlElementAt(dtype, q, i) : ElementAt(q, dtype, i);
  }
}

void DecodeRowReference(const CodeRow& row, float* out) {
  if (IsGgmlBlock(row.dtype) && row.n % DTypeBlock(row.dtype) == 0)
    return DecodeGgmlRowReference(row.dtype, row.q, row.n, out);
  for (size_t i = 0; i < row.n; ++i) {
    const float value = static_cast<float>(CodeAt(row.dtype, row.q, i)) - ZeroOfColumn(row, i);
    out[i] = value * ScaleOfColumn(row, i);
  }
}

}  // namespace switchyard::kernels
