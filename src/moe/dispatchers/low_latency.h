// A slab of rows for each local expert (contract 3.5): DeepEP's low-latency mode, and Mooncake and
// NIXL, whose ranks may be lost.
#pragma once

#include "moe/dispatchers/ep_dispatcher.h"

namespace switchyard::moe::dispatchers {

class LowLatencyDispatcher : public EpDispatcher {
 public:
  LowLatencyDispatcher(const DispatcherArgs& args, std::string_view name, bool elastic);

 protected:
  const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens& received) override;
  Answered Answer(ExecContext& context, const CombineInput& input) override;

 private:
  std::span<const int32_t> place_of_;
};

}  // namespace switchyard::moe::dispatchers
