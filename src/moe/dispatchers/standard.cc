// Dispatcher "standard" (contract 3.2) on one rank: no communication, global ids, combine is the
// identity.
#include <fmt/format.h>

#include "moe/dispatchers/builtin.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::dispatchers {
namespace {

class StandardDispatcher : public Dispatcher {
 public:
  explicit StandardDispatcher(const MoeRunnerConfig& config)
      : layer_id_(config.layer_id), no_combine_(config.no_combine) {}

  DispatchFormat format() const override { return DispatchFormat::kStandard; }

  const DispatchOutput& Dispatch(ExecContext& context, ConstRows hidden,
                                 const TopKOutput& topk) override {
    if (outstanding_) Refuse("dispatch while another dispatch is outstanding");
    outstanding_ = true;
    num_rows_back_ = hidden.rows * (no_combine_ ? topk.top_k : 1);
    return *context.arena.New<StandardDispatchOutput>(hidden, topk);
  }

  Rows Combine(ExecContext&, const CombineInput& input) override {
    if (!outstanding_) Refuse("combine without an outstanding dispatch");
    CombineInput checked = input;
    if (no_combine_) {
      // The K rows of a token are the layer's result, and nobody sums them here.
      if (checked.routewise != RoutewiseLayout::kTokenTopk) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("layer {}: no_combine is set, and the combine input does not hold "
                                "one row for each of a token's experts",
                                layer_id_));
      }
      checked.routewise = RoutewiseLayout::kNone;
    }
    CheckAnswer(checked, format(), kTokenRows, "standard", layer_id_);
    const Rows rows = As<StandardCombineInput>(input).hidden_states;
    if (rows.rows != num_rows_back_) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer {}: {} rows must come back to combine, found {}", layer_id_,
                              num_rows_back_, rows.rows));
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
  bool no_combine_;
  size_t num_rows_back_ = 0;
  bool outstanding_ = false;
};

}  // namespace

extern constinit const DispatcherEntry standard{
    "standard", "none", "no communication: every rank has all tokens", DispatchFormat::kStandard,
    [](const MoeRunnerConfig& config) -> std::unique_ptr<Dispatcher> {
      return std::make_unique<StandardDispatcher>(config);
    }};

}  // namespace switchyard::moe::dispatchers
