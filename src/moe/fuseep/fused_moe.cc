#include "switchyard/moe/fuseep/fused_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/elementwise/elementwise.h"
#include "moe/fuseep/combiner.h"
#include "moe/fuseep/layer.h"
#include "moe/fuseep/receiver.h"
#include "moe/fuseep/sender.h"
#include "moe/fuseep/window.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::moe {
namespace {

using fuseep::Layer;
using fuseep::Layout;
using fuseep::Window;

constexpr size_t kMb = size_t{1} << 20;

// --- What a layer must be ----------------------------------------------------------------------

[[noreturn]] void Refuse(ErrorCode code, size_t layer_id, const std::string& what) {
  throw Error(code, fmt::format("layer {}: FuseEP: {}", layer_id, what));
}

std::string DescribeFormat(const MatrixFormat& format) {
  if (!format.is_quantized()) return fmt::format("{} without scales", DTypeName(format.dtype));
  return fmt::format("{} with scales of {} per {}x{}{}", DTypeName(format.dtype),
                     DTypeName(format.scale_dtype), format.scale_rows, format.scale_cols,
                     format.has_zero ? " and zero points" : "");
}

bool IsSupported(const ExpertKernel& kernel, size_t cols) {
  const MatrixFormat& format = kernel.format;
  const bool plain = kernel.act.kind == ActQuantKind::kNone;
  if (!format.is_quantized()) {
    return plain && (format.dtype == DType::kF32 || format.dtype == DType::kBF16 ||
                     format.dtype == DType::kF16);
  }
  return format.dtype == DType::kI8 && format.scale_rows == 1 && format.scale_cols >= cols &&
         !format.has_zero && (plain || kernel.act.kind == ActQuantKind::kInt8Token);
}

void RequireSupported(const ExpertKernel& kernel, std::string_view name, size_t cols,
                      size_t layer_id) {
  if (IsSupported(kernel, cols)) return;
  Refuse(ErrorCode::kUnsupported, layer_id,
         fmt::format("{} is {} with activations {}; W8A8 (int8 weights with a scale per output "
                     "channel, activations int8_token) and un-quantised f32, bf16 and f16 weights "
                     "are all that it computes",
                     name, DescribeFormat(kernel.format), ActQuantKindName(kernel.act.kind)));
}

void RequireConfig(const MoeRunnerConfig& config) {
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    Refuse(code, config.layer_id, what);
  };
  if (!config.w13_kernel || !config.w2_kernel)
    refuse(ErrorCode::kInvalidArgument, "the config has no w13_kernel or no w2_kernel");
  if (config.formula.entry.f32 == nullptr)
    refuse(ErrorCode::kInvalidArgument, "the config has no formula (ResolveActivation)");
  RequireSupported(*config.w13_kernel, "w13", config.hidden_size, config.layer_id);
  RequireSupported(*config.w2_kernel, "w2 (down)", config.intermediate_size_per_partition,
                   config.layer_id);
  if (config.no_combine)
    refuse(ErrorCode::kUnsupported, "no_combine cannot be: the operation ends with the sum");
  if (config.apply_router_weight_on_input && config.top_k != 1)
    refuse(ErrorCode::kUnsupported,
           fmt::format("apply_router_weight_on_input needs top_k 1, found {}", config.top_k));
}

// Rows travel as elements, not as records for panels.
MatrixFormat WireFormat(MatrixFormat weights) {
  weights.in_panels = false;
  return weights;
}

DType RowDType(const MoeRunnerConfig& config) {
  return quant::ExpertRowDType(config.w13_kernel->act, WireFormat(config.w13_kernel->format),
                               config.hidden_size, config.activation_dtype);
}

Layer MakeLayer(const MoeRunnerConfig& config, const FusedMoeOptions& options) {
  RequireConfig(config);
  if (options.mode != kDispatchGmmCombineDecode && options.mode != kDispatchFfnCombine) {
    Refuse(ErrorCode::kInvalidArgument, config.layer_id,
           fmt::format("setting fuseep-mode must be 1 (dispatch_gmm_combine_decode) or 2 "
                       "(dispatch_ffn_combine), found {}",
                       options.mode));
  }
  return {config,           options.mode,
          options.timeout,  fuseep::Names(config.layer_id),
          RowDType(config), config.w13_kernel->act.kind != ActQuantKind::kNone};
}

