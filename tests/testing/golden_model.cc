#include "testing/golden_model.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "model/architectures/architecture.h"
#include "testing/goldens.h"

namespace switchyard::testing {

GoldenModel::GoldenModel(const std::filesystem::path& folder)
    : folder_(folder),
      name_(folder.filename().string()),
      files_(ModelFiles::OpenFolder(folder)),
      expected_(
          SafetensorsFile::Parse("expected.safetensors", files_->Map("expected.safetensors"))) {
  const nlohmann::json manifest = nlohmann::json::parse(files_->ReadText("manifest.json"));
  logits_tolerance_ = manifest.at("suggested_tolerance").at("logits_abs").get<double>();
  hidden_tolerance_ = manifest.at("suggested_tolerance").at("hidden_abs").get<double>();
}

TensorView GoldenModel::Tensor(const std::string& tensor) const {
  const TensorInfo* info = expected_.Find(tensor);
  if (info == nullptr) throw std::runtime_error(name_ + " has no tensor " + tensor);
  return expected_.View(*info);
}

std::vector<int32_t> GoldenModel::Ids(const std::string& tensor) const {
  const TensorView view = Tensor(tensor);
  const auto* ids = reinterpret_cast<const int64_t*>(view.data);
  std::vector<int32_t> result;
  for (size_t i = 0; i < view.NumElements(); ++i) result.push_back(static_cast<int32_t>(ids[i]));
  return result;
}

std::vector<int32_t> GoldenModel::PromptAndAnswer(size_t prompt) const {
  const std::string prefix = "p" + std::to_string(prompt) + ".";
  std::vector<int32_t> ids = Ids(prefix + "input_ids");
  const std::vector<int32_t> answer = Ids(prefix + "greedy_ids");
  ids.insert(ids.end(), answer.begin(), answer.end());
  return ids;
}

std::vector<GoldenModel> GoldenModels() {
  std::vector<std::filesystem::path> folders;
  std::vector<std::filesystem::path> roots = {LocalGoldenDir()};
  if (GoldenDir()) roots.push_back(*GoldenDir() / "models");
  for (const std::filesystem::path& root : roots) {
    if (!std::filesystem::is_directory(root)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      std::ifstream config(entry.path() / "checkpoint" / "config.json");
      if (!config) continue;
      const std::string type = nlohmann::json::parse(config).value("model_type", "");
      const auto known = AllArchitectures();
      if (std::any_of(known.begin(), known.end(),
                      [&](const ArchitectureEntry* entry) { return entry->name == type; }))
        folders.push_back(entry.path());
    }
  }
  std::sort(folders.begin(), folders.end());
  std::vector<GoldenModel> models;
  for (const std::filesystem::path& folder : folders) models.emplace_back(folder);
  return models;
}

}  // namespace switchyard::testing
