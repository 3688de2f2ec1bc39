#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/reference.h"

namespace switchyard::kernels {

void AttentionReference(const PlainAttention& args, size_t first, size_t last, float* out) {
  std::vector<double> scores;
  double max = -std::numeric_limits<double>::infinity();
  for (size_t j = first; j < last; ++j) {
    double dot = 0;
    for (size_t d = 0; d < args.key_dim; ++d)
      dot += args.q[d] * ElementAt(args.k, args.kv_dtype, j * args.key_dim + d);
    scores.push_back(dot * args.scale);
    max = std::max(max, scores.back());
  }
  double denominator = 0;
  for (double& score : scores) {
    score = std::exp(score - max);
    denominator += score;
  }
  for (size_t d = 0; d < args.value_dim; ++d) {
    double sum = 0;
    for (size_t j = first; j < last; ++j)
      sum += scores[j - first] * ElementAt(args.v, args.kv_dtype, j * args.value_stride + d);
    out[d] = static_cast<float>(sum / denominator);
  }
}

}  // namespace switchyard::kernels
