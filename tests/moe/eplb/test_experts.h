// Experts with known bytes in every kind of bank, for tests of what moves them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "switchyard/moe/eplb/expert_mover.h"
#include "switchyard/moe/registry/expert_bank.h"

namespace switchyard::testing {

// How the matrices of an expert are stored.
struct ExpertKind {
  std::string name;
  MatrixFormat format;
  bool is_gated = true;
  bool has_bias = false;
  bool is_stacked = false;      // w1 and w3 are halves of one matrix
  bool is_interleaved = false;  // … whose rows alternate
  size_t padding = 0;           // elements between rows
};

inline std::vector<ExpertKind> AllExpertKinds() {
  const MatrixFormat bf16{DType::kBF16};
  const MatrixFormat int8{DType::kI8, DType::kF32, 1, 16};
  const MatrixFormat int4_group{DType::kU4, DType::kF16, 1, 4, true};
  const MatrixFormat fp8_block{DType::kF8E4M3, DType::kF32, 4, 4};
  const MatrixFormat fp8_tensor{DType::kF8E4M3, DType::kF32, 1000, 1000};
  const MatrixFormat mxfp4{DType::kF4E2M1, DType::kF8E8M0, 1, 4};
  return {
      {.name = "bf16", .format = bf16},
      {.name = "bf16, not gated", .format = bf16, .is_gated = false},
      {.name = "bf16, biases", .format = bf16, .has_bias = true},
      {.name = "bf16, gaps", .format = bf16, .has_bias = true, .padding = 6},
      {.name = "int8 channel", .format = int8},
      {.name = "int8 channel, alternating",
       .format = int8,
       .has_bias = true,
       .is_stacked = true,
       .is_interleaved = true},
      {.name = "uint4 group, zero points", .format = int4_group, .padding = 2},
      {.name = "uint4 group, alternating",
       .format = int4_group,
       .has_bias = true,
       .is_stacked = true,
       .is_interleaved = true},
      {.name = "uint4 group, stacked", .format = int4_group, .has_bias = true, .is_stacked = true},
      {.name = "fp8 block, stacked", .format = fp8_block, .is_stacked = true},
      {.name = "fp8 tensor, alternating",
       .format = fp8_tensor,
       .is_stacked = true,
       .is_interleaved = true},
      {.name = "mxfp4", .format = mxfp4, .has_bias = true},
  };
}

// The experts of one layer on one rank. Each has memory of its own, so that nothing is right by
// accident; the bytes depend on layer, expert and kind only.
class TestExperts {
 public:
  static constexpr size_t kHidden = 16, kInner = 8;

  TestExperts(const ExpertKind& kind, size_t layer) : kind_(kind), layer_(layer) {}

  // Weights whose slot s holds the logical expert logical[s].
  moe::ExpertWeights Make(std::span<const int32_t> logical) {
    moe::ExpertWeights weights;
    weights.hidden_size = kHidden;
    weights.intermediate_size = kInner;
    const size_t inner_rows = kind_.is_stacked ? 2 * kInner : kInner;
    weights.w1 = Bank(inner_rows, kHidden, logical, 1);
    if (kind_.is_stacked) {
      std::tie(weights.w1, weights.w3) = moe::SplitGateUp(weights.w1, kind_.is_interleaved);
    } else if (kind_.is_gated) {
      weights.w3 = Bank(kInner, kHidden, logical, 3);
    }
    weights.w2 = Bank(kHidden, kInner, logical, 2);
    return weights;
  }

  // One expert, as a loader hands it over.
  moe::LoadedExpert Load(size_t logical) {
    const auto expert = static_cast<int32_t>(logical);
    const moe::ExpertWeights one = Make(std::span(&expert, 1));
    return {First(one.w1), First(one.w3), First(one.w2), nullptr};
  }

 private:
  static moe::ExpertPointers First(const moe::ExpertBank& bank) {
    moe::ExpertPointers pointers;
    if (!bank.data.empty()) pointers.data = bank.data[0];
    if (!bank.scale.empty()) pointers.scale = bank.scale[0];
    if (!bank.zero.empty()) pointers.zero = bank.zero[0];
    if (!bank.bias.empty()) pointers.bias = bank.bias[0];
    return pointers;
  }

  moe::ExpertBank Bank(size_t rows, size_t cols, std::span<const int32_t> logical, size_t index) {
    const MatrixFormat& format = kind_.format;
    moe::ExpertBank bank;
    bank.format = format;
    bank.rows = rows;
    bank.cols = cols;
    bank.stride = kind_.padding == 0 ? 0 : cols + kind_.padding;
    bank.bias_stride = kind_.padding == 0 ? 1 : 3;
    const size_t stride = cols + kind_.padding;
    size_t scales = 0;
    if (format.is_quantized()) {
      const size_t grid_cols = (cols + format.scale_cols - 1) / format.scale_cols;
      if (kind_.padding != 0) bank.scale_stride = grid_cols + 1;
      scales = (rows + format.scale_rows - 1) / format.scale_rows *
               (kind_.padding != 0 ? grid_cols + 1 : grid_cols);
    }
    for (int32_t expert : logical) {
      const auto bytes = [&](size_t count, size_t part) {
        return Bytes(count, ((static_cast<size_t>(expert) * 100 + layer_) * 10 + index) * 4 + part);
      };
      bank.data.push_back(bytes(BytesOf(format.dtype, rows * stride), 0));
      if (scales != 0) bank.scale.push_back(bytes(scales * DTypeBytes(format.scale_dtype), 1));
      if (format.has_zero) bank.zero.push_back(bytes(scales, 2));
      if (kind_.has_bias) {
        bank.bias.push_back(
            reinterpret_cast<const float*>(bytes(rows * bank.bias_stride * sizeof(float), 3)));
      }
    }
    return bank;
  }

  const std::byte* Bytes(size_t count, size_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte>& bytes = storage_.emplace_back(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    return bytes.data();
  }

  ExpertKind kind_;
  size_t layer_;
  std::deque<std::vector<std::byte>> storage_;
};

// A number that tells the values of one slot from those of any other expert: over every byte of
// weights, scales, zero points and biases, gaps left out.
inline uint64_t DigestOf(const moe::ExpertWeights& weights, size_t slot) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](const std::byte* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i)
      hash = (hash ^ static_cast<uint64_t>(bytes[i])) * 0x100000001b3;
  };
  for (const moe::ExpertBank* bank : {&weights.w1, &weights.w3, &weights.w2}) {
    const ExpertMatrices view = bank->View();
    for (size_t row = 0; row < view.rows && !view.data.empty(); ++row) {
      add(view.data[slot] + BytesOf(view.format.dtype, row * view.stride),
          BytesOf(view.format.dtype, view.cols));
      if (!view.bias.empty()) {
        add(reinterpret_cast<const std::byte*>(view.bias[slot] + row * view.bias_stride),
            sizeof(float));
      }
    }
    if (view.scale.empty()) continue;
    const MatrixFormat& format = view.format;
    const size_t grid_cols = (view.cols + format.scale_cols - 1) / format.scale_cols;
    const size_t grid_rows = (view.rows + format.scale_rows - 1) / format.scale_rows;
    for (size_t row = 0; row < grid_rows; ++row) {
      const size_t at = row * view.scale_stride;
      add(view.scale[slot] + at * DTypeBytes(format.scale_dtype),
          grid_cols * DTypeBytes(format.scale_dtype));
      if (!view.zero.empty()) add(view.zero[slot] + at, grid_cols);
    }
  }
  return hash;
}

}  // namespace switchyard::testing
