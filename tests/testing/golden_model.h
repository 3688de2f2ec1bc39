// A recorded model of the golden set: its checkpoint folder, prompts and expected tensors.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"

namespace switchyard::testing {

class GoldenModel {
 public:
  explicit GoldenModel(const std::filesystem::path& folder);

  const std::string& name() const { return name_; }
  std::filesystem::path checkpoint() const { return folder_ / "checkpoint"; }
  // Absolute bounds that the set suggests for an f32 engine.
  double logits_tolerance() const { return logits_tolerance_; }
  double hidden_tolerance() const { return hidden_tolerance_; }

  static constexpr size_t kNumPrompts = 4;
  std::vector<int32_t> Ids(const std::string& tensor) const;
  // Prompt and recorded continuation, one after another.
  std::vector<int32_t> PromptAndAnswer(size_t prompt) const;
  bool Has(const std::string& tensor) const { return expected_.Find(tensor) != nullptr; }
  TensorView Tensor(const std::string& tensor) const;

 private:
  std::filesystem::path folder_;
  std::string name_;
  double logits_tolerance_ = 0;
  double hidden_tolerance_ = 0;
  std::shared_ptr<const ModelFiles> files_;
  SafetensorsFile expected_;
};

// All recorded models of the architectures that this build knows: the small set of the repository,
// and the large one where it is.
std::vector<GoldenModel> GoldenModels();

}  // namespace switchyard::testing
