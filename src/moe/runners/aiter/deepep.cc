#include "moe/runners/aiter/deepep.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard::moe::runners {

std::span<const int32_t> SinkMask(ExecContext& context, size_t num_local_experts) {
  const std::span<int32_t> mask = context.arena.AllocateSpan<int32_t>(num_local_experts + 1);
  std::fill(mask.begin(), mask.end(), 1);
  mask[num_local_experts] = 0;
  return mask;
}

void CheckDeepepConfig(const MoeRunnerConfig& config, const DispatchOutput& output) {
  const auto refuse = [&](std::string_view setting, std::string_view why) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner aiter behind dispatch format {}: {} {}",
                            config.layer_id, DispatchFormatName(output.format), setting, why));
  };
  // A row of one route comes without its weight, and combine would apply it to the output.
  if (config.apply_router_weight_on_input && output.promises.row_kind == RowKind::kExpanded)
    refuse("apply_router_weight_on_input",
           "cannot be: the dispatcher's combine applies the weights");
  if (config.no_combine) refuse("no_combine", "cannot be: the dispatcher's combine sums the rows");
  if (config.routed_scaling_factor != 1.0)
    refuse("routed_scaling_factor",
           "must be in the weights: the sum is not finished in the runner");
}

}  // namespace switchyard::moe::runners
