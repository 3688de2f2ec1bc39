// A recorded router: what kind "routing", and a layer that routes from logits, read from a case.
#pragma once

#include <cstdint>
#include <vector>

#include "replay/case.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::replay {

// The router of a case and the inputs of one call; owns everything that they refer to.
class RoutingCase {
 public:
  // `file.config()` is that of a routing case.
  // Errors: kCorruptData naming the field or tensor; kUnsupported for an unknown policy;
  //   kInvalidArgument for a config that contradicts itself.
  explicit RoutingCase(const CaseFile& file);
  RoutingCase(const RoutingCase&) = delete;
  RoutingCase& operator=(const RoutingCase&) = delete;

  const moe::TopKConfig& config() const { return config_; }
  const moe::TopKInputs& inputs() const { return inputs_; }
  ConstRows logits() const { return ConstRows(logits_.data(), num_tokens_, config_.num_experts); }

 private:
  void ReadScoring(const CaseFile& file);
  void ReadPolicy(const CaseFile& file);
  void ReadShared(const CaseFile& file);
  void ReadBias(const CaseFile& file);
  void ReadPlacement(const CaseFile& file);

  size_t num_tokens_;
  moe::TopKConfig config_;
  moe::TopKInputs inputs_;
  moe::ExpertPlacement placement_;
  std::vector<float> logits_, bias_, per_expert_scale_;
  std::vector<int32_t> tid2eid_, all_physical_, num_valid_, rank_map_;
  std::vector<int64_t> input_ids_;
};

}  // namespace switchyard::replay
