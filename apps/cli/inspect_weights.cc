#include "inspect_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

// In the order in which a token meets them.
constexpr std::array<std::string_view, 8> kParts = {"embedding",   "attention",  "router",
                                                    "experts w13", "experts w2", "shared experts",
                                                    "dense mlp",   "head"};

std::string_view PartOf(std::string_view module) {
  const auto has = [&](std::string_view text) {
    return module.find(text) != std::string_view::npos;
  };
  if (has("embed_tokens")) return "embedding";
  if (has("lm_head")) return "head";
  if (has(".self_attn.")) return "attention";
  if (has(".shared_experts.")) return "shared experts";
  if (has(".experts.")) return has(".down_proj") || has(".w2") ? "experts w2" : "experts w13";
  if (module.ends_with(".gate") || module.ends_with(".router")) return "router";
  return "dense mlp";
}

// "3" of "model.layers.3.…"; empty outside of layers.
std::string_view LayerOf(std::string_view module) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!module.starts_with(kLayers)) return {};
  module.remove_prefix(kLayers.size());
  return module.substr(0, module.find('.'));
}

double BitsPerWeight(size_t bytes, size_t elements) {
  return elements == 0 ? 0 : static_cast<double>(bytes) * 8 / static_cast<double>(elements);
}

// Matrices of one part that are stored alike.
struct Group {
  const StoredMatrix* first = nullptr;
  size_t elements = 0, bytes = 0, matrices = 0;
  std::set<std::string_view> layers;
  std::map<std::string, std::vector<std::string>> notes;  // note -> modules
};

ordered_json DescribeGroup(const Group& group) {
  constexpr size_t kNamed = 4;
  const StoredMatrix& matrix = *group.first;
  ordered_json notes = ordered_json::array();
  for (const auto& [note, modules] : group.notes) {
    const size_t named = std::min(kNamed, modules.size());
    notes.push_back(
        {{"note", note},
         {"matrices", modules.size()},
         {"modules", std::vector<std::string>(modules.begin(),
                                              modules.begin() + static_cast<ptrdiff_t>(named))}});
  }
  return {{"scheme", matrix.scheme},
          {"dtype", DTypeName(matrix.dtype)},
          {"format", matrix.format},
          {"quantized", matrix.is_quantized},
          {"block", {matrix.block_rows, matrix.block_cols}},
          {"activations", ActQuantKindName(matrix.activations)},
          {"repacked", matrix.is_repacked},
          {"bits_per_weight", BitsPerWeight(group.bytes, group.elements)},
          {"elements", group.elements},
          {"bytes", group.bytes},
          {"matrices", group.matrices},
          {"layers", group.layers.size()},
          {"notes", notes}};
}

std::vector<Group> GroupsOf(const Model& model, std::string_view part) {
  std::vector<Group> groups;
  for (const StoredMatrix& matrix : model.matrices()) {
    if (PartOf(matrix.module) != part) continue;
    auto group = std::ranges::find_if(groups, [&](const Group& known) {
      const StoredMatrix& first = *known.first;
      return first.format == matrix.format && first.scheme == matrix.scheme &&
             first.activations == matrix.activations && first.is_repacked == matrix.is_repacked;
    });
    if (group == groups.end()) group = groups.insert(groups.end(), Group{&matrix, 0, 0, 0, {}, {}});
    group->elements += matrix.elements();
    group->bytes += matrix.bytes;
    ++group->matrices;
    if (const std::string_view layer = LayerOf(matrix.module); !layer.empty())
      group->layers.insert(layer);
    if (!matrix.note.empty()) group->notes[matrix.note].push_back(matrix.module);
  }
  return groups;
}

// Tensors of one role by type.
ordered_json DescribeRole(const Model& model, TensorRole role) {
  std::map<std::string_view, std::pair<size_t, size_t>> by_type;  // elements, bytes
  for (const FileTensor& tensor : model.tensors()) {
    if (tensor.role != role) continue;
    size_t count = 0;
    tensor.shape.NumElements(count);
    auto& [elements, bytes] = by_type[DTypeName(tensor.dtype)];
    elements += count;
    bytes += tensor.bytes;
  }
  ordered_json rows = ordered_json::array();
  for (const auto& [dtype, sizes] : by_type) {
    rows.push_back({{"scheme", "unquant"},
                    {"dtype", dtype},
                    {"elements", sizes.first},
                    {"bytes", sizes.second}});
  }
  return rows;
}

