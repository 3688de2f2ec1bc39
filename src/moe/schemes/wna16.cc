// Scheme "wna16" (contract 5.8, 5.12): compressed-tensors pack-quantized and symmetric GPTQ.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  const bool is_signed = IsGroupwise(format, DType::kI4) || IsGroupwise(format, DType::kI8);
  const bool is_unsigned = IsGroupwise(format, DType::kU4) || IsGroupwise(format, DType::kU8);
  return format.has_zero ? is_unsigned : is_signed;
}

}  // namespace

extern constinit const SchemeEntry wna16{
    "wna16",
    "4- or 8-bit groups, symmetric or with zero points, activations as they are",
    &Accepts,
    "int4 or int8, scale per group; u4 or u8, scale and zero point per group",
    ActQuantKind::kNone,
    QuantType::kNo,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
