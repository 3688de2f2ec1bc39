#include "moe/dispatchers/low_latency.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

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
  output->rows_may_move = true;
  return *output;
}

EpDispatcher::Answered LowLatencyDispatcher::Answer(ExecContext& context,
                                                    const CombineInput& input) {
  const auto& answer = As<DeepepLlCombineInput>(input);
  if (answer.row_of_place.empty()) return {answer.hidden_states, place_of_};
  const size_t places = num_local() * channel().options().max_tokens * ep().ep_size();
  if (answer.row_of_place.size() != places) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer {}: {} dispatcher: the answer says where {} of {} places are",
                            layer_id(), name(), answer.row_of_place.size(), places));
  }
  const std::span<int32_t> row_of = context.arena.AllocateSpan<int32_t>(place_of_.size());
  for (size_t slot = 0; slot < row_of.size(); ++slot) {
    const int32_t place = place_of_[slot];
    row_of[slot] = place < 0 ? -1 : answer.row_of_place[static_cast<size_t>(place)];
  }
  return {answer.hidden_states, row_of};
}

}  // namespace switchyard::moe::dispatchers
