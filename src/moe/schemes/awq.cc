// Scheme "awq" (contract 5.6): AutoAWQ's gemm layout after unpacking.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) {
  return format.has_zero && IsGroupwise(format, DType::kU4);
}

}  // namespace

extern constinit const SchemeEntry awq{"awq",
                                       "4-bit groups with zero points, activations as they are",
                                       &Accepts,
                                       "u4, scale and zero point per group",
                                       ActQuantKind::kNone,
                                       QuantType::kNo,
                                       kRunners,
                                       ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
