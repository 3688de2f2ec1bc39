// The comparison of computed tensors with those that a case expects.
#pragma once

#include <vector>

#include "replay/case.h"
#include "switchyard/replay/replay.h"

namespace switchyard::replay {

// Runs the checks of `file` in their order. `lowp` takes the tolerances for engines that round
// intermediates to bf16 where the case has them.
//
// A tensor that was not computed fails its check, with two exceptions: a check with the condition
// "when" (activations quantised or not) and the mode closer_than_plain speak of one of two ways to
// compute the same result, and what the engine did not compute is not compared.
// Errors: kCorruptData naming the check and its field, kUnsupported for a mode, "order" or
//   "relaxed" that is not known.
std::vector<CheckResult> RunChecks(const CaseFile& file, const Outputs& outputs, bool lowp);

}  // namespace switchyard::replay
