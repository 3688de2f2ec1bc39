// Rows of tokens, one for each rank that has one of the token's experts: DeepEP's normal mode and
// MORI (contract 3.4, 3.9).
#pragma once

#include "moe/dispatchers/ep_dispatcher.h"

namespace switchyard::moe::dispatchers {

class TokenRowsDispatcher : public EpDispatcher {
 public:
  using EpDispatcher::EpDispatcher;

 protected:
  // The output without what a protocol adds.
  DeepepNormalDispatchOutput& ArrangeTokens(ExecContext& context, const DispatchPromises& promises);
  Answered Answer(ExecContext& context, const CombineInput& input) override;

 private:
  std::span<const int32_t> ids_;  // as arranged
  IdSpace space_ = IdSpace::kLocal;
};

}  // namespace switchyard::moe::dispatchers
