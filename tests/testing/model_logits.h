// The logits of a loaded model, without an engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "switchyard/model/kv_view.h"
#include "switchyard/model/model.h"

namespace switchyard::testing {

// Of every position of a few tokens, by default all below 10, with a cache of one block. Collective
// where the model is.
inline std::vector<float> LogitsOf(Model& model, ThreadPool& pool,
                                   std::vector<int32_t> ids = {1, 5, 9, 2, 7},
                                   Profile* profile = nullptr,
                                   ForwardObserver* observer = nullptr) {
  const std::vector<uint32_t> blocks = {0};
  std::vector<std::vector<float>> memory;
  std::vector<KvLayerView> layers;
  const ModelConfig& config = model.config();
  const std::vector<KvGroup> groups = PlanKvGroups(config);
  const std::vector<BlockTable> tables(groups.size(), BlockTable{0, blocks});
  const size_t block = config.kv_shape().elements() * kKvBlockSize;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    memory.emplace_back(block);
    size_t group = 0;
    while (std::ranges::find(groups[group].layers, i) == groups[group].layers.end()) ++group;
    layers.push_back(
        {reinterpret_cast<std::byte*>(memory.back().data()), block * sizeof(float), group});
  }
  Arena arena;
  ExecContext context{pool, arena, profile};
  const SequenceChunk chunk{ids, 0, ids.size(), tables, LogitsWanted::kAll};
  const Rows rows = model.Forward(context, {&chunk, 1}, {DType::kF32, layers}, observer);
  std::vector<float> logits;
  for (size_t r = 0; r < rows.rows; ++r)
    logits.insert(logits.end(), rows.Row(r), rows.Row(r) + rows.cols);
  return logits;
}

}  // namespace switchyard::testing