void PrintNotes(const ordered_json& notes) {
  for (const ordered_json& note : notes) {
    const size_t count = note["matrices"].get<size_t>();
    std::string modules;
    for (const ordered_json& module : note["modules"])
      modules += fmt::format("{}{}", modules.empty() ? "" : ", ", module.get<std::string>());
    const size_t unnamed = count - note["modules"].size();
    if (unnamed > 0) modules += fmt::format(" and {} more", unnamed);
    fmt::print("  {:<26} {}: {}\n", "", note["note"].get<std::string>(), Printable(modules));
  }
}

}  // namespace

ordered_json DescribeParts(const Model& model) {
  ordered_json parts = ordered_json::object();
  for (std::string_view part : kParts) {
    for (const Group& group : GroupsOf(model, part))
      parts[std::string(part)].push_back(DescribeGroup(group));
  }
  for (const auto& [role, part] : {std::pair{TensorRole::kVector, "norms and biases"},
                                   std::pair{TensorRole::kUnused, "not used"}}) {
    ordered_json rows = DescribeRole(model, role);
    if (!rows.empty()) parts[part] = std::move(rows);
  }
  return parts;
}

ordered_json DescribeWeights(const Model& model) {
  size_t elements = 0, bytes = 0, quantized_elements = 0, quantized_bytes = 0;
  for (const StoredMatrix& matrix : model.matrices()) {
    elements += matrix.elements();
    bytes += matrix.bytes;
    if (!matrix.is_quantized) continue;
    quantized_elements += matrix.elements();
    quantized_bytes += matrix.bytes;
  }
  return {{"elements", elements},
          {"bytes", bytes},
          {"bits_per_weight", BitsPerWeight(bytes, elements)},
          {"quantized_elements", quantized_elements},
          {"quantized_bytes", quantized_bytes}};
}

ordered_json DescribeTensors(const Model& model) {
  ordered_json rows = ordered_json::array();
  for (const FileTensor& tensor : model.tensors()) {
    rows.push_back(
        {{"name", tensor.name},
         {"dtype", DTypeName(tensor.dtype)},
         {"shape", std::vector<size_t>(tensor.shape.dims().begin(), tensor.shape.dims().end())},
         {"bytes", tensor.bytes},
         {"file", tensor.file},
         {"role", TensorRoleName(tensor.role)},
         {"use", tensor.use}});
  }
  return rows;
}

void PrintParts(const ordered_json& parts) {
  for (const auto& [part, rows] : parts.items()) {
    for (const ordered_json& row : rows) {
      const std::string bytes = FormatBytes(row["bytes"].get<double>());
      if (!row.contains("format")) {
        fmt::print("  {:<26} {}, {} elements, {}\n", part, row["dtype"].get<std::string>(),
                   row["elements"].get<size_t>(), bytes);
        continue;
      }
      fmt::print(
          "  {:<26} {} ({}): {:.3g} bits per weight, {} elements, {}, {} matrices in {} "
          "layers\n",
          part, row["scheme"].get<std::string>(), row["format"].get<std::string>(),
          row["bits_per_weight"].get<double>(), row["elements"].get<size_t>(), bytes,
          row["matrices"].get<size_t>(), row["layers"].get<size_t>());
      PrintNotes(row["notes"]);
    }
  }
}

void PrintTensors(const ordered_json& tensors) {
  for (const ordered_json& row : tensors) {
    fmt::print("  {:<60} {:<8} {:<20} {:>10}  {:<8} {}\n",
               Printable(row["name"].get<std::string>()), row["dtype"].get<std::string>(),
               row["shape"].dump(), FormatBytes(row["bytes"].get<double>()),
               row["role"].get<std::string>(), Printable(row["file"].get<std::string>()));
  }
}

}  // namespace switchyard::cli