void RequireFits(const Layer& layer, const FusedMoeShape& buffer) {
  const FusedMoeShape shape = FusedMoeShapeOf(layer.config);
  if (shape.hidden_size == buffer.hidden_size && shape.top_k == buffer.top_k &&
      shape.num_local_experts == buffer.num_local_experts && shape.row_bytes <= buffer.row_bytes)
    return;
  Refuse(ErrorCode::kInvalidArgument, layer.config.layer_id,
         fmt::format("the layer has hidden size {}, top_k {}, {} local experts and rows of {} "
                     "bytes, its buffer is for {}, {}, {} and {}",
                     shape.hidden_size, shape.top_k, shape.num_local_experts, shape.row_bytes,
                     buffer.hidden_size, buffer.top_k, buffer.num_local_experts, buffer.row_bytes));
}

// --- What ranks must agree on ------------------------------------------------------------------

struct Fact {
  std::string_view name;
  uint64_t value;
};

// Errors: kInvalidArgument on all ranks, naming the first fact that differs.
template <size_t kCount>
void RequireSame(ProcessGroup& group, const std::string& who, const std::array<Fact, kCount>& mine,
                 const Deadline& deadline) {
  std::array<uint64_t, kCount> values;
  for (size_t i = 0; i < kCount; ++i) values[i] = mine[i].value;
  const auto all = AllGatherValue(group, values, deadline);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t i = 0; i < kCount; ++i) {
      if (all[rank][i] == all[0][i]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: ranks disagree: {} is {} on rank 0 and {} on rank {}", who,
                              mine[i].name, all[0][i], all[rank][i], rank));
    }
  }
}

void RequireOneNode(ProcessGroup& group) {
  if (group.node_peers().size() == group.size()) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("FuseEP runs inside a node: {} of the {} ranks of group \"{}\" are on the "
                  "node of rank {}; take another --moe-a2a",
                  group.node_peers().size(), group.size(), group.name(), group.rank()));
}

void RequireEnough(const Layout& layout, const FusedMoeOptions& options) {
  const FusedBufferLimit limit = ResolveFusedBuffer(options);
  const size_t needed = (layout.bytes() + kMb - 1) / kMb;
  if (needed <= limit.mb) return;
  throw Error(
      ErrorCode::kResourceExhausted,
      fmt::format("FuseEP: setting moe-fused-buffer-mb is {} (from {}), but {} MB are needed "
                  "for {} tokens (num-max-dispatch-tokens-per-rank) of hidden size {} with "
                  "top_k {} on each of {} ranks",
                  limit.mb, limit.source, needed, layout.max_tokens, layout.shape.hidden_size,
                  layout.shape.top_k, layout.num_ranks));
}

// --- What a call must be -----------------------------------------------------------------------

void RequireWeights(const MoeQuantInfo& weights, const Layer& layer, const FusedMoeShape& shape) {
  const MoeRunnerConfig& config = layer.config;
  RequireExperts(weights, {}, config.is_gated, config.layer_id);
  const auto refuse = [&](const std::string& what) {
    Refuse(ErrorCode::kInvalidArgument, config.layer_id, what);
  };
  if (weights.w1.num_experts() != shape.num_local_experts || weights.w1.cols != shape.hidden_size)
    refuse(fmt::format("weights of {} experts with {} columns, expected {} with {}",
                       weights.w1.num_experts(), weights.w1.cols, shape.num_local_experts,
                       shape.hidden_size));
  const auto same = [&](const ExpertMatrices& w, const ActQuant& act, const ExpertKernel& kernel) {
    if (w.format == kernel.format && act.kind == kernel.act.kind) return;
    refuse(fmt::format("weights are {} with activations {}, the layer was built for {} with {}",
                       DescribeFormat(w.format), ActQuantKindName(act.kind),
                       DescribeFormat(kernel.format), ActQuantKindName(kernel.act.kind)));
  };
  same(weights.w1, weights.a13, *config.w13_kernel);
  if (config.is_gated) same(weights.w3, weights.a13, *config.w13_kernel);
  same(weights.w2, weights.a2, *config.w2_kernel);
  if (weights.hidden_pad != 0 || weights.intermediate_pad != 0)
    Refuse(ErrorCode::kUnsupported, config.layer_id, "weights with padded columns");
}

