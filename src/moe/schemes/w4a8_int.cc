// Scheme "w4a8_int" (contract 5.5): ModelSlim W4A8_DYNAMIC; its scale_bias is a checksum and is not
// added.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t, size_t) { return IsGroupwise(format, DType::kI4); }

}  // namespace

extern constinit const SchemeEntry w4a8_int{
    "w4a8_int",
    "int4, a scale per channel or group, activations int8 per token",
    &Accepts,
    "int4, scale per output channel or group",
    ActQuantKind::kInt8Token,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kInt8Token};

}  // namespace switchyard::moe::schemes
