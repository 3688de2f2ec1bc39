// Dispatcher "ascend_tp" (contract 3.3): every rank has all tokens and all experts. Dispatch sorts
// the routes by expert, combine weights and sums; nothing is sent.
#include "moe/dispatchers/ascend_tp.h"

#include <fmt/format.h>

#include <optional>

#include "moe/dispatchers/builtin.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/ascend/finalize_routing.h"
#include "switchyard/moe/ascend/init_routing.h"

namespace switchyard::moe::dispatchers {
namespace {

class AscendTpDispatcher : public Dispatcher {
 public:
  AscendTpDispatcher(const MoeRunnerConfig& config, ascend::GatherColumns gather)
      : layer_id_(config.layer_id),
        num_experts_(config.num_local_experts),
        gather_(std::move(gather)),
        init_(std::make_unique<ascend::InitRoutingV2Quant>(config.layer_id)) {
    if (config.no_combine) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("layer {}: no_combine: the ascend_tp dispatcher sums over the top-k; "
                              "take --moe-runner aiter",
                              layer_id_));
    }
    MakeFinalizer(false);
  }

  DispatchFormat format() const override { return DispatchFormat::kAscendTp; }

  bool CanSend(ActQuantKind kind) const override { return ModeOf(kind).has_value(); }

  void SetQuantConfig(const DispatcherQuantConfig& config) override {
    const std::optional<ascend::InitQuantMode> mode = ModeOf(config.output.kind);
    if (!mode) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("layer {}: the ascend_tp dispatcher quantises to int8_token or mxfp8, "
                      "or not at all; {} was asked for",
                      layer_id_, ActQuantKindName(config.output.kind)));
    }
    wire_ = config.output;
    quant_mode_ = *mode;
    MakeFinalizer(config.gguf);
  }

  const DispatchOutput& Dispatch(ExecContext& context, ConstRows hidden,
                                 const TopKOutput& topk) override {
    if (routing_) Refuse("dispatch while another dispatch is outstanding");
    ascend::InitRoutingArgs args;
    args.x = hidden;
    args.expert_ids = topk.ids;
    args.top_k = topk.top_k;
    args.expert_num = num_experts_;
    args.active_num = hidden.rows * topk.top_k;
    args.quant_mode = quant_mode_;
    args.amax_floor = wire_.amax_floor;
    args.mx_rule = wire_.mx_rule;
    const ascend::InitRoutingResult routed = init_->Run(context, args);
    routing_ = {topk, routed.expanded_row_idx, routed.expanded_x.rows};
    auto* output = context.arena.New<AscendTpDispatchOutput>();
    output->hidden_states = routed.expanded_x;
    output->topk_weights = topk.weights;
    output->topk_ids = topk.ids;
    output->expanded_row_idx = routed.expanded_row_idx;
    output->expert_tokens = routed.expert_tokens;
    output->num_tokens = hidden.rows;
    output->top_k = topk.top_k;
    return *output;
  }

  Rows Combine(ExecContext& context, const CombineInput& input) override {
    if (!routing_) Refuse("combine without an outstanding dispatch");
    CheckAnswer(input, format(), kExpandedRows, "ascend_tp", layer_id_);
    ascend::FinalizeRoutingArgs args;
    args.expanded_rows = As<AscendTpCombineInput>(input).hidden_states;
    if (args.expanded_rows.rows != routing_->num_rows) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} rows must come back to combine, found {}", layer_id_,
                              routing_->num_rows, args.expanded_rows.rows));
    }
    args.expanded_row_idx = routing_->expanded_row_idx;
    args.num_tokens = routing_->topk.num_tokens;
    args.top_k = routing_->topk.top_k;
    args.scales = routing_->topk.weights;
    args.mode = ascend::DropPadMode::kRowMajor;
    const Rows rows = finalize_->Run(context, args);
    routing_.reset();
    return rows;
  }

  void Abort() override { routing_.reset(); }

 private:
  // The routing saved from dispatch to combine; views into the arena of the step.
  struct Routing {
    TopKOutput topk;
    std::span<const int32_t> expanded_row_idx;
    size_t num_rows;
  };

  static std::optional<ascend::InitQuantMode> ModeOf(ActQuantKind kind) {
    if (kind == ActQuantKind::kNone) return ascend::InitQuantMode::kNone;
    if (kind == ActQuantKind::kInt8Token) return ascend::InitQuantMode::kDynamic;
    if (kind == ActQuantKind::kMxFp8) return ascend::InitQuantMode::kMxFp8;
    return std::nullopt;
  }

  // A new one each time: the wrapper never stands around another wrapper.
  void MakeFinalizer(bool gguf) {
    finalize_ = std::make_unique<ascend::FinalizeRouting>(layer_id_);
    if (gguf && gather_) {
      finalize_ =
          std::make_unique<ascend::AllGatherFinalizeRoutingWrapper>(std::move(finalize_), gather_);
    }
  }

  [[noreturn]] void Refuse(std::string_view what) const {
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("layer {}: {} (ascend_tp dispatcher)", layer_id_, what));
  }

  size_t layer_id_;
  size_t num_experts_;
  ascend::GatherColumns gather_;
  ActQuant wire_;
  ascend::InitQuantMode quant_mode_ = ascend::InitQuantMode::kNone;  // of wire_
  std::unique_ptr<const ascend::BaseInitRouting> init_;
  std::unique_ptr<const ascend::BaseFinalizeRouting> finalize_;
  std::optional<Routing> routing_;
};

}  // namespace

std::unique_ptr<Dispatcher> MakeAscendTp(const MoeRunnerConfig& config,
                                         ascend::GatherColumns gather) {
  return std::make_unique<AscendTpDispatcher>(config, std::move(gather));
}

extern constinit const DispatcherEntry ascend_tp{
    "ascend_tp", "none", "no communication: routes sorted by expert, for runner ascend",
    DispatchFormat::kAscendTp,
    [](const MoeRunnerConfig& config) { return MakeAscendTp(config, {}); }};

}  // namespace switchyard::moe::dispatchers
