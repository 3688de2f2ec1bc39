// Router logits to chosen experts and their weights. Contract 2.
#pragma once

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Errors: kInvalidArgument naming the field, its value and its range (top_k must be 1 ..
//   num_experts, a bias must have num_experts entries).
void ValidateTopK(const TopKConfig& config);

// Chooses config.top_k experts for every row of logits.
//
// Shapes: logits [T, E] f32. Rows t >= num_valid are padding: ids -1, weights 0 (contract 2.10). T
//   may be 0.
// All arithmetic in f32. A NaN choice value ranks as -1e30 (contract 2.4); equal values go to the
// lower id (2.5), columns are in order of descending choice value. Renormalisation divides by (sum
// + 1e-20). Deterministic per row. The result lives in context.arena and refers to logits.
TopKOutput SelectExperts(ExecContext& context, const TopKConfig& config, ConstRows logits,
                         size_t num_valid);

// The same in f64, for one row of E logits: the oracle of tests. ids and weights have top_k places.
void SelectExpertsReference(const TopKConfig& config, const float* logits, int32_t* ids,
                            double* weights);

}  // namespace switchyard::moe
