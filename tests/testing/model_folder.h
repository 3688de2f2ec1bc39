// A checkpoint folder that a test changes: tensors and config of a recorded model, written anew.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"

namespace switchyard::testing {

class ModelFolder {
 public:
  struct Tensor {
    DType dtype;
    std::vector<size_t> shape;
    std::vector<std::byte> bytes;
  };

  // Copies what `checkpoint` holds.
  explicit ModelFolder(const std::filesystem::path& checkpoint) {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() /
            ("switchyard-test-" + std::to_string(getpid()) + "-" + std::to_string(count++));
    std::filesystem::create_directories(path_);
    const auto files = ModelFiles::OpenFolder(checkpoint);
    config = nlohmann::ordered_json::parse(files->ReadText("config.json"));
    for (const std::string& name : files->Names()) {
      if (!name.ends_with(".safetensors")) continue;
      const SafetensorsFile file = SafetensorsFile::Parse(name, files->Map(name));
      for (const TensorInfo& info : file.tensors()) {
        const TensorView view = file.View(info);
        tensors[info.name] = {info.dtype,
                              {info.shape.dims().begin(), info.shape.dims().end()},
                              {view.data, view.data + view.NumBytes()}};
      }
    }
  }
  ~ModelFolder() { std::filesystem::remove_all(path_); }
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;

  // Writes config.json and model.safetensors and opens the folder.
  std::shared_ptr<const ModelFiles> Write() const {
    std::ofstream(path_ / "config.json") << config.dump();
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors) {
      named.push_back(
          {name,
           {tensor.bytes.data(), tensor.dtype, Shape(std::span<const size_t>(tensor.shape))}});
    }
    WriteSafetensors(path_ / "model.safetensors", named);
    return ModelFiles::OpenFolder(path_);
  }

  const std::filesystem::path& path() const { return path_; }

  // Moves a tensor to another name.
  void Rename(const std::string& from, const std::string& to) {
    tensors[to] = std::move(tensors.at(from));
    tensors.erase(from);
  }

  nlohmann::ordered_json config;
  std::map<std::string, Tensor> tensors;

 private:
  std::filesystem::path path_;
};

}  // namespace switchyard::testing
