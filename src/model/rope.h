// Rotary frequencies and their scaling kinds.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "model/config_reader.h"
#include "switchyard/model/config.h"

namespace switchyard {

// Reads rope_theta, rope_scaling (transformers 4) or rope_parameters (transformers 5).
// Errors: kUnsupported naming the field for an unknown kind; kCorruptData for missing or wrong
//   values.
RopeConfig ParseRope(ConfigReader& config, size_t rotary_dim, size_t max_positions,
                     double default_theta);

// Inverse frequencies [rotary_dim / 2] of a sequence that may reach `sequence_limit` tokens. Only
// the kinds dynamic and longrope look at the limit, and it is fixed when a sequence starts, so that
// a token's rotation does not depend on how the sequence is cut into passes.
// Source: transformers 5, modeling_rope_utils.py (formulas); Peng et al., "YaRN", 2023; Ding et
//   al., "LongRoPE", 2024.
std::vector<float> InverseFrequencies(const RopeConfig& config, size_t sequence_limit);

// What DeepSeek multiplies the scores with: yarn stretches contexts, and the softmax would blur.
double YarnScoreScale(const RopeConfig& config);

// Whether the frequencies depend on the sequence at all.
bool FrequenciesDependOnSequence(const RopeConfig& config);

// cos and sin [rotary_dim / 2] of one position, attention_factor included.
void RopeAngles(const RopeConfig& config, const std::vector<float>& inverse_frequencies,
                size_t position, float* cos, float* sin);

}  // namespace switchyard
