#include "kernels/attention/kv_codes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/quantize/quantize.h"
#include "switchyard/core/macros.h"

namespace switchyard::kernels {
namespace {

float ScaleOf(float magnitude, float largest_code) {
  if (!std::isfinite(magnitude)) return std::numeric_limits<float>::quiet_NaN();
  return std::max(magnitude / largest_code, std::numeric_limits<float>::min());
}

}  // namespace

float EncodeKvRow(const float* x, size_t n, DType dtype, void* codes) noexcept {
  const float magnitude = MaxMagnitude(x, n);
  if (dtype == DType::kI8) {
    const float scale = ScaleOf(magnitude, 127.0f);
    EncodeInt8(x, n, {.factor = 1.0f / scale, .low = -127.0f}, static_cast<int8_t*>(codes));
    return scale;
  }
  SY_CHECK(dtype == DType::kF8E4M3);
  const float scale = ScaleOf(magnitude, kE4M3Max);
  EncodeE4M3Row(x, n, scale, static_cast<uint8_t*>(codes));
  return scale;
}

}  // namespace switchyard::kernels
