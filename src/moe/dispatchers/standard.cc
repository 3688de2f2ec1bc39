// Dispatcher "standard" (contract 3.2) on one rank: no communication, global ids, combine is the
// identity.
#include <fmt/format.h>

#include "moe/dispatchers/builtin.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::dispatchers {
namespace {

class StandardDispatcher : public Dispatcher {
 public:
  explicit StandardDispatcher(const MoeRunnerConfig& config) : layer_id_(config.layer_id) {}

  DispatchFormat format() const override { return DispatchFormat::kStandard; }

  const DispatchOutput& Dispatch(ExecContext& context, ConstRows hidden,
                                 const TopKOutput& topk) override {
    if (outstanding_) Refuse("dispatch while another dispatch is outstanding");
    outstanding_ = true;
    num_tokens_ = hidden.rows;
    return *context.arena.New<StandardDispatchOutput>(hidden, topk);
  }

  Rows Combine(ExecContext&, const CombineInput& input) override {
    if (!outstanding_) Refuse("combine without an outstanding dispatch");
    if (input.format != format() || !(input.promises == DispatchPromises{})) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: the standard dispatcher was given a combine input of "
                              "format {} or with other "
                              "promises than its dispatch made",
                              layer_id_, DispatchFormatName(input.format)));
    }
    const Rows rows = AsStandard(input).hidden_states;
    if (rows.rows != num_tokens_) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} tokens were dispatched, {} came to combine", layer_id_,
                              num_tokens_, rows.rows));
    }
    outstanding_ = false;
    return rows;
  }

  void Abort() override { outstanding_ = false; }

 private:
  [[noreturn]] void Refuse(std::string_view what) const {
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("layer {}: {} (standard dispatcher)", layer_id_, what));
  }

  size_t layer_id_;
  size_t num_tokens_ = 0;
  bool outstanding_ = false;
};

}  // namespace

extern constinit const DispatcherEntry standard{
    "standard", "none", "no communication: every rank has all tokens", DispatchFormat::kStandard,
    [](const MoeRunnerConfig& config) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<StandardDispatcher>(config);
    }};

}  // namespace switchyard::moe::dispatchers
