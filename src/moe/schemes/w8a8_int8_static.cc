// Scheme "w8a8_int8_static" (contract 5.3, 4.1.2): the static quantiser of contract 4.1.2:
// ExpertBank::act.
#include "moe/schemes/builtin.h"
#include "moe/schemes/formats.h"

namespace switchyard::moe::schemes {
namespace {

constexpr std::string_view kRunners[] = {"aiter", "ascend", "reference"};

bool Accepts(const MatrixFormat& format, size_t rows, size_t cols) {
  return IsPerChannel(format, DType::kI8, cols) || IsPerTensor(format, DType::kI8, rows, cols);
}

}  // namespace

extern constinit const SchemeEntry w8a8_int8_static{
    "w8a8_int8_static",
    "int8, a scale per output channel, activations int8 with the checkpoint's scale",
    &Accepts,
    "int8, scale per output channel",
    ActQuantKind::kInt8Static,
    QuantType::kPerToken,
    kRunners,
    ActQuantKind::kNone};

}  // namespace switchyard::moe::schemes
