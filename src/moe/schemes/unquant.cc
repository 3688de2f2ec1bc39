// Scheme "unquant" (contract 5.1): un-quantised matrices, used as they lie in the checkpoint.
#include "moe/schemes/builtin.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return !format.is_quantized() && (format.dtype == DType::kF32 || format.dtype == DType::kF16 ||
                                    format.dtype == DType::kBF16);
}

}  // namespace

extern constinit const SchemeEntry unquant{"unquant",
                                           "f32, f16 or bf16, as stored",
                                           &Accepts,
                                           "f32, f16 or bf16 without scales",
                                           ActQuantKind::kNone,
                                           QuantType::kNo,
                                           kRunners,
                                           ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
