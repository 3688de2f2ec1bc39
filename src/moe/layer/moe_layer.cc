#include "switchyard/moe/layer/moe_layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "moe/layer/wire_config.h"
#include "quant/linear.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/moe/fuseep/fused_moe.h"
#include "switchyard/moe/registry/activation.h"
#include "switchyard/moe/routing/select_experts.h"

namespace switchyard::moe {
namespace {

// The backend that bypasses dispatcher and runner.
constexpr std::string_view kFuseEp = "ascend_fuseep";

[[noreturn]] void Refuse(ErrorCode code, size_t layer_id, const std::string& what) {
  throw Error(code, fmt::format("layer {}: {}", layer_id, what));
}

// Runners that compute both schemes, best first.
std::vector<std::string_view> CommonRunners(const SchemeEntry& w13, const SchemeEntry& w2) {
  std::vector<std::string_view> common;
  for (std::string_view runner : w13.runners) {
    if (std::find(w2.runners.begin(), w2.runners.end(), runner) != w2.runners.end())
      common.push_back(runner);
  }
  return common;
}

// "auto" is the schemes' first choice; anything else must be registered, and on their lists.
std::string ChooseRunner(const Registry& registry, const SchemeEntry& w13, const SchemeEntry& w2,
                         const MoeLayerOptions& options, size_t layer_id) {
  const std::vector<std::string_view> able = CommonRunners(w13, w2);
  if (options.runner != "auto") registry.FindRunner(options.runner);
  const bool listed = std::find(able.begin(), able.end(), options.runner) != able.end();
  if (able.empty() || (options.runner != "auto" && !listed)) {
    const std::string schemes =
        w13.name == w2.name ? fmt::format("scheme {}", w13.name)
                            : fmt::format("schemes {} (w13) and {} (w2)", w13.name, w2.name);
    Refuse(ErrorCode::kUnsupported, layer_id,
           fmt::format("runner {} does not compute {}; runners that do: {}", options.runner,
                       schemes, able.empty() ? "none" : fmt::format("{}", fmt::join(able, ", "))));
  }
  return options.runner == "auto" ? std::string(able.front()) : options.runner;
}

std::string DescribeFormat(const MatrixFormat& format) {
  if (!format.is_quantized()) return fmt::format("{} without scales", DTypeName(format.dtype));
  return fmt::format("{} with scales of {} per {}x{}{}", DTypeName(format.dtype),
                     DTypeName(format.scale_dtype), format.scale_rows, format.scale_cols,
                     format.has_zero ? " and zero points" : "");
}

// Number of experts, shape, format and the lists that the format needs.
void CheckBank(const ExpertBank& bank, std::string_view name, const SchemeEntry& scheme,
               size_t experts, size_t rows, size_t cols, size_t layer_id) {
  const auto refuse = [&](const std::string& what) {
    Refuse(ErrorCode::kInvalidArgument, layer_id, fmt::format("{}: {}", name, what));
  };
  if (bank.data.size() != experts)
    refuse(fmt::format("{} experts are routed to, weights of {} were given", experts,
                       bank.data.size()));
  if (bank.rows != rows || bank.cols != cols)
    refuse(fmt::format("expected [{}, {}], found [{}, {}]", rows, cols, bank.rows, bank.cols));
  if (!scheme.accepts(bank.format, rows, cols)) {
    refuse(fmt::format("scheme {} holds {}; found {}", scheme.name, scheme.format_summary,
                       DescribeFormat(bank.format)));
  }
  const size_t stride = bank.stride == 0 ? cols : bank.stride;
  if (stride < cols || stride % DTypeBlock(bank.format.dtype) != 0)
    refuse(fmt::format("rows of {} {} values cannot start every {} values", cols,
                       DTypeName(bank.format.dtype), stride));
  const bool lies_apart = !bank.format.in_panels;  // what else a matrix has
  if (lies_apart && bank.format.is_quantized() && bank.scale.size() != experts)
    refuse(fmt::format("scheme {} needs scales of {} experts, found {}", scheme.name, experts,
                       bank.scale.size()));
  if (lies_apart && bank.format.has_zero && bank.zero.size() != experts)
    refuse(fmt::format("scheme {} needs zero points of {} experts, found {}", scheme.name, experts,
                       bank.zero.size()));
  if (lies_apart && bank.format.has_tensor_scale && bank.tensor_scale.size() != experts)
    refuse(fmt::format("scheme {} needs tensor scales of {} experts, found {}", scheme.name,
                       experts, bank.tensor_scale.size()));
  if (bank.format.has_column_groups && bank.column_group.size() != experts)
    refuse(fmt::format("scheme {} needs column groups of {} experts, found {}", scheme.name,
                       experts, bank.column_group.size()));
  if (!bank.bias.empty() && bank.bias.size() != experts)
    refuse(fmt::format("biases of {} experts were given, expected {}", bank.bias.size(), experts));
  const auto missing = [](const auto& list) {
    return std::find(list.begin(), list.end(), nullptr) != list.end();
  };
  if (missing(bank.data) || missing(bank.scale) || missing(bank.zero) || missing(bank.bias) ||
      missing(bank.tensor_scale) || missing(bank.column_group))
    refuse("the data, scale, zero point or bias of an expert is missing (null)");
}

// Routed physical experts, then the fused shared ones.
size_t NumGlobalExperts(const MoeLayerConfig& config) {
  const size_t routed =
      config.num_physical_experts != 0 ? config.num_physical_experts : config.topk.num_experts;
  return routed + config.topk.num_fused_shared_experts;
}

// The factor belongs in one place (contract 2.6), and shared columns are divided by the factor that
// the runner will multiply with (2.7).
void CheckScaling(const MoeLayerConfig& config) {
  const double factor = config.runner.routed_scaling_factor;
  if (!(factor > 0) || !std::isfinite(factor))
    Refuse(ErrorCode::kInvalidArgument, config.runner.layer_id,
           fmt::format("routed_scaling_factor must be positive and finite, found {}", factor));
  if (config.topk.num_fused_shared_experts != 0 && factor != 1.0 &&
      config.topk.routed_scaling_factor != factor)
    Refuse(ErrorCode::kInvalidArgument, config.runner.layer_id,
           fmt::format("the router divides the weights of shared experts by routed_scaling_factor "
                       "{}, the runner multiplies with {}: they must be equal",
                       config.topk.routed_scaling_factor, factor));
  if (config.topk.apply_routed_scaling_factor_on_output &&
      config.topk.routed_scaling_factor != 1.0 && config.runner.routed_scaling_factor != 1.0) {
    Refuse(
        ErrorCode::kInvalidArgument, config.runner.layer_id,
        fmt::format("routed_scaling_factor is in the router's weights ({}) and in the runner ({}): "
                    "it must be applied once",
                    config.topk.routed_scaling_factor, config.runner.routed_scaling_factor));
  }
}

// 1 for the physical experts of this rank.
std::vector<int32_t> MaskOfRank(const MoeLayerConfig& config, const ExpertParallel& ep) {
  const size_t layer_id = config.runner.layer_id;
  const size_t experts = NumGlobalExperts(config);
  if (config.topk.num_fused_shared_experts != 0 && ep.ep_size() > 1) {
    Refuse(ErrorCode::kUnsupported, layer_id,
           fmt::format("{} fused shared experts cannot be spread over {} ranks: run them beside "
                       "the layer, or on one rank",
                       config.topk.num_fused_shared_experts, ep.ep_size()));
  }
  if (ep.ep_size() > experts) {
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("--moe-ep-size {}: the layer has only {} experts, and each rank needs one; "
                       "take fewer ranks, or copies (--ep-num-redundant-experts {})",
                       ep.ep_size(), experts, ep.ep_size() - experts));
  }
  if (experts % ep.ep_size() != 0) {
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("{} experts cannot be divided evenly among {} ranks; take another "
                       "--moe-ep-size, or copies (--ep-num-redundant-experts {})",
                       experts, ep.ep_size(), ep.ep_size() - experts % ep.ep_size()));
  }
  const size_t local = experts / ep.ep_size();
  std::vector<int32_t> mask(experts, 0);
  std::fill_n(mask.begin() + static_cast<std::ptrdiff_t>(ep.ep_rank() * local), local, 1);
  return mask;
}