void RequireTokens(ConstRows hidden, const TopKOutput& topk, const Layer& layer,
                   const FusedMoeShape& shape, size_t max_tokens) {
  const size_t layer_id = layer.config.layer_id;
  const auto refuse = [&](const std::string& what) {
    Refuse(ErrorCode::kInvalidArgument, layer_id, what);
  };
  if (hidden.rows > max_tokens)
    refuse(fmt::format("{} tokens on this rank, setting num-max-dispatch-tokens-per-rank allows {}",
                       hidden.rows, max_tokens));
  RequireRouting(topk, hidden.rows, layer_id);
  if (hidden.rows != 0 && (hidden.cols != shape.hidden_size || topk.top_k != shape.top_k))
    refuse(fmt::format("hidden states have {} columns and routing has top_k {}, expected {} and {}",
                       hidden.cols, topk.top_k, shape.hidden_size, shape.top_k));
}

void RequireIds(const TopKOutput& topk, size_t num_experts, size_t layer_id) {
  for (size_t slot = 0; slot < topk.ids.size(); ++slot) {
    const int64_t id = topk.ids[slot];
    if (id >= -1 && id < static_cast<int64_t>(num_experts)) continue;
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("token {} names expert {}; ids are -1 to {}", slot / topk.top_k, id,
                       num_experts - 1));
  }
}

// --- A step ------------------------------------------------------------------------------------

// Tokens as gemm1 multiplies them: what runner "aiter" makes of them too.
quant::ActRows PrepareRows(ExecContext& context, ConstRows hidden, const TopKOutput& topk,
                           const MoeQuantInfo& weights, const MoeRunnerConfig& config) {
  ConstRows x = hidden;
  if (config.apply_router_weight_on_input) {
    const Rows weighted = context.arena.AllocateRows(hidden.rows, hidden.cols);
    for (size_t t = 0; t < hidden.rows; ++t) {
      std::copy_n(hidden.Row(t), hidden.cols, weighted.Row(t));
      kernels::Scale(weighted.Row(t), topk.weights[t], hidden.cols);
    }
    x = weighted;
  }
  return quant::PrepareExpertRows(context, QuantRows::Plain(x), weights.a13,
                                  WireFormat(weights.w1.format), config.activation_dtype);
}

void RunStep(ExecContext& context, Window& window, const Layer& layer, const quant::ActRows& rows,
             const TopKOutput& topk, const MoeQuantInfo& weights, Rows out) {
  fuseep::Sender sender(context, window, topk, rows);
  fuseep::Receiver receiver(context, window, layer, weights);
  fuseep::Combiner combiner(context, window, sender, topk, layer.config, out);
  sender.Send();
  while (!receiver.finished() || !combiner.finished()) {
    // Others wait for what is computed here, so that comes first.
    if (receiver.Advance() || combiner.Advance()) continue;
    if (receiver.finished() && combiner.finished()) return;
    const bool dispatching = !receiver.finished();
    window.Wait([&] { return receiver.HasNews() || combiner.HasNews(); }, layer.timeout,
                dispatching ? layer.names.dispatch : layer.names.combine,
                [&] {
                  return dispatching ? fmt::format("not all tokens have come from {}",
                                                   fuseep::RankList(receiver.Late()))
                                     : fmt::format("not all rows have come home from {}",
                                                   fuseep::RankList(combiner.Late()));
                });
  }
}

}  // namespace

FusedBufferLimit ResolveFusedBuffer(const FusedMoeOptions& options) {
  if (options.buffer_mb != 0) return {options.buffer_mb, "moe-fused-buffer-mb"};
  return ResolveFusedBuffer(options, Settings::FromEnvironment());
}

FusedBufferLimit ResolveFusedBuffer(const FusedMoeOptions& options, const Settings& settings) {
  constexpr std::string_view kSetting = "moe-fused-buffer-mb";
  if (options.buffer_mb != 0) return {options.buffer_mb, std::string(kSetting)};
  return {settings.GetCount(kSetting), settings.Source(kSetting)};
}

