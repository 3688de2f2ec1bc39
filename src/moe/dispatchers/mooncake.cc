// Dispatcher "mooncake" (contract 3.7): the low-latency layout; a rank that does not answer is
// taken out in place, and what it would have computed counts as zero.
#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/low_latency.h"

namespace switchyard::moe::dispatchers {

extern constinit const DispatcherEntry mooncake{
    "mooncake",
    "mooncake",
    "as deepep_ll; goes on without ranks that do not answer",
    DispatchFormat::kDeepepLl,
    DispatchMode::kLowLatency,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<LowLatencyDispatcher>(args, "mooncake", true);
    }};

}  // namespace switchyard::moe::dispatchers