void CheckWeights(const MoeLayerConfig& config, const ExpertWeights& weights,
                  const SchemeEntry& w13, const SchemeEntry& w2) {
  const size_t layer_id = config.runner.layer_id;
  size_t experts = NumGlobalExperts(config);
  if (!config.expert_mask.empty()) {
    if (config.expert_mask.size() < experts)
      Refuse(ErrorCode::kInvalidArgument, layer_id,
             fmt::format("the expert mask has {} entries, expected {}", config.expert_mask.size(),
                         experts));
    experts =
        static_cast<size_t>(std::count_if(config.expert_mask.begin(), config.expert_mask.end(),
                                          [](int32_t local) { return local != 0; }));
  }
  const size_t h = weights.hidden_size;
  const size_t i = weights.intermediate_size;
  if (h == 0 || i == 0)
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("hidden_size {} and intermediate_size {} must not be 0", h, i));
  if (config.hidden_pad >= h || config.intermediate_pad >= i)
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("of {} x {} columns (hidden, intermediate), {} x {} are padding: nothing is "
                       "left",
                       h, i, config.hidden_pad, config.intermediate_pad));
  CheckBank(weights.w1, config.runner.is_gated ? "w1 (gate)" : "w1", w13, experts, i, h, layer_id);
  if (config.runner.is_gated) {
    CheckBank(weights.w3, "w3 (up)", w13, experts, i, h, layer_id);
    // Their rows are prepared once, for both.
    const bool decoded = IsGgmlBlock(weights.w1.format.dtype) &&
                         IsGgmlBlock(weights.w3.format.dtype);  // to f32, whatever the blocks
    if (weights.w1.format != weights.w3.format && !decoded)
      Refuse(ErrorCode::kInvalidArgument, layer_id,
             fmt::format("w1 (gate) holds {} and w3 (up) {}: they must have one format",
                         DescribeFormat(weights.w1.format), DescribeFormat(weights.w3.format)));
    if (weights.w1.act.scale != weights.w3.act.scale ||
        weights.w1.act.offset != weights.w3.act.offset)
      Refuse(ErrorCode::kInvalidArgument, layer_id,
             fmt::format("w1 (gate) has activation scale {} and w3 (up) {}: their rows are "
                         "quantised once, with the larger one",
                         weights.w1.act.scale, weights.w3.act.scale));
  }
  CheckBank(weights.w2, "w2 (down)", w2, experts, h, i, layer_id);
}

