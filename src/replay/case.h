// A recorded case in memory, and what a kind computes from it.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/shape.h"
#include "switchyard/moe/registry/registry.h"
#include "switchyard/replay/replay.h"

namespace switchyard::replay {

// A computed tensor: f64 or integer values in row-major order. Of a tensor that the case compares
// by codes (mode "codes"), the codes: an F8_E4M3 or U8 element is its byte, 0 to 255.
struct Computed {
  Shape shape;
  std::vector<double> values;
};
// Computed tensors by name ("out.y").
using Outputs = std::map<std::string, Computed>;

// The file of a case, read whole. Every getter throws kCorruptData naming file and tensor or field.
class CaseFile {
 public:
  static CaseFile Read(const std::filesystem::path& path);

  const std::string& name() const;
  const std::string& kind() const;
  const nlohmann::json& config() const;
  const nlohmann::json& checks() const;

  // Config fields; JSON null counts as absent.
  bool HasConfig(std::string_view key) const;
  size_t Size(std::string_view key) const;
  double Number(std::string_view key) const;
  double NumberOr(std::string_view key, double fallback) const;
  size_t SizeOr(std::string_view key, size_t fallback) const;
  bool Flag(std::string_view key) const;
  std::string Text(std::string_view key) const;

  // Tensors. F32 widens F16, BF16 and F8_E4M3; Ints takes every integer type.
  bool Has(std::string_view tensor) const;
  TensorView View(std::string_view tensor) const;
  // The same, and the shape must be this one.
  TensorView View(std::string_view tensor, const Shape& shape) const;
  std::vector<float> F32(std::string_view tensor) const;
  std::vector<int64_t> Ints(std::string_view tensor) const;
  std::vector<int32_t> I32(std::string_view tensor) const;
  // Floats or integers, whichever it holds.
  std::vector<double> Values(std::string_view tensor) const;

  // The same tensors under another config, which must be an object: a config inside a config.
  CaseFile WithConfig(const nlohmann::json& config) const;

  // The same for files of the same bytes.
  uint64_t Hash() const;

  // Throws kCorruptData with the file's name before the message.
  [[noreturn]] void Corrupt(const std::string& message) const;

 private:
  struct Storage;

  CaseFile(std::shared_ptr<const Storage> storage, std::shared_ptr<const nlohmann::json> config)
      : storage_(std::move(storage)), config_(std::move(config)) {}
  const nlohmann::json& Field(std::string_view key) const;
  [[noreturn]] void BadField(std::string_view key, std::string_view expected) const;

  std::shared_ptr<const Storage> storage_;
  std::shared_ptr<const nlohmann::json> config_;
};

// What a kind is given and returns. `skipped` is set instead of computing.
struct KindInput {
  const CaseFile& file;
  const moe::Registry& registry;
  ExecContext& context;
  const ReplayOptions& options;
};
struct KindOutput {
  Outputs outputs;
  std::string skipped;
  // The same tensors computed in other ways, and which ("nixl, 4 threads"); each is compared too.
  std::vector<std::pair<std::string, Outputs>> others = {};
};

// Whether this rank compares: all are alike until a kind has done what it does on all ranks.
inline bool IsFirstRank(const ReplayOptions& options) {
  return options.world == nullptr || options.world->rank() == 0;
}

// One per kind, in src/replay/<kind>.cc; those that this build has are in replay/kinds.def. The
// kinds of all ranks are collective over options.world; what they return counts on rank 0.
KindOutput ReplayRouting(const KindInput& input);
KindOutput ReplayActivation(const KindInput& input);
KindOutput ReplayLayer(const KindInput& input);
KindOutput ReplayQuant(const KindInput& input);
KindOutput ReplayQLayer(const KindInput& input);
KindOutput ReplayEplb(const KindInput& input);
KindOutput ReplayDispatch(const KindInput& input);

}  // namespace switchyard::replay
