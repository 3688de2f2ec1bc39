// Dispatcher "mori" (contract 3.9): rows of tokens with their global ids, and how many there are.
#include "moe/dispatchers/builtin.h"
#include "moe/dispatchers/token_rows.h"

namespace switchyard::moe::dispatchers {
namespace {

class MoriDispatcher : public TokenRowsDispatcher {
 public:
  explicit MoriDispatcher(const DispatcherArgs& args)
      : TokenRowsDispatcher(args,
                            {"mori", DispatchFormat::kDeepepNormal, "chunk",
                             args.ep == nullptr ? 0 : args.ep->options().max_tokens_per_rank}) {
    mask_.resize(num_local() * ep().ep_size());
    for (size_t id = 0; id < mask_.size(); ++id)
      mask_[id] = LocalId(static_cast<int32_t>(id)) >= 0 ? 1 : 0;
  }

  // The wires of contract 3.9.
  bool CanSend(ActQuantKind kind) const override {
    return kind == ActQuantKind::kNone || kind == ActQuantKind::kFp8Group ||
           kind == ActQuantKind::kMxFp8 || kind == ActQuantKind::kMxFp4;
  }

 protected:
  const DispatchOutput& Arrange(ExecContext& context, const ReceivedTokens& received) override {
    DeepepNormalDispatchOutput& output = ArrangeTokens(context, kTokenRows);
    auto* mori = context.arena.New<MoriDispatch>();
    mori->num_recv_tokens = received.size();
    mori->origin_topk_ids = own_topk().ids;
    mori->origin_topk_weights = own_topk().weights;
    mori->expert_mask = mask_;
    output.mori = mori;
    return output;
  }

 private:
  std::vector<int32_t> mask_;  // [E]
};

}  // namespace

extern constinit const DispatcherEntry mori{
    "mori",
    "mori",
    "a token once to each rank, ids stay global",
    DispatchFormat::kDeepepNormal,
    DispatchMode::kAny,
    [](const DispatcherArgs& args) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<MoriDispatcher>(args);
    }};

}  // namespace switchyard::moe::dispatchers