ActQuant ActQuantOf(const SchemeEntry& scheme, const ExpertBank& bank, bool enabled,
                    size_t layer_id) {
  if (!enabled) return {};
  ActQuant how = bank.act;
  how.kind = scheme.act_quant;
  const bool is_static =
      how.kind == ActQuantKind::kInt8Static || how.kind == ActQuantKind::kFp8TensorStatic;
  if (is_static && !(how.scale > 0.0f && std::isfinite(how.scale)))
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("scheme {}: the activation scale must be positive and finite, found {}",
                       scheme.name, how.scale));
  return how;
}

// The type in which products take activations that no scheme quantises.
DType ActivationDType(const MoeLayerOptions& options, const ExpertWeights& weights) {
  const auto wanted = [&](const ExpertBank& bank) {
    return quant::ResolveActDType(options.act_dtype, options.fast_activations, bank.format,
                                  bank.cols);
  };
  const DType w13 = wanted(weights.w1);
  return w13 == wanted(weights.w2) ? w13 : DType::kF32;
}

}  // namespace

std::unique_ptr<MoeRunner> CreateMoeRunner(const Registry& registry,
                                           const MoeRunnerOptions& options,
                                           const MoeRunnerConfig& config,
                                           const MoeQuantInfo& quant_info, DispatchFormat format) {
  MoeRunnerConfig attached = config;
  attached.w13_kernel = {quant_info.w1.format, quant_info.a13};
  attached.w2_kernel = {quant_info.w2.format, quant_info.a2};
  return MoeRunner::Create(registry, options, attached, format);
}

