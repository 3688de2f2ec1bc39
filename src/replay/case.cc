#include "replay/case.h"

#include <fmt/format.h>

#include <fstream>
#include <optional>
#include <system_error>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/small_floats.h"
#include "switchyard/model/safetensors.h"

namespace switchyard::replay {
namespace {

constexpr std::string_view kFormat = "moe-golden-1";

std::vector<std::byte> ReadFile(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: {}", path.string(),
                                                  std::filesystem::exists(path, ignored)
                                                      ? "is not a file, expected a case"
                                                      : "there is no such file"));
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  std::vector<std::byte> bytes(size > 0 ? static_cast<size_t>(size) : 0);
  if (size >= 0) {
    file.seekg(0);
    file.read(reinterpret_cast<char*>(bytes.data()), size);
  }
  if (size < 0 || !file) {
    throw Error(ErrorCode::kUnavailable, fmt::format("{}: cannot be read", path.string()));
  }
  return bytes;
}

// The elements of `view`, stored as Stored, each through `convert`.
template <typename Stored, typename Value, typename Convert>
std::vector<Value> ConvertAll(const TensorView& view, const Convert& convert) {
  const auto* stored = reinterpret_cast<const Stored*>(view.data);
  const size_t count = view.NumElements();
  std::vector<Value> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = convert(stored[i]);
  return values;
}

template <typename Stored>
std::vector<int64_t> WidenInts(const TensorView& view) {
  return ConvertAll<Stored, int64_t>(view, [](Stored v) { return static_cast<int64_t>(v); });
}

std::optional<std::vector<int64_t>> TryInts(const TensorView& view) {
  switch (view.dtype) {
    case DType::kI64: return WidenInts<int64_t>(view);
    case DType::kI32: return WidenInts<int32_t>(view);
    case DType::kI16: return WidenInts<int16_t>(view);
    case DType::kI8: return WidenInts<int8_t>(view);
    case DType::kU8:
    case DType::kBool: return WidenInts<uint8_t>(view);
    default: return std::nullopt;
  }
}

std::optional<std::vector<float>> TryF32(const TensorView& view) {
  switch (view.dtype) {
    case DType::kF32: return ConvertAll<float, float>(view, [](float v) { return v; });
    case DType::kF16: return ConvertAll<F16, float>(view, [](F16 v) { return ToFloat(v); });
    case DType::kBF16: return ConvertAll<BF16, float>(view, [](BF16 v) { return ToFloat(v); });
    case DType::kF8E4M3: return ConvertAll<uint8_t, float>(view, DecodeE4M3);
    default: return std::nullopt;
  }
}

}  // namespace

// The bytes of the file, the header over them, and the case that its metadata describes.
struct CaseFile::Storage {
  Storage(const std::filesystem::path& path, std::vector<std::byte> bytes_in)
      : bytes(std::move(bytes_in)), tensors(SafetensorsFile::Parse(path.string(), bytes)) {
    ReadCase();
  }

  void ReadCase();
  const std::string& Metadata(const std::string& key) const;
  [[noreturn]] void Corrupt(const std::string& message) const {
    throw Error(ErrorCode::kCorruptData, fmt::format("{}: {}", tensors.file_name(), message));
  }

  std::vector<std::byte> bytes;
  SafetensorsFile tensors;
  std::string name, kind;
  nlohmann::json config, checks;
};

const std::string& CaseFile::Storage::Metadata(const std::string& key) const {
  const auto found = tensors.metadata().find(key);
  if (found == tensors.metadata().end()) Corrupt(fmt::format("__metadata__ has no \"{}\"", key));
  return found->second;
}

void CaseFile::Storage::ReadCase() {
  if (const std::string& format = Metadata("format"); format != kFormat) {
    Corrupt(fmt::format("format is {}, expected \"{}\"", QuoteForMessage(format), kFormat));
  }
  kind = Metadata("kind");
  const nlohmann::json parsed = nlohmann::json::parse(Metadata("case"), nullptr, false);
  if (!parsed.is_object()) Corrupt("\"case\" in __metadata__ is not a JSON object");
  const auto field = [&](const char* key, nlohmann::json::value_t type) -> const nlohmann::json& {
    const auto found = parsed.find(key);
    if (found == parsed.end()) Corrupt(fmt::format("the case has no \"{}\"", key));
    if (found->type() != type) {
      Corrupt(fmt::format("\"{}\" of the case is a JSON {}, expected {}", key, found->type_name(),
                          nlohmann::json(type).type_name()));
    }
    return *found;
  };
  name = field("name", nlohmann::json::value_t::string).get<std::string>();
  const auto stated = field("kind", nlohmann::json::value_t::string).get<std::string>();
  if (stated != kind) {
    Corrupt(fmt::format("kind is {} in __metadata__ and {} in the case", QuoteForMessage(kind),
                        QuoteForMessage(stated)));
  }
  config = field("config", nlohmann::json::value_t::object);
  checks = field("checks", nlohmann::json::value_t::array);
}

