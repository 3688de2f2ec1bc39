#include "moe/dispatchers/low_latency.h"

namespace switchyard::moe::dispatchers {

LowLatencyDispatcher::LowLatencyDispatcher(const DispatcherArgs& args, std::string_view name,
                                           bool elastic)
    : EpDispatcher(args,
                   {name, DispatchFormat::kDeepepLl, "num-max-dispatch-tokens-per-rank",
                    args.ep == nullptr ? 0 : args.ep->options().num_max_dispatch_tokens_per_rank,
                    false, elastic}) {}

const DispatchOutput& LowLatencyDispatcher::Arrange(ExecContext& context, const ReceivedTokens&) {
  auto* output = context.arena.New<DeepepLlDispatchOutput>();
  const size_t ranks = ep().ep_size();
  output->capacity = channel().options().max_tokens * ranks;
  const RouteRows routes = CollectRoutes(context, output->capacity);
  place_of_ = routes.place_of;
  output->hidden_states = routes.rows;
  output->masked_m = routes.counts;
  const ExpertPartition partition(channel().options().num_experts, ranks);
  output->expected_m = ExpectedRowsPerExpert(own_topk().num_tokens, config().top_k, partition);
  output->topk_ids = own_topk().ids;
  output->topk_weights = own_topk().weights;
  output->top_k = config().top_k;
  return *output;
}

EpDispatcher::Answered LowLatencyDispatcher::Answer(ExecContext&, const CombineInput& input) {
  return {As<DeepepLlCombineInput>(input).hidden_states, place_of_};
}

}  // namespace switchyard::moe::dispatchers
