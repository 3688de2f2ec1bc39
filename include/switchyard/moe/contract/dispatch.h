// What a dispatcher hands to a runner, and what it takes back, with the promises that both sides
// must share. Contract 1.4, 1.8, 3.
#pragma once

#include <cstddef>
#include <string_view>

#include "switchyard/core/rows.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// The data layouts of contract 1.4. A format is a layout, not a protocol: several dispatchers emit
// the same one.
enum class DispatchFormat {
  kStandard,
  kAscendTp,
  kDeepepNormal,
  kDeepepLl,
  kDeepepV2,
  kFlashinfer
};
std::string_view DispatchFormatName(DispatchFormat format);

enum class RowKind { kToken, kExpanded };  // a row is a token, or one (token, expert) route
enum class WeightsAppliedBy {
  kRunner,
  kCombine
};                                       // who multiplies by the routing weights and sums over K
enum class IdSpace { kGlobal, kLocal };  // what the ids of a row count

// Said by the dispatch, repeated by the combine; a mismatch is refused. They are what keeps a
// result from being weighted or summed twice, or not at all.
struct DispatchPromises {
  RowKind row_kind = RowKind::kToken;
  WeightsAppliedBy weights_applied_by = WeightsAppliedBy::kRunner;
  IdSpace id_space = IdSpace::kGlobal;

  friend bool operator==(const DispatchPromises&, const DispatchPromises&) = default;
};

// Base of every dispatch output; the concrete struct is named by `format`. Lives in the arena of
// the step.
struct DispatchOutput {
  DispatchFormat format;
  DispatchPromises promises;
};

// Base of every combine input; its format is that of the dispatch it answers (contract 1.4).
struct CombineInput {
  DispatchFormat format;
  DispatchPromises promises;
};

// Format "standard" (contract 3.2): every rank has all tokens, nothing was moved.
struct StandardDispatchOutput : DispatchOutput {
  ConstRows hidden_states;  // [T, H]
  TopKOutput topk_output;   // global ids

  StandardDispatchOutput(ConstRows hidden, const TopKOutput& topk)
      : DispatchOutput{DispatchFormat::kStandard, {}}, hidden_states(hidden), topk_output(topk) {}
};

// Answer to StandardDispatchOutput: rows weighted and summed over K by the runner.
struct StandardCombineInput : CombineInput {
  Rows hidden_states;  // [T, H]

  explicit StandardCombineInput(Rows hidden)
      : CombineInput{DispatchFormat::kStandard, {}}, hidden_states(hidden) {}
};

// The concrete struct behind a base reference. Errors: kInternal if the format is another one.
const StandardDispatchOutput& AsStandard(const DispatchOutput& output);
const StandardCombineInput& AsStandard(const CombineInput& input);

}  // namespace switchyard::moe
