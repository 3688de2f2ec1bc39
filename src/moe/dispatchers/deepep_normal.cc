// Dispatcher "deepep_normal" (contract 3.4): a token goes once to each rank that has one of its
// experts. The ascend runner gets one row per route, sorted by expert; the others rows of tokens.
#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/token_rows.h"

namespace switchyard::moe::dispatchers {
namespace {

EpProtocol Normal(const DispatcherArgs& args) {
  return {"deepep_normal", DispatchFormat::kDeepepNormal, "chunk",
          args.ep == nullptr ? 0 : args.ep->options().max_tokens_per_rank};
}

class DeepepNormalDispatcher : public TokenRowsDispatcher {
 public:
  explicit DeepepNormalDispatcher(const DispatcherArgs& args)
      : TokenRowsDispatcher(args, Normal(args)) {}

 protected:
  const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens&) override {
    DeepepNormalDispatchOutput& output = ArrangeTokens(context, kLocalTokenRows);
    const std::span<int32_t> counts = context.arena.AllocateSpan<int32_t>(num_local());
    std::fill(counts.begin(), counts.end(), 0);
    for (int32_t id : output.topk_ids) {
      if (id >= 0) ++counts[static_cast<size_t>(id)];
    }
    output.num_recv_tokens_per_expert = counts;
    return output;
  }
};

class DeepepExpandedDispatcher : public EpDispatcher {
 public:
  explicit DeepepExpandedDispatcher(const DispatcherArgs& args)
      : EpDispatcher(args, Normal(args)) {}

 protected:
  const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens&) override {
    auto* output = context.arena.New<DeepepNormalDispatchOutput>(kExpandedRows);
    const RouteRows routes = CollectRoutes(context, 0);
    place_of_ = routes.place_of;
    output->hidden_states = routes.rows;
    output->num_recv_tokens_per_expert = routes.counts;
    output->topk_ids = own_topk().ids;
    output->topk_weights = own_topk().weights;
    output->top_k = config().top_k;
    return *output;
  }
  Answered Answer(ExecContext&, const CombineInput& input) override {
    return {As<DeepepNormalCombineInput>(input).hidden_states, place_of_};
  }

 private:
  std::span<const int32_t> place_of_;
};

}  // namespace

extern constinit const DispatcherEntry deepep_normal{
    "deepep_normal",
    "deepep",
    "a token once to each rank that has one of its experts; for prefill",
    DispatchFormat::kDeepepNormal,
    DispatchMode::kNormal,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      if (args.runner == "ascend") return std::make_unique<DeepepExpandedDispatcher>(args);
      return std::make_unique<DeepepNormalDispatcher>(args);
    }};

}  // namespace switchyard::moe::dispatchers