FusedMoeShape FusedMoeShapeOf(const MoeRunnerConfig& config) {
  RequireConfig(config);
  return {config.hidden_size, config.top_k, config.num_local_experts,
          BytesOf(RowDType(config), config.hidden_size)};
}

size_t FusedMoeBytes(const FusedMoeShape& shape, size_t num_max_dispatch_tokens_per_rank,
                     size_t num_ranks) {
  return Layout(shape, num_max_dispatch_tokens_per_rank, num_ranks).bytes();
}

FusedMoeBuffer::FusedMoeBuffer(ProcessGroup& fuse_ep, const FusedMoeShape& shape,
                               const FusedMoeOptions& options)
    : group_(fuse_ep), shape_(shape), max_tokens_(options.num_max_dispatch_tokens_per_rank) {
  const Deadline deadline = Deadline::After(options.timeout, "make the FuseEP buffer");
  RunTogether(group_, deadline, [&] {
    RequireOneNode(group_);
    const Layout layout(shape, max_tokens_, group_.size());
    RequireEnough(layout, options);
    shape_ = layout.shape;
    bytes_ = layout.bytes();
  });
  RequireSame<6>(group_, "FuseEP buffer",
                 {{{"hidden_size", shape_.hidden_size},
                   {"top_k", shape_.top_k},
                   {"num_local_experts", shape_.num_local_experts},
                   {"row_bytes", shape_.row_bytes},
                   {"num-max-dispatch-tokens-per-rank", max_tokens_},
                   {"first_epoch", options.first_epoch}}},
                 deadline);
  window_ = std::make_unique<Window>(group_, Layout(shape_, max_tokens_, group_.size()), options);
}

FusedMoeBuffer::~FusedMoeBuffer() = default;

FusedMoe::FusedMoe(std::shared_ptr<FusedMoeBuffer> buffer, const MoeRunnerConfig& config,
                   const FusedMoeOptions& options)
    : buffer_(std::move(buffer)) {
  ProcessGroup& group = buffer_->group();
  const Deadline deadline = Deadline::After(options.timeout, "make a FuseEP layer");
  RunTogether(group, deadline, [&] {
    layer_ = std::make_unique<const Layer>(MakeLayer(config, options));
    RequireFits(*layer_, buffer_->shape());
  });
  RequireSame<3>(group, layer_->names.layer,
                 {{{"layer_id", config.layer_id},
                   {"the type of rows that travel", static_cast<uint64_t>(layer_->row_dtype)},
                   {"whether they have scales", layer_->rows_are_codes ? 1u : 0u}}},
                 deadline);
}

FusedMoe::FusedMoe(ProcessGroup& fuse_ep, const MoeRunnerConfig& config,
                   const FusedMoeOptions& options)
    : FusedMoe(
          [&] {
            FusedMoeShape shape;
            RunTogether(fuse_ep, Deadline::After(options.timeout, "make a FuseEP layer"),
                        [&] { shape = FusedMoeShapeOf(config); });
            return std::make_shared<FusedMoeBuffer>(fuse_ep, shape, options);
          }(),
          config, options) {}

FusedMoe::~FusedMoe() = default;

DType FusedMoe::wire_dtype() const { return layer_->row_dtype; }

Rows FusedMoe::Run(ExecContext& context, ConstRows hidden, const TopKOutput& topk,
                   const MoeQuantInfo& weights) {
  const FusedMoeShape& shape = buffer_->shape();
  const MoeRunnerConfig& config = layer_->config;
  Window& window = buffer_->window();
  window.Begin(layer_->names, layer_->timeout);
  try {
    RequireWeights(weights, *layer_, shape);
    RequireTokens(hidden, topk, *layer_, shape, buffer_->max_tokens_per_rank());
    RequireIds(topk, window.num_ranks() * shape.num_local_experts, config.layer_id);
    const Rows out = context.arena.AllocateRows(hidden.rows, shape.hidden_size);
    ArenaScope scope(context.arena);
    const quant::ActRows rows = PrepareRows(context, hidden, topk, weights, config);
    SY_CHECK(rows.dtype == layer_->row_dtype);
    RunStep(context, window, *layer_, rows, topk, weights, out);
    return out;
  } catch (...) {
    window.Abandon();
    throw;
  }
}

}  // namespace switchyard::moe
