#include "switchyard/moe/ascend/finalize_routing.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/elementwise/elementwise.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void Refuse(size_t layer_id, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("layer {}: finalize routing: {}", layer_id, what));
}

bool IsRowMajor(DropPadMode mode, size_t layer_id) {
  switch (mode) {
    case DropPadMode::kColumnMajor:
    case DropPadMode::kColumnMajorDrop: return false;
    case DropPadMode::kRowMajor:
    case DropPadMode::kRowMajorDrop: return true;
  }
  Refuse(layer_id, fmt::format("drop_pad_mode is {}, expected 0 to 3", static_cast<int>(mode)));
}

// Checked operands, and where the row of a route is.
class Routes {
 public:
  Routes(const FinalizeRoutingArgs& args, size_t layer_id)
      : args_(args), row_major_(IsRowMajor(args.mode, layer_id)) {
    const size_t routes = args.num_tokens * args.top_k;
    CheckSize("expanded_row_idx", args.expanded_row_idx.size(), routes, layer_id);
    if (!args.scales.empty()) CheckSize("scales", args.scales.size(), routes, layer_id);
    if (args.bias.rows != 0) {
      CheckSize("expert_ids", args.expert_ids.size(), routes, layer_id);
      CheckSize("the width of bias", args.bias.cols, args.expanded_rows.cols, layer_id);
    }
    for (const ConstRows& skip : {args.skip1, args.skip2}) {
      if (skip.rows == 0) continue;
      CheckSize("the rows of a skip", skip.rows, args.num_tokens, layer_id);
      CheckSize("the width of a skip", skip.cols, args.expanded_rows.cols, layer_id);
    }
    for (size_t t = 0; t < args.num_tokens; ++t) {
      for (size_t k = 0; k < args.top_k; ++k) CheckRoute(t, k, layer_id);
    }
  }

  // -1 = dropped.
  int32_t Row(size_t t, size_t k) const {
    return args_.expanded_row_idx[row_major_ ? t * args_.top_k + k : k * args_.num_tokens + t];
  }

 private:
  static void CheckSize(std::string_view what, size_t found, size_t expected, size_t layer_id) {
    if (found != expected)
      Refuse(layer_id, fmt::format("{}: expected {}, found {}", what, expected, found));
  }
  void CheckRoute(size_t t, size_t k, size_t layer_id) const {
    const int32_t row = Row(t, k);
    if (row < -1 || (row >= 0 && static_cast<size_t>(row) >= args_.expanded_rows.rows))
      Refuse(layer_id, fmt::format("column {} of token {} is in row {}; there are rows 0 to {}", k,
                                   t, row, static_cast<int64_t>(args_.expanded_rows.rows) - 1));
    if (row < 0 || args_.bias.rows == 0) return;
    const int32_t id = args_.expert_ids[t * args_.top_k + k];
    if (id < 0 || static_cast<size_t>(id) >= args_.bias.rows)
      Refuse(layer_id,
             fmt::format("token {} names expert {}, the bias has {}", t, id, args_.bias.rows));
  }

  const FinalizeRoutingArgs& args_;
  bool row_major_;
};

void FinalizeToken(const FinalizeRoutingArgs& args, const Routes& routes, size_t t, float* out) {
  const size_t width = args.expanded_rows.cols;
  std::fill_n(out, width, 0.0f);
  for (size_t k = 0; k < args.top_k; ++k) {
    const int32_t row = routes.Row(t, k);
    if (row < 0) continue;
    const size_t route = t * args.top_k + k;
    const float scale = args.scales.empty() ? 1.0f : args.scales[route];
    kernels::ScaleAddTo(args.expanded_rows.Row(static_cast<size_t>(row)), scale, width, out);
    if (args.bias.rows == 0) continue;
    kernels::ScaleAddTo(args.bias.Row(static_cast<size_t>(args.expert_ids[route])), scale, width,
                        out);
  }
  for (const ConstRows& skip : {args.skip1, args.skip2}) {
    if (skip.rows != 0) kernels::AddTo(skip.Row(t), width, out);
  }
}

}  // namespace

Rows FinalizeRouting::Run(ExecContext& context, const FinalizeRoutingArgs& args) const {
  const Routes routes(args, layer_id_);
  const Rows out = context.arena.AllocateRows(args.num_tokens, args.expanded_rows.cols);
  constexpr size_t kTokensPerTask = 4;
  const size_t tasks = (args.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  context.pool.Run(tasks, [&](size_t task, size_t) {
    const size_t end = std::min(args.num_tokens, (task + 1) * kTokensPerTask);
    for (size_t t = task * kTokensPerTask; t < end; ++t) FinalizeToken(args, routes, t, out.Row(t));
  });
  return out;
}

Rows TokenUnpermute::Run(ExecContext& context, const FinalizeRoutingArgs& args) const {
  const auto refuse = [&](std::string_view what) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("layer {}: TokenUnpermute has no {}; FinalizeRouting has", layer_id_, what));
  };
  if (args.bias.rows != 0) refuse("bias");
  if (args.skip1.rows != 0 || args.skip2.rows != 0) refuse("skips");
  if (!IsRowMajor(args.mode, layer_id_)) refuse("column-major modes");
  return FinalizeRouting(layer_id_).Run(context, args);
}

AllGatherFinalizeRoutingWrapper::AllGatherFinalizeRoutingWrapper(
    std::unique_ptr<const BaseFinalizeRouting> inner, GatherColumns gather)
    : inner_(std::move(inner)), gather_(std::move(gather)) {}

Rows AllGatherFinalizeRoutingWrapper::Run(ExecContext& context,
                                          const FinalizeRoutingArgs& args) const {
  const Rows rows = inner_->Run(context, args);
  return gather_ ? gather_(context, rows) : rows;
}

}  // namespace switchyard::moe::ascend
