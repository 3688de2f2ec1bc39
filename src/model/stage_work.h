// What the stages of a forward pass cannot avoid to read and to compute, for a Profile.
#pragma once

#include <cstddef>
#include <span>

#include "model/attention.h"
#include "quant/linear.h"
#include "switchyard/core/profile.h"
#include "switchyard/model/model.h"

namespace switchyard {

// What a product reads of a matrix: codes and scales.
size_t MatrixBytes(const WeightMatrix& matrix);

// Products of `rows` rows with whole matrices, each of which is read once.
StageWork WorkOf(std::span<const quant::LinearJob> jobs, size_t rows);

// Scores and sums of the heads of a layer: every key that a chunk sees is read once.
StageWork AttentionWork(const ModelConfig& config, std::span<const SequenceChunk> chunks,
                        const KvView& cache, size_t layer, const QueryHeads& heads);

}  // namespace switchyard
