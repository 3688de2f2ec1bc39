// Writes case files for tests.
#pragma once

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/model/safetensors.h"

namespace switchyard::testing {

// A case of kind "dispatch" unless told otherwise.
class CaseBuilder {
 public:
  template <typename T>
  CaseBuilder& Tensor(const std::string& name, DType dtype, const Shape& shape,
                      const std::vector<T>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(T));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    tensors_.push_back({name, dtype, shape, std::move(bytes)});
    return *this;
  }
  CaseBuilder& F32(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    return Tensor(name, DType::kF32, shape, values);
  }
  CaseBuilder& I32(const std::string& name, const Shape& shape,
                   const std::vector<int32_t>& values) {
    return Tensor(name, DType::kI32, shape, values);
  }
  CaseBuilder& Config(const std::string& key, const nlohmann::json& value) {
    config[key] = value;
    return *this;
  }
  CaseBuilder& Check(const nlohmann::json& check) {
    checks.push_back(check);
    return *this;
  }

  void Write(const std::filesystem::path& path) const {
    const nlohmann::json text = {{"name", "built"},
                                 {"kind", kind},
                                 {"config", config},
                                 {"checks", checks},
                                 {"source", nlohmann::json::array()},
                                 {"notes", ""}};
    Write(path, {{"format", "moe-golden-1"}, {"kind", kind}, {"case", text.dump()}});
  }
  void Write(const std::filesystem::path& path,
             const std::map<std::string, std::string>& metadata) const {
    std::vector<NamedTensor> named;
    for (const auto& tensor : tensors_) {
      named.push_back({tensor.name, {tensor.bytes.data(), tensor.dtype, tensor.shape}});
    }
    WriteSafetensors(path, named, metadata);
  }

  std::string kind = "dispatch";
  nlohmann::json config = nlohmann::json::object();
  nlohmann::json checks = nlohmann::json::array();

 private:
  struct Stored {
    std::string name;
    DType dtype;
    Shape shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Stored> tensors_;
};

}  // namespace switchyard::testing
