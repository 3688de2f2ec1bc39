#include "bench_fused.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"

namespace switchyard::cli {
namespace {

using namespace std::chrono_literals;

Deadline Limit() { return Deadline::After(2min, "bench"); }

// splitmix64
uint64_t Next(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

moe::ExpertParallelOptions LowLatency(size_t max_tokens) {
  moe::ExpertParallelOptions options;
  options.max_tokens_per_rank = max_tokens;
  options.num_max_dispatch_tokens_per_rank = max_tokens;
  options.deepep_mode = moe::DeepepMode::kLowLatency;
  options.tokens_are_replicated = false;
  options.timeout = 2min;
  return options;
}

moe::MoeLayerConfig LayerConfigOf(const moe::MoeRunnerConfig& config, std::string_view scheme) {
  moe::MoeLayerConfig layer;
  layer.topk.num_experts = config.num_experts;
  layer.topk.top_k = config.top_k;
  layer.scheme_w13 = layer.scheme_w2 = scheme;
  return layer;
}

}  // namespace

RandomExperts::RandomExperts(const moe::MoeRunnerConfig& config, std::string_view scheme,
                             uint64_t seed)
    : is_int8_(scheme == "w8a8_int8"), num_experts_(config.num_local_experts), state_(seed) {
  const size_t h = config.hidden_size, i = config.intermediate_size_per_partition;
  weights_.hidden_size = h;
  weights_.intermediate_size = i;
  weights_.w1 = MakeBank(i, h);
  weights_.w3 = MakeBank(i, h);
  weights_.w2 = MakeBank(h, i);
}

const std::byte* RandomExperts::MakeMatrix(size_t bytes) {
  const size_t words = (bytes + 7) / 8 + 8;  // kernels read a little past the end
  memory_.push_back(std::make_unique_for_overwrite<uint64_t[]>(words));
  // bf16: both signs, exponents of 2^-7 and 2^-6, any mantissa.
  constexpr uint64_t kKeep = 0x80FF80FF80FF80FFu, kSet = 0x3C003C003C003C00u;
  for (size_t w = 0; w < words; ++w) {
    const uint64_t bits = Next(state_);
    memory_.back()[w] = is_int8_ ? bits : (bits & kKeep) | kSet;
  }
  return reinterpret_cast<const std::byte*>(memory_.back().get());
}

moe::ExpertBank RandomExperts::MakeBank(size_t rows, size_t cols) {
  moe::ExpertBank bank;
  bank.rows = rows;
  bank.cols = cols;
  bank.format.dtype = is_int8_ ? DType::kI8 : DType::kBF16;
  for (size_t e = 0; e < num_experts_; ++e)
    bank.data.push_back(MakeMatrix(rows * cols * DTypeBytes(bank.format.dtype)));
  if (!is_int8_) return bank;
  bank.format.scale_dtype = DType::kF32;
  bank.format.scale_rows = 1;
  bank.format.scale_cols = cols;
  const float scale = 0.01f / std::sqrt(static_cast<float>(cols));
  scales_.push_back(std::make_unique<std::vector<float>>(rows + 16, scale));
  bank.scale.assign(num_experts_, reinterpret_cast<const std::byte*>(scales_.back()->data()));
  return bank;
}

moe::MoeQuantInfo RandomExperts::Info() const {
  moe::MoeQuantInfo info;
  info.w1 = weights_.w1.View();
  info.w3 = weights_.w3.View();
  info.w2 = weights_.w2.View();
  if (is_int8_) info.a13.kind = info.a2.kind = ActQuantKind::kInt8Token;
  return info;
}

FusedComparison::FusedComparison(ExecContext& context, ParallelGroups& groups,
                                 const moe::MoeRunnerConfig& config, std::string_view scheme,
                                 size_t max_tokens)
    : context_(context),
      experts_(config, scheme, groups.moe_ep().rank() + 1),
      info_(experts_.Info()),
      ep_(groups, LowLatency(max_tokens)),
      group_(groups.moe_ep().Duplicate("fuse_ep", Limit())) {
  moe::MoeLayerOptions options;
  options.runner = "aiter";
  options.a2a = "deepep";
  options.ep = &ep_;
  layer_ = std::make_unique<moe::MoeLayer>(moe::BuiltinRegistry(), LayerConfigOf(config, scheme),
                                           options, experts_.weights());
  ep_.BeginPass(moe::ForwardPhase::kDecode);
  const moe::MoeRunnerConfig& attached = layer_->runner().config();
  moe::FusedMoeOptions fused;
  fused.num_max_dispatch_tokens_per_rank = max_tokens;
  fused.timeout = 2min;
  const moe::FusedMoeShape shape = moe::FusedMoeShapeOf(attached);
  fused.buffer_mb = (moe::FusedMoeBytes(shape, max_tokens, group_->size()) >> 20) + 1;
  const auto buffer = std::make_shared<moe::FusedMoeBuffer>(*group_, shape, fused);
  for (int mode : {moe::kDispatchGmmCombineDecode, moe::kDispatchFfnCombine}) {
    fused.mode = mode;
    fused_.push_back(std::make_unique<moe::FusedMoe>(buffer, attached, fused));
  }
}

Rows FusedComparison::RunLayer(const BenchTokens& tokens) {
  return layer_->ForwardRouted(context_, tokens.Hidden(), tokens.TopK());
}

Rows FusedComparison::RunFused(int mode, const BenchTokens& tokens) {
  return fused_[static_cast<size_t>(mode - 1)]->Run(context_, tokens.Hidden(), tokens.TopK(),
                                                    info_);
}

void FusedComparison::RequireSame(const BenchTokens& tokens) {
  context_.arena.Reset();
  const Rows layer = RunLayer(tokens);
  for (int mode : {1, 2}) {
    const Rows fused = RunFused(mode, tokens);
    const size_t bytes = layer.rows * layer.cols * sizeof(float);
    if (std::memcmp(layer.data, fused.data, bytes) == 0) continue;
    throw Error(ErrorCode::kInternal,
                fmt::format("FuseEP in mode {} gives other bits than deepep and aiter", mode));
  }
}

}  // namespace switchyard::cli
