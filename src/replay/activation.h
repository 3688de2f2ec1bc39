// The activation keys of a case's config, which the kinds activation, layer and qlayer share.
#pragma once

#include "replay/case.h"
#include "switchyard/moe/contract/config.h"

namespace switchyard::replay {

// Sets activation, is_gated, gemm1_alpha, gemm1_clamp_limit, swiglu_limit and gate_up_interleaved
// of `config`. Errors: kCorruptData naming file and field; kUnsupported for a gate_up_layout other
// than halves and interleaved.
void ReadActivation(const CaseFile& file, moe::MoeRunnerConfig& config);

}  // namespace switchyard::replay
