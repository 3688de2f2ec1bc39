#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/reference.h"

namespace switchyard::kernels {

void AttentionReference(const float* q, const void* k, const void* v, DType kv_dtype, size_t stride,
                        size_t first, size_t last, size_t head_dim, double scale, float* out) {
  std::vector<double> scores;
  double max = -std::numeric_limits<double>::infinity();
  for (size_t j = first; j < last; ++j) {
    double dot = 0;
    for (size_t d = 0; d < head_dim; ++d) dot += q[d] * ElementAt(k, kv_dtype, j * stride + d);
    scores.push_back(dot * scale);
    max = std::max(max, scores.back());
  }
  double denominator = 0;
  for (double& score : scores) {
    score = std::exp(score - max);
    denominator += score;
  }
  for (size_t d = 0; d < head_dim; ++d) {
    double sum = 0;
    for (size_t j = first; j < last; ++j)
      sum += scores[j - first] * ElementAt(v, kv_dtype, j * stride + d);
    out[d] = static_cast<float>(sum / denominator);
  }
}

}  // namespace switchyard::kernels
