// Router logits to chosen experts and their weights. Contract 2.
#pragma once

#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

// Every contradiction of a config: counts and groups that do not divide, too few experts that
// survive the groups, sizes of the bias, of the scales and of the table, table entries out of range
// or twice in a row, fields that the policy does not read.
// Errors: kInvalidArgument naming the field, its value and what it must be.
void ValidateTopK(const TopKConfig& config);

// Chooses experts for every row of logits. `config` must have passed ValidateTopK, and a placement
// ValidatePlacement: neither is proved again in every call.
//
// Shapes: logits [T, E] f32; `inputs` as its struct says. T may be 0.
// All arithmetic in f32. A NaN choice value ranks as -1e30, in the log1p variant as +inf (contract
// 2.4); equal values go to the lower id and equal groups to the lower group (2.5). Padded rows are
// written last (2.10).
// Deterministic: a row's result depends on the row, its number and the seed, not on the batch or
//   the threads. The result lives in context.arena and refers to logits; nothing else is allocated.
// Errors: kInvalidArgument naming the input, what was found and what was expected: sizes, token ids
//   outside the table, a bias per token beside a static one, ids of a custom function out of range.
TopKOutput SelectExperts(ExecContext& context, const TopKConfig& config, ConstRows logits,
                         const TopKInputs& inputs);

// The same with nothing but a number of rows that are no padding.
// Shapes: logits [T, E] f32.
inline TopKOutput SelectExperts(ExecContext& context, const TopKConfig& config, ConstRows logits,
                                size_t num_valid) {
  TopKInputs inputs;
  inputs.num_token_non_padded = num_valid;
  return SelectExperts(context, config, logits, inputs);
}

// A routing in f64, row-major as in TopKOutput.
struct ReferenceRouting {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};

// The same in f64, by full sorts: the oracle of tests. A custom function computes its own f32.
// Shapes: as SelectExperts.
ReferenceRouting SelectExpertsReference(const TopKConfig& config, ConstRows logits,
                                        const TopKInputs& inputs);

// One row of E logits without other inputs. ids and weights have top_k places.
void SelectExpertsReference(const TopKConfig& config, const float* logits, int32_t* ids,
                            double* weights);

// The table of hash routing that a checkpoint without one stands for: (token + column) mod E.
// Contract 2.8.
// Shapes: returns [vocabulary, columns].
// Errors: kInvalidArgument if there are fewer experts than columns.
std::vector<int32_t> DefaultHashTable(size_t vocabulary, size_t columns, size_t num_experts);

}  // namespace switchyard::moe