MoeLayer::MoeLayer(const Registry& registry, const MoeLayerConfig& config,
                   const MoeLayerOptions& options, ExpertWeights weights)
    : config_(config),
      weights_(std::move(weights)),
      scheme_w13_(&registry.FindScheme(config.scheme_w13)),
      scheme_w2_(&registry.FindScheme(config.scheme_w2)),
      ep_(options.ep),
      activation_quant_(options.activation_quant) {
  ValidateTopK(config_.topk);
  CheckScaling(config_);
  if (ep_ != nullptr && config_.expert_mask.empty())
    config_.expert_mask = MaskOfRank(config_, *ep_);
  CheckWeights(config_, weights_, *scheme_w13_, *scheme_w2_);
  ViewWeights();
  MoeRunnerConfig& runner = config_.runner;
  runner.num_experts = NumGlobalExperts(config_);
  runner.num_local_experts = weights_.w1.data.size();
  runner.hidden_size = weights_.hidden_size;
  runner.intermediate_size_per_partition = weights_.intermediate_size;
  runner.top_k = config_.topk.top_k;
  runner.activation_dtype = ActivationDType(options, weights_);
  if (options.a2a == kFuseEp) {
    MakeFused(registry, options);
    return;
  }
  const std::string chosen =
      ChooseRunner(registry, *scheme_w13_, *scheme_w2_, options, runner.layer_id);
  const DeepepMode mode = ep_ == nullptr ? DeepepMode::kAuto : ep_->options().deepep_mode;
  const std::vector<const DispatcherEntry*> entries =
      registry.DispatchersFor(options.a2a, chosen,
                              mode == DeepepMode::kLowLatency ? DispatchMode::kLowLatency
                              : mode == DeepepMode::kNormal   ? DispatchMode::kNormal
                                                              : DispatchMode::kAny);
  if (ep_ != nullptr || entries[0]->format != DispatchFormat::kStandard) ScaleWeights();
  for (const DispatcherEntry* entry : entries)
    paths_.push_back(MakePath(registry, options, *entry, chosen));
}

MoeLayer::~MoeLayer() = default;

// Where the sum is not finished in the runner the factor goes into the weights (contract 2.6).
void MoeLayer::ScaleWeights() {
  weight_scale_ = static_cast<float>(config_.runner.routed_scaling_factor);
  config_.runner.routed_scaling_factor = 1.0;
}

void MoeLayer::MakeFused(const Registry& registry, const MoeLayerOptions& options) {
  MoeRunnerConfig& runner = config_.runner;
  if (ep_ == nullptr) {
    Refuse(ErrorCode::kFailedPrecondition, runner.layer_id,
           "FuseEP works on a group of ranks and was made without one (MoeLayerOptions::ep)");
  }
  if (options.runner != "auto" && options.runner != "ascend" && options.runner != "aiter") {
    Refuse(ErrorCode::kUnsupported, runner.layer_id,
           fmt::format("--moe-a2a ascend_fuseep computes the experts itself; runner {} cannot take "
                       "its place (leave --moe-runner at auto)",
                       options.runner));
  }
  if (ep_->moe_tp_size() != 1) {
    Refuse(ErrorCode::kUnsupported, runner.layer_id,
           fmt::format("--moe-a2a ascend_fuseep needs whole experts on each rank; they are split "
                       "over {} (--moe-ep-size {})",
                       ep_->moe_tp_size(), ep_->ep_size()));
  }
  ScaleWeights();
  runner.formula = ResolveActivation(registry, runner);
  runner.w13_kernel = {quant_info_.w1.format, quant_info_.a13};
  runner.w2_kernel = {quant_info_.w2.format, quant_info_.a2};
  FusedMoeOptions fused;
  fused.mode = ep_->options().fuseep_mode;
  fused.num_max_dispatch_tokens_per_rank = ep_->options().num_max_dispatch_tokens_per_rank;
  fused.buffer_mb = ep_->options().fused_buffer_mb;
  fused.timeout = ep_->options().timeout;
  fused.is_dead = [ep = ep_](size_t rank) { return ep->IsDead(ep->fuse_ep(), rank); };
  if (ep_->fused_buffer() == nullptr) {
    const FusedMoeShape shape{runner.hidden_size, runner.top_k, runner.num_local_experts, 0};
    ep_->fused_buffer() = std::make_shared<FusedMoeBuffer>(ep_->fuse_ep(), shape, fused);
  }
  fused_ = std::make_unique<FusedMoe>(ep_->fused_buffer(), runner, fused);
  // There is a dispatcher, which is never called (contract 3.0).
  const DispatcherEntry& entry = registry.FindDispatcher("standard");
  Path path;
  path.dispatcher = entry.make({runner, "aiter"});
  path.runner =
      CreateMoeRunner(registry, {"aiter", "none", true}, runner, quant_info_, entry.format);
  paths_.push_back(std::move(path));
}

void MoeLayer::ViewWeights() {
  const size_t layer_id = config_.runner.layer_id;
  quant_info_ = {weights_.w1.View(),
                 weights_.w3.View(),
                 weights_.w2.View(),
                 ActQuantOf(*scheme_w13_, weights_.w1, activation_quant_, layer_id),
                 ActQuantOf(*scheme_w2_, weights_.w2, activation_quant_, layer_id),
                 {},
                 config_.hidden_pad,
                 config_.intermediate_pad};
  // Only the standard format keeps the ids of all ranks; there they are told apart by the mask.
  if (ep_ == nullptr || ep_->ep_size() > 1) quant_info_.expert_mask = config_.expert_mask;
}

