// Scheme "gguf" (contract 5.7): blocks of ggml, as they lie in the file.
#include "moe/schemes/builtin.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return IsGgmlBlock(format.dtype) && !format.is_quantized() && !format.has_zero;
}

}  // namespace

extern constinit const SchemeEntry gguf{"gguf",
                                        "blocks of ggml, activations as they are",
                                        &Accepts,
                                        "blocks of ggml",
                                        ActQuantKind::kNone,
                                        QuantType::kNo,
                                        kRunners,
                                        ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
