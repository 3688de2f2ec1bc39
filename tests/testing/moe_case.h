// A random MoE layer and its f64 oracle, written independently of the runners.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/convert/convert.h"
#include "kernels/reference.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/registry/registry.h"
#include "testing/random.h"

namespace switchyard::testing {

// Weights of `experts` experts in one type; w1, w3 [I, H], w2 [H, I].
class MoeCase {
 public:
  MoeCase(size_t experts, size_t hidden, size_t intermediate, DType dtype, std::mt19937_64& random)
      : experts_(experts), hidden_(hidden), intermediate_(intermediate), dtype_(dtype) {
    for (std::vector<std::byte>* bank : {&w1_, &w3_, &w2_}) {
      const std::vector<float> values = RandomFloats(random, experts * hidden * intermediate, 0.2f);
      bank->resize(values.size() * DTypeBytes(dtype));
      kernels::ConvertFromF32(values.data(), values.size(), dtype, bank->data());
    }
  }

  size_t experts() const { return experts_; }
  size_t hidden() const { return hidden_; }
  size_t intermediate() const { return intermediate_; }
  std::vector<std::byte>& w2() { return w2_; }

  moe::ExpertWeights Weights() const {
    moe::ExpertWeights weights;
    weights.hidden_size = hidden_;
    weights.intermediate_size = intermediate_;
    weights.w1 = Bank(w1_, intermediate_, hidden_);
    weights.w3 = Bank(w3_, intermediate_, hidden_);
    weights.w2 = Bank(w2_, hidden_, intermediate_);
    return weights;
  }

  // sum over k of weight[k] * W2 (silu(W1 x) * W3 x), all in f64; ids of -1 add nothing. With
  // `absolute`, every term of the last product counts by its absolute value: the size that rounding
  // errors are relative to, however much the terms cancel.
  std::vector<double> Oracle(const float* x, const int32_t* ids, const float* weights, size_t top_k,
                             bool absolute = false) const {
    const auto term = [absolute](double value) { return absolute ? std::abs(value) : value; };
    std::vector<double> out(hidden_, 0.0);
    for (size_t k = 0; k < top_k; ++k) {
      if (ids[k] < 0) continue;
      const auto expert = static_cast<size_t>(ids[k]);
      const size_t base = expert * hidden_ * intermediate_;
      std::vector<double> inner(intermediate_);
      for (size_t i = 0; i < intermediate_; ++i) {
        double gate = 0;
        double up = 0;
        for (size_t h = 0; h < hidden_; ++h) {
          gate += kernels::ElementAt(w1_.data(), dtype_, base + i * hidden_ + h) * x[h];
          up += kernels::ElementAt(w3_.data(), dtype_, base + i * hidden_ + h) * x[h];
        }
        inner[i] = gate / (1 + std::exp(-gate)) * up;
      }
      for (size_t h = 0; h < hidden_; ++h) {
        double sum = 0;
        for (size_t i = 0; i < intermediate_; ++i) {
          sum +=
              term(kernels::ElementAt(w2_.data(), dtype_, base + h * intermediate_ + i) * inner[i]);
        }
        out[h] += term(weights[k] * sum);
      }
    }
    return out;
  }

 private:
  moe::ExpertBank Bank(const std::vector<std::byte>& bytes, size_t rows, size_t cols) const {
    moe::ExpertBank bank;
    bank.format.dtype = dtype_;
    bank.rows = rows;
    bank.cols = cols;
    for (size_t e = 0; e < experts_; ++e)
      bank.data.push_back(bytes.data() + e * rows * cols * DTypeBytes(dtype_));
    return bank;
  }

  size_t experts_, hidden_, intermediate_;
  DType dtype_;
  std::vector<std::byte> w1_, w3_, w2_;
};

// L2 distance of rows to f64 rows, relative to the L2 norm of `size`.
inline double RelativeL2(ConstRows rows, const std::vector<std::vector<double>>& expected,
                         const std::vector<std::vector<double>>& size) {
  double error = 0;
  double norm = 0;
  for (size_t t = 0; t < rows.rows; ++t) {
    for (size_t h = 0; h < rows.cols; ++h) {
      const double difference = rows.Row(t)[h] - expected[t][h];
      error += difference * difference;
      norm += size[t][h] * size[t][h];
    }
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace switchyard::testing