MoeLayer::Path MoeLayer::MakePath(const Registry& registry, const MoeLayerOptions& options,
                                  const DispatcherEntry& entry, std::string_view runner) {
  const MoeRunnerOptions runner_options{std::string(runner), options.a2a, options.disable_fused};
  Path path;
  path.dispatcher = entry.make({config_.runner, runner, ep_});
  path.dispatcher->SetQuantConfig(
      ResolveWire(options, *scheme_w13_, quant_info_, config_.runner, *path.dispatcher));
  path.runner =
      CreateMoeRunner(registry, runner_options, config_.runner, quant_info_, entry.format);
  return path;
}

const MoeLayer::Path& MoeLayer::PathNow() const {
  const bool decode = ep_ != nullptr && ep_->phase() == ForwardPhase::kDecode;
  return decode ? paths_.back() : paths_.front();
}

Rows MoeLayer::Forward(ExecContext& context, ConstRows hidden, ConstRows router_logits,
                       RoutingRecord* record, const TopKInputs& inputs) {
  TopKInputs filled = inputs;
  filled.layer_id = config_.runner.layer_id;
  if (filled.hidden.data == nullptr) filled.hidden = hidden;
  const TopKOutput topk = [&] {
    const StageTimer timer(context.profile, Stage::kRouter);
    return SelectExperts(context, config_.topk, router_logits, filled);
  }();
  if (record != nullptr) record->topk = topk;
  return ForwardRouted(context, hidden, topk);
}

Rows MoeLayer::ForwardRouted(ExecContext& context, ConstRows hidden, const TopKOutput& topk) {
  const size_t layer_id = config_.runner.layer_id;
  if (hidden.rows == 0) hidden = ConstRows(hidden.data, 0, weights_.hidden_size);
  if (hidden.cols != weights_.hidden_size)
    Refuse(ErrorCode::kInvalidArgument, layer_id,
           fmt::format("hidden states have {} columns, expected {}", hidden.cols,
                       weights_.hidden_size));
  RequireRouting(topk, hidden.rows, layer_id);
  TopKOutput scaled = topk;
  if (weight_scale_ != 1.0f) {
    const std::span<float> weights = context.arena.AllocateSpan<float>(topk.weights.size());
    for (size_t slot = 0; slot < weights.size(); ++slot)
      weights[slot] = topk.weights[slot] * weight_scale_;
    scaled.weights = weights;
  }
  const DispatchFormat format = dispatcher().format();
  const bool moves_rows =
      is_fused_ep() || (format != DispatchFormat::kStandard && format != DispatchFormat::kAscendTp);
  const bool sliced = ep_ != nullptr && ep_->options().tokens_are_replicated && moves_rows;
  if (!sliced) return RunExperts(context, hidden, scaled);
  // All ranks have these tokens; each sends its slice of them, and all get all results.
  const ExpertParallel::Slice slice = ep_->MySlice(hidden.rows);
  TopKOutput mine = scaled;
  mine.num_tokens = slice.count;
  mine.ids = scaled.ids.subspan(slice.first * topk.top_k, slice.count * topk.top_k);
  mine.weights = scaled.weights.subspan(slice.first * topk.top_k, slice.count * topk.top_k);
  const Rows out = RunExperts(context, hidden.Slice(slice.first, slice.count), mine);
  return ep_->GatherSlices(context, out, hidden.rows, layer_id);
}

Rows MoeLayer::RunExperts(ExecContext& context, ConstRows hidden, const TopKOutput& topk) {
  if (is_fused_ep()) {
    try {
      return fused_->Run(context, hidden, topk, quant_info_);
    } catch (const Error& error) {
      const ProcessGroup& group = ep_->groups().moe_ep();
      throw Error(error.code(), fmt::format("rank {}, layer {}, step {}, ascend_fuseep: {}",
                                            group.WorldRank(group.rank()), config_.runner.layer_id,
                                            ep_->pass(), error.what()));
    }
  }
  Dispatcher& dispatcher = this->dispatcher();
  try {
    const DispatchOutput& dispatched = dispatcher.Dispatch(context, hidden, topk);
    return dispatcher.Combine(context, Apply(context, dispatched));
  } catch (...) {
    dispatcher.Abort();
    throw;
  }
}

}  // namespace switchyard::moe
