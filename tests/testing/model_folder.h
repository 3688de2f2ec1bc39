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

  // One without config and tensors.
  ModelFolder() {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() /
            ("switchyard-test-" + std::to_string(getpid()) + "-" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  // Copies what `checkpoint` holds.
  explicit ModelFolder(const std::filesystem::path& checkpoint) : ModelFolder() {
    const auto files = ModelFiles::OpenFolder(checkpoint);
    config = nlohmann::ordered_json::parse(files->ReadText("config.json"));
    for (const std::string& name : files->Names()) {
      if (name.starts_with("quant_model_description")) texts[name] = files->ReadText(name);
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

  // Writes config.json, model.safetensors and the other texts and opens the folder.
  std::shared_ptr<const ModelFiles> Write() const {
    std::ofstream(path_ / "config.json") << config.dump();
    for (const auto& [name, text] : texts) std::ofstream(path_ / name) << text;
    WriteTensors();
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
  std::map<std::string, std::string> texts;  // other files, by name

 private:
  // Not WriteSafetensors, which waits for the disk: tests write thousands of folders.
  void WriteTensors() const {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    size_t end = 0;
    for (const auto& [name, tensor] : tensors) {
      const size_t begin = end;
      end += tensor.bytes.size();
      header[name] = {{"dtype", std::string(DTypeName(tensor.dtype))},
                      {"shape", tensor.shape},
                      {"data_offsets", {begin, end}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    std::ofstream file(path_ / "model.safetensors", std::ios::binary);
    const uint64_t size = text.size();
    file.write(reinterpret_cast<const char*>(&size), sizeof(size));
    file << text;
    for (const auto& [name, tensor] : tensors)
      file.write(reinterpret_cast<const char*>(tensor.bytes.data()),
                 static_cast<std::streamsize>(tensor.bytes.size()));
  }

  std::filesystem::path path_;
};

}  // namespace switchyard::testing
