// Dispatcher "standard" (contract 3.2): every rank has all tokens and computes its experts, global
// ids. On one rank nothing moves. On several, results of replicated tokens are added up by the
// ranks that own slices of them and gathered (an all-reduce); tokens that each rank has of its own
// are gathered first and their results go back (all-gather, reduce-scatter).
#include <fmt/format.h>

#include <algorithm>

#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/ep_dispatcher.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::dispatchers {
namespace {

class StandardDispatcher : public Dispatcher {
 public:
  explicit StandardDispatcher(const MoeRunnerConfig& config)
      : Dispatcher(config.layer_id), no_combine_(config.no_combine) {}

  std::string_view name() const override { return "standard"; }
  DispatchFormat format() const override { return DispatchFormat::kStandard; }

 protected:
  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) override {
    num_rows_back_ = hidden.rows * (no_combine_ ? topk.top_k : 1);
    output_ = context.arena.New<StandardDispatchOutput>(hidden, topk);
  }
  const DispatchOutput& FinishDispatch(ExecContext&) override { return *output_; }

  void StartCombine(ExecContext&, const CombineInput& input) override {
    CombineInput checked = input;
    if (no_combine_) {
      // The K rows of a token are the layer's result, and nobody sums them here.
      if (checked.routewise != RoutewiseLayout::kTokenTopk) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("layer {}: no_combine is set, and the combine input does not hold "
                                "one row for each of a token's experts",
                                layer_id()));
      }
      checked.routewise = RoutewiseLayout::kNone;
    }
    CheckAnswer(checked, format(), kTokenRows, name(), layer_id());
    rows_ = As<StandardCombineInput>(input).hidden_states;
    if (rows_.rows != num_rows_back_) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} rows must come back to combine, found {}", layer_id(),
                              num_rows_back_, rows_.rows));
    }
  }
  Rows FinishCombine(ExecContext&) override { return rows_; }
  void Reset() noexcept override {}

 private:
  bool no_combine_;
  size_t num_rows_back_ = 0;
  const StandardDispatchOutput* output_ = nullptr;
  Rows rows_;
};

EpProtocol Standard(const DispatcherArgs& args) {
  return {"standard", DispatchFormat::kStandard, "chunk", args.ep->options().max_tokens_per_rank,
          true};
}

// Tokens that each rank has of its own: all ranks get all of them.
class AllGatherDispatcher : public EpDispatcher {
 public:
  explicit AllGatherDispatcher(const DispatcherArgs& args) : EpDispatcher(args, Standard(args)) {}

 protected:
  const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens& received) override {
    const Slots slots = ReadSlots(context, IdSpace::kGlobal);
    ids_ = slots.ids;
    TopKOutput topk;
    topk.num_tokens = received.size();
    topk.top_k = config().top_k;
    topk.ids = slots.ids;
    topk.weights = slots.weights;
    return *context.arena.New<StandardDispatchOutput>(
        CollectTokens(context), topk, deterministic() ? Routewise(kTokenRows) : kTokenRows);
  }
  Answered Answer(ExecContext& context, const CombineInput& input) override {
    const auto& answer = As<StandardCombineInput>(input);
    return AnswerTokens(context, answer.hidden_states, answer.routewise, answer.row_of_slot, ids_,
                        IdSpace::kGlobal);
  }

 private:
  std::span<const int32_t> ids_;
};

// Tokens that all ranks have: each owns a slice, whose results it adds up.
class ReplicatedDispatcher : public EpDispatcher {
 public:
  explicit ReplicatedDispatcher(const DispatcherArgs& args) : EpDispatcher(args, Standard(args)) {}
  bool CanSend(ActQuantKind kind) const override { return kind == ActQuantKind::kNone; }

 protected:
  void StartDispatch(ExecContext& context, ConstRows hidden, const TopKOutput& topk) override {
    topk_ = topk;
    channel().BeginWithoutDispatch(layer_id());
    TopKOutput routed = topk;
    routed.ids = ListTokens(context, topk);
    ids_ = routed.ids;
    output_ = context.arena.New<StandardDispatchOutput>(
        hidden, routed, deterministic() ? Routewise(kTokenRows) : kTokenRows);
    SetPromises(output_->promises);
  }
  const DispatchOutput& FinishDispatch(ExecContext&) override { return *output_; }
  const DispatchOutput& Arrange(ExecContext&, const ReceivedTokens&) override { return *output_; }

  Answered Answer(ExecContext& context, const CombineInput& input) override {
    const auto& answer = As<StandardCombineInput>(input);
    Answered answered = AnswerTokens(context, answer.hidden_states, answer.routewise,
                                     answer.row_of_slot, ids_, IdSpace::kGlobal);
    answered.ids = ids_;
    return answered;
  }

  void StartCombine(ExecContext& context, const CombineInput& input) override {
    CheckAnswer(input, format(), output_->promises, name(), layer_id());
    const ExpertParallel::Slice slice = ep().MySlice(topk_.num_tokens);
    OwnTokens own{slice.count, topk_};
    own.topk.num_tokens = slice.count;
    own.topk.ids = topk_.ids.subspan(slice.first * topk_.top_k, slice.count * topk_.top_k);
    own.topk.weights = topk_.weights.subspan(slice.first * topk_.top_k, slice.count * topk_.top_k);
    SendHome(context, Answer(context, input), tokens_, own);
  }
  Rows FinishCombine(ExecContext& context) override {
    const Rows mine = EpDispatcher::FinishCombine(context);
    return ep().GatherSlices(context, mine, topk_.num_tokens, layer_id());
  }

 private:
  // Whose tokens these are. Returns the ids, -1 where another copy of the experts (MoE-DP) computes
  // the token.
  std::span<const int32_t> ListTokens(ExecContext& context, const TopKOutput& topk) {
    const std::span<uint32_t> source = context.arena.AllocateSpan<uint32_t>(topk.num_tokens);
    const std::span<uint32_t> token = context.arena.AllocateSpan<uint32_t>(topk.num_tokens);
    const std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(topk.ids.size());
    std::copy(topk.ids.begin(), topk.ids.end(), ids.begin());
    const size_t block_size = ep().block().size();
    const size_t my_block = ep().groups().position().moe_dp;
    for (size_t rank = 0; rank < ep().groups().tp().size(); ++rank) {
      const ExpertParallel::Slice slice = ep().SliceOf(topk.num_tokens, rank);
      for (size_t i = 0; i < slice.count; ++i) {
        source[slice.first + i] = static_cast<uint32_t>(rank % block_size);
        token[slice.first + i] = static_cast<uint32_t>(i);
      }
      if (rank / block_size == my_block) continue;
      const auto first = ids.begin() + static_cast<std::ptrdiff_t>(slice.first * topk.top_k);
      std::fill_n(first, slice.count * topk.top_k, -1);
    }
    tokens_.source = source;
    tokens_.token = token;
    return ids;
  }

  TopKOutput topk_;
  std::span<const int32_t> ids_;
  ReceivedTokens tokens_;
  const StandardDispatchOutput* output_ = nullptr;
};

}  // namespace

extern constinit const DispatcherEntry standard{
    "standard",
    "none",
    "every rank has all tokens; results are summed (replicated tokens) or sent back (own tokens)",
    DispatchFormat::kStandard,
    DispatchMode::kAny,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      if (args.ep == nullptr) return std::make_unique<StandardDispatcher>(args.config);
      if (args.ep->options().tokens_are_replicated)
        return std::make_unique<ReplicatedDispatcher>(args);
      return std::make_unique<AllGatherDispatcher>(args);
    }};

}  // namespace switchyard::moe::dispatchers
