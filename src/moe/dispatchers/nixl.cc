// Dispatcher "nixl" (contract 3.8): the low-latency layout on seats that ranks leave and take;
// buffers are sized once for all seats.
#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/low_latency.h"

namespace switchyard::moe::dispatchers {

extern constinit const DispatcherEntry nixl{
    "nixl",
    "nixl",
    "as deepep_ll; ranks may leave, and come back to their seats",
    DispatchFormat::kDeepepLl,
    DispatchMode::kLowLatency,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<LowLatencyDispatcher>(args, "nixl", true);
    }};

}  // namespace switchyard::moe::dispatchers