CaseFile CaseFile::Read(const std::filesystem::path& path) {
  const auto storage = std::make_shared<const Storage>(path, ReadFile(path));
  return CaseFile(storage, {storage, &storage->config});
}

CaseFile CaseFile::WithConfig(const nlohmann::json& config) const {
  if (!config.is_object()) Corrupt("a config inside the config is no object");
  return CaseFile(storage_, std::make_shared<const nlohmann::json>(config));
}

const std::string& CaseFile::name() const { return storage_->name; }
const std::string& CaseFile::kind() const { return storage_->kind; }
const nlohmann::json& CaseFile::config() const { return *config_; }
const nlohmann::json& CaseFile::checks() const { return storage_->checks; }

uint64_t CaseFile::Hash() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const std::byte byte : storage_->bytes)
    hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

void CaseFile::Corrupt(const std::string& message) const { storage_->Corrupt(message); }

bool CaseFile::HasConfig(std::string_view key) const {
  const auto found = config().find(std::string(key));
  return found != config().end() && !found->is_null();
}

const nlohmann::json& CaseFile::Field(std::string_view key) const {
  if (!HasConfig(key)) Corrupt(fmt::format("the config has no \"{}\"", key));
  return *config().find(std::string(key));
}

void CaseFile::BadField(std::string_view key, std::string_view expected) const {
  Corrupt(fmt::format(
      "\"{}\" of the config is {}, expected {}", key,
      QuoteForMessage(Field(key).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)),
      expected));
}

size_t CaseFile::Size(std::string_view key) const {
  const nlohmann::json& value = Field(key);
  if (!value.is_number_unsigned()) BadField(key, "a whole number of at least 0");
  return value.get<size_t>();
}

double CaseFile::Number(std::string_view key) const {
  const nlohmann::json& value = Field(key);
  if (!value.is_number()) BadField(key, "a number");
  return value.get<double>();
}

double CaseFile::NumberOr(std::string_view key, double fallback) const {
  return HasConfig(key) ? Number(key) : fallback;
}

size_t CaseFile::SizeOr(std::string_view key, size_t fallback) const {
  return HasConfig(key) ? Size(key) : fallback;
}

bool CaseFile::Flag(std::string_view key) const {
  const nlohmann::json& value = Field(key);
  if (!value.is_boolean()) BadField(key, "true or false");
  return value.get<bool>();
}

std::string CaseFile::Text(std::string_view key) const {
  const nlohmann::json& value = Field(key);
  if (!value.is_string()) BadField(key, "a text");
  return value.get<std::string>();
}

bool CaseFile::Has(std::string_view tensor) const {
  return storage_->tensors.Find(tensor) != nullptr;
}

TensorView CaseFile::View(std::string_view tensor) const {
  const TensorInfo* info = storage_->tensors.Find(tensor);
  if (info == nullptr) Corrupt(fmt::format("tensor {} is missing", QuoteForMessage(tensor)));
  return storage_->tensors.View(*info);
}

TensorView CaseFile::View(std::string_view tensor, const Shape& shape) const {
  const TensorView view = View(tensor);
  if (!(view.shape == shape)) {
    Corrupt(fmt::format("tensor {} has shape {}, expected {}", QuoteForMessage(tensor),
                        view.shape.ToString(), shape.ToString()));
  }
  return view;
}

std::vector<float> CaseFile::F32(std::string_view tensor) const {
  const TensorView view = View(tensor);
  if (auto values = TryF32(view)) return *std::move(values);
  Corrupt(fmt::format("tensor {} has dtype {}, expected floats", QuoteForMessage(tensor),
                      DTypeName(view.dtype)));
}

std::vector<int64_t> CaseFile::Ints(std::string_view tensor) const {
  const TensorView view = View(tensor);
  if (auto values = TryInts(view)) return *std::move(values);
  Corrupt(fmt::format("tensor {} has dtype {}, expected integers", QuoteForMessage(tensor),
                      DTypeName(view.dtype)));
}

std::vector<int32_t> CaseFile::I32(std::string_view tensor) const {
  const std::vector<int64_t> wide = Ints(tensor);
  std::vector<int32_t> values(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    values[i] = static_cast<int32_t>(wide[i]);
    if (values[i] != wide[i]) {
      Corrupt(fmt::format("tensor {} holds {}, which does not fit 32 bits", QuoteForMessage(tensor),
                          wide[i]));
    }
  }
  return values;
}

std::vector<double> CaseFile::Values(std::string_view tensor) const {
  const TensorView view = View(tensor);
  if (TryInts(view)) {
    const std::vector<int64_t> ints = Ints(tensor);
    return {ints.begin(), ints.end()};
  }
  const std::vector<float> floats = F32(tensor);
  return {floats.begin(), floats.end()};
}

}  // namespace switchyard::replay
