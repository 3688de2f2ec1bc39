// Dispatcher "ascend_tp" (contract 3.3): every rank has all tokens and all experts. Dispatch sorts
// the routes by expert, combine weights and sums; nothing is sent.
#include "moe/dispatchers/ascend_tp.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "moe/dispatchers/builtin.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/ascend/finalize_routing.h"
#include "switchyard/moe/ascend/init_routing.h"
#include "switchyard/moe/ep/expert_parallel.h"

namespace switchyard::moe::dispatchers {
namespace {

class AscendTpDispatcher : public Dispatcher {
 public:
  AscendTpDispatcher(const MoeRunnerConfig& config, ascend::GatherColumns gather,
                     ExpertParallel* ep)
      : Dispatcher(config.layer_id),
        num_experts_(config.num_local_experts),
        gather_(std::move(gather)),
        ep_(ep),
        init_(std::make_unique<ascend::InitRoutingV2Quant>(config.layer_id)) {
    if (config.no_combine) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("layer {}: no_combine: the ascend_tp dispatcher sums over the top-k; "
                              "take --moe-runner aiter",
                              layer_id()));
    }
    if (ep_ != nullptr) CheckRanks();
    MakeFinalizer(false);
  }

  std::string_view name() const override { return "ascend_tp"; }
  DispatchFormat format() const override { return DispatchFormat::kAscendTp; }

  bool CanSend(ActQuantKind kind) const override { return ModeOf(kind).has_value(); }

  void SetQuantConfig(const DispatcherQuantConfig& config) override {
    const std::optional<ascend::InitQuantMode> mode = ModeOf(config.output.kind);
    if (!mode) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("layer {}: the ascend_tp dispatcher quantises to int8_token or mxfp8, "
                      "or not at all; {} was asked for",
                      layer_id(), ActQuantKindName(config.output.kind)));
    }
    wire_ = config.output;
    quant_mode_ = *mode;
    MakeFinalizer(config.gguf);
  }

 protected:
  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) override {
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
    output_ = context.arena.New<AscendTpDispatchOutput>();
    output_->hidden_states = routed.expanded_x;
    output_->topk_weights = topk.weights;
    output_->topk_ids = topk.ids;
    output_->expanded_row_idx = routed.expanded_row_idx;
    output_->expert_tokens = routed.expert_tokens;
    output_->num_tokens = hidden.rows;
    output_->top_k = topk.top_k;
  }
  const DispatchOutput& FinishDispatch(ExecContext&) override { return *output_; }

  void StartCombine(ExecContext& context, const CombineInput& input) override {
    CheckAnswer(input, format(), kExpandedRows, name(), layer_id());
    ascend::FinalizeRoutingArgs args;
    args.expanded_rows = As<AscendTpCombineInput>(input).hidden_states;
    if (args.expanded_rows.rows != routing_->num_rows) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} rows must come back to combine, found {}", layer_id(),
                              routing_->num_rows, args.expanded_rows.rows));
    }
    args.expanded_row_idx = routing_->expanded_row_idx;
    args.num_tokens = routing_->topk.num_tokens;
    args.top_k = routing_->topk.top_k;
    args.scales = routing_->topk.weights;
    args.mode = ascend::DropPadMode::kRowMajor;
    rows_ = finalize_->Run(context, args);
  }
  Rows FinishCombine(ExecContext&) override {
    routing_.reset();
    if (is_split() && !is_gguf_) {
      // Rows of the finalizer lie side by side.
      ep_->groups().moe_tp().AllReduceSum(
          std::span(rows_.data, rows_.rows * rows_.cols),
          Deadline::After(ep_->options().timeout, "ascend_tp combine"));
    }
    return rows_;
  }
  void Reset() noexcept override { routing_.reset(); }

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

  bool is_split() const { return ep_ != nullptr && ep_->moe_tp_size() != 1; }

  void CheckRanks() const {
    const auto refuse = [&](const std::string& why) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("layer {}: the ascend_tp dispatcher {}", layer_id(), why));
    };
    if (ep_->ep_size() != 1)
      refuse(
          fmt::format("needs all experts on each rank (split, not spread): --moe-ep-size must "
                      "be 1, found {}; or take --moe-a2a deepep",
                      ep_->ep_size()));
    if (is_split() && !ep_->options().tokens_are_replicated)
      refuse("adds up what ranks compute of the same tokens; --dp-attention gives each its own");
  }

  // The columns of all ranks that split the experts.
  Rows GatherOverRanks(ExecContext& context, ConstRows columns) const {
    ProcessGroup& group = ep_->groups().moe_tp();
    const size_t bytes = columns.rows * columns.cols * sizeof(float);
    const std::span<std::byte> all = context.arena.AllocateSpan<std::byte>(bytes * group.size());
    group.AllGather(std::as_bytes(std::span(columns.data, columns.rows * columns.cols)), all,
                    Deadline::After(ep_->options().timeout, "ascend_tp gather"));
    const Rows out = context.arena.AllocateRows(columns.rows, columns.cols * group.size());
    for (size_t rank = 0; rank < group.size(); ++rank) {
      const ConstRows part(reinterpret_cast<const float*>(all.data() + rank * bytes), columns.rows,
                           columns.cols);
      for (size_t t = 0; t < part.rows; ++t)
        std::copy_n(part.Row(t), part.cols, out.Row(t) + rank * part.cols);
    }
    return out;
  }

  // A new one each time: the wrapper never stands around another wrapper.
  void MakeFinalizer(bool gguf) {
    is_gguf_ = gguf;
    finalize_ = std::make_unique<ascend::FinalizeRouting>(layer_id());
    ascend::GatherColumns gather = gather_;
    if (!gather && is_split()) {
      gather = [this](ExecContext& context, ConstRows columns) {
        return GatherOverRanks(context, columns);
      };
    }
    if (gguf && gather) {
      finalize_ = std::make_unique<ascend::AllGatherFinalizeRoutingWrapper>(std::move(finalize_),
                                                                            std::move(gather));
    }
  }

  size_t num_experts_;
  ascend::GatherColumns gather_;
  ExpertParallel* ep_;
  bool is_gguf_ = false;
  ActQuant wire_;
  ascend::InitQuantMode quant_mode_ = ascend::InitQuantMode::kNone;  // of wire_
  std::unique_ptr<const ascend::BaseInitRouting> init_;
  std::unique_ptr<const ascend::BaseFinalizeRouting> finalize_;
  std::optional<Routing> routing_;
  AscendTpDispatchOutput* output_ = nullptr;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Dispatcher> MakeAscendTp(const MoeRunnerConfig& config,
                                         ascend::GatherColumns gather, ExpertParallel* ep) {
  return std::make_unique<AscendTpDispatcher>(config, std::move(gather), ep);
}

extern constinit const DispatcherEntry ascend_tp{
    "ascend_tp",
    "none",
    "routes sorted by expert, for runner ascend; ranks that split the experts add up",
    DispatchFormat::kAscendTp,
    DispatchMode::kAny,
    [](const DispatcherArgs& args) { return MakeAscendTp(args.config, {}, args.ep); }};

}  // namespace switchyard::moe::dispatchers
