#include <cmath>

#include "kernels/norm/rms_norm.h"

namespace switchyard::kernels {

void RmsNormReference(const float* x, const float* weight, size_t n, float eps, float* out) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(n) + eps);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * scale * weight[i]);
}

}  // namespace switchyard::kernels
