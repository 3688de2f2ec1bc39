// Dispatcher "deepep_ll" (contract 3.5): DeepEP's low-latency mode, for decode.
#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/low_latency.h"

namespace switchyard::moe::dispatchers {

extern constinit const DispatcherEntry deepep_ll{
    "deepep_ll",
    "deepep",
    "a slab of rows for each expert, of fixed size; for decode",
    DispatchFormat::kDeepepLl,
    DispatchMode::kLowLatency,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<LowLatencyDispatcher>(args, "deepep_ll", false);
    }};

}  // namespace switchyard::moe::dispatchers
