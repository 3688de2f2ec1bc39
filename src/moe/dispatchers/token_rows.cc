#include "moe/dispatchers/token_rows.h"

namespace switchyard::moe::dispatchers {

DeepepNormalDispatchOutput& TokenRowsDispatcher::ArrangeTokens(ExecContext& context,
                                                               const DispatchPromises& promises) {
  auto* output = context.arena.New<DeepepNormalDispatchOutput>(deterministic() ? Routewise(promises)
                                                                               : promises);
  output->hidden_states = CollectTokens(context);
  const Slots slots = ReadSlots(context, promises.id_space);
  ids_ = slots.ids;
  space_ = promises.id_space;
  output->topk_ids = slots.ids;
  output->topk_weights = slots.weights;
  output->top_k = config().top_k;
  return *output;
}

EpDispatcher::Answered TokenRowsDispatcher::Answer(ExecContext& context,
                                                   const CombineInput& input) {
  const auto& answer = As<DeepepNormalCombineInput>(input);
  return AnswerTokens(context, answer.hidden_states, answer.routewise, answer.row_of_slot, ids_,
                      space_);
}

}  // namespace switchyard::moe::dispatchers
