#include "switchyard/model/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "model/config_reader.h"
#include "model/tensor_ledger.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"

namespace switchyard {
namespace {

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kSafetensorsSuffix = ".safetensors";

// The parts of "model-00002-of-00004.safetensors" that all shards of one model share: "model-" and
// "-of-00004". Empty for other names.
std::pair<std::string_view, std::string_view> ShardFamily(std::string_view name) {
  if (!name.ends_with(kSafetensorsSuffix)) return {};
  name.remove_suffix(kSafetensorsSuffix.size());
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  constexpr std::string_view kOf = "-of-";
  const size_t of = name.rfind(kOf);
  if (of == std::string_view::npos || !is_number(name.substr(of + kOf.size()))) return {};
  const size_t dash = name.substr(0, of).rfind('-');
  if (dash == std::string_view::npos || !is_number(name.substr(dash + 1, of - dash - 1))) return {};
  return {name.substr(0, dash + 1), name.substr(of)};
}

// Says what to expect, and what there is instead.
[[noreturn]] void ThrowNoWeights(const ModelFiles& files) {
  std::vector<std::string> shards, safetensors, others;
  for (const std::string& name : files.Names()) {
    const auto has_suffix = [&](std::initializer_list<std::string_view> suffixes) {
      return std::any_of(suffixes.begin(), suffixes.end(),
                         [&](std::string_view suffix) { return name.ends_with(suffix); });
    };
    if (!ShardFamily(name).first.empty()) {
      shards.push_back(name);
    } else if (has_suffix({kSafetensorsSuffix}) && !name.starts_with("consolidated")) {
      safetensors.push_back(name);
    } else if (has_suffix({kSafetensorsSuffix, ".bin", ".gguf", ".pth", ".pt", ".msgpack", ".h5",
                           ".onnx"})) {
      others.push_back(name);
    }
  }
  std::string found;
  if (!shards.empty()) {
    found +=
        fmt::format("; found the shards {} but not the index that belongs to them: download {}",
                    ListSome(shards, ", "), kIndexName);
  }
  if (!safetensors.empty()) {
    found += fmt::format("; found {}, whose name is none of these: is it the whole model?",
                         ListSome(safetensors, ", "));
  }
  if (!others.empty()) {
    found += fmt::format(
        "; found {}: this layout is not supported, use safetensors files in Hugging Face layout",
        ListSome(others, ", "));
  }
  if (found.empty()) found = "; found no weights at all";
  throw Error(ErrorCode::kNotFound,
              fmt::format("{}: there are no weights to load: expected {}, or {} and the shards it "
                          "names{}",
                          files.description(), kSingleName, kIndexName, found));
}

[[noreturn]] void ThrowIndex(const std::string& reason) {
  throw Error(ErrorCode::kCorruptData, fmt::format("{}: {}", kIndexName, reason));
}

// Compares "total_size" of the index, which tools compute in different ways, with what was found.
void CheckTotalSize(ConfigReader& index, size_t total_bytes) {
  if (!index.Has("metadata")) return;
  try {
    constexpr double kMax = 0x1p63;
    const std::optional<double> claimed =
        index.Object("metadata").OptionalNumber("total_size", 0, kMax);
    if (!claimed || *claimed == static_cast<double>(total_bytes)) return;
    Log(LogLevel::kWarning, "the index claims another total size than its files have",
        {{"file", std::string(kIndexName)},
         {"claimed_bytes", fmt::format("{:.0f}", *claimed)},
         {"found_bytes", std::to_string(total_bytes)}});
  } catch (const Error& error) {
    // Only information, so nothing is refused for it.
    Log(LogLevel::kWarning, error.message());
  }
}

}  // namespace

Checkpoint::Checkpoint(std::shared_ptr<const ModelFiles> files)
    : files_(std::move(files)), ledger_(std::make_unique<TensorLedger>()) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::Open(std::shared_ptr<const ModelFiles> files) {
  Checkpoint checkpoint(std::move(files));
  if (checkpoint.files_->Has(kIndexName)) {
    checkpoint.OpenIndexed();
  } else if (checkpoint.files_->Has(kSingleName)) {
    checkpoint.AddFile(std::string(kSingleName));
  } else {
    ThrowNoWeights(*checkpoint.files_);
  }
  checkpoint.FindIgnoredFiles();
  for (const auto& [name, entry] : checkpoint.tensors_) {
    checkpoint.ledger_->Add(name, entry.info->dtype, entry.info->shape,
                            checkpoint.shards_[entry.shard_idx].file_name());
  }
  return checkpoint;
}

void Checkpoint::AddFile(const std::string& name) {
  const size_t shard_idx = shards_.size();
  // Growing shards_ moves the files, but TensorInfos stay where they are: they live in the files'
  // vectors.
  shards_.push_back(SafetensorsFile::Parse(name, files_->Map(name)));
  for (const TensorInfo& info : shards_.back().tensors()) {
    const auto [other, is_new] = tensors_.emplace(info.name, Entry{&info, shard_idx});
    if (!is_new) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("tensor {} is in two files: {} and {}", QuoteForMessage(info.name),
                              shards_[other->second.shard_idx].file_name(), name));
    }
  }
  total_bytes_ += shards_.back().data_bytes();
}

void Checkpoint::OpenIndexed() {
  ConfigReader index = ConfigReader::Parse(std::string(kIndexName), files_->ReadText(kIndexName));
  ConfigReader weight_map = index.Object("weight_map");
  std::map<std::string, std::string> file_of;  // by tensor, as the index has it
  std::map<std::string, size_t> num_named;     // tensors by file
  for (std::string& tensor : weight_map.Names()) {
    std::string file = weight_map.Text(tensor);
    if (!ModelFiles::IsPlainName(file) || !file.ends_with(kSafetensorsSuffix)) {
      ThrowIndex(fmt::format(
          "tensor {}: expected the name of a safetensors file in the same folder, found {}",
          QuoteForMessage(tensor), QuoteForMessage(file)));
    }
    ++num_named[file];
    file_of.emplace(std::move(tensor), std::move(file));
  }
  if (file_of.empty()) ThrowIndex("weight_map names no tensors");

  std::vector<std::string> absent;
  std::set<std::pair<std::string_view, std::string_view>> families;
  for (const auto& [file, count] : num_named) {
    if (!files_->Has(file)) absent.push_back(QuoteForMessage(file));
    const auto family = ShardFamily(file);
    if (!family.first.empty()) families.insert(family);
  }
  if (!absent.empty()) {
    ThrowIndex(
        fmt::format("{} of the {} files it names do not exist: {}; the download is incomplete or "
                    "the index belongs to another version of the model",
                    absent.size(), num_named.size(), ListSome(absent, ", ")));
  }
  // A shard of the same set that the index leaves out: part of the weights would not be read.
  std::vector<std::string> unnamed;
  for (const std::string& file : files_->Names()) {
    if (!num_named.contains(file) && families.contains(ShardFamily(file))) unnamed.push_back(file);
  }
  if (!unnamed.empty()) {
    ThrowIndex(
        fmt::format("names {} files and leaves out {}, which by its name belongs to the same set; "
                    "the index is out of date, download it again",
                    num_named.size(), ListSome(unnamed, ", ")));
  }

  for (const auto& [file, count] : num_named) AddFile(file);

  std::vector<std::string> problems;
  for (const SafetensorsFile& shard : shards_) {
    const size_t num_indexed = num_named[shard.file_name()];
    if (num_indexed != shard.tensors().size()) {
      problems.push_back(fmt::format("{} holds {} tensors, and the index places {} in it",
                                     shard.file_name(), shard.tensors().size(), num_indexed));
    }
  }
  for (const auto& [name, entry] : tensors_) {
    const std::string& holder = shards_[entry.shard_idx].file_name();
    const auto indexed = file_of.find(std::string(name));
    if (indexed == file_of.end()) {
      problems.push_back(
          fmt::format("tensor {} of {} is not in the index", QuoteForMessage(name), holder));
    } else if (indexed->second != holder) {
      problems.push_back(fmt::format("tensor {} is in {}, and the index places it in {}",
                                     QuoteForMessage(name), holder, indexed->second));
    }
  }
  for (const auto& [name, file] : file_of) {
    if (Has(name)) continue;
    problems.push_back(fmt::format("tensor {} is not in {}", QuoteForMessage(name), file));
  }
  if (!problems.empty()) {
    ThrowIndex(fmt::format(
        "contradicts the files that it names: {}; download the index and the files of one version",
        ListSome(problems, "; ")));
  }
  CheckTotalSize(index, total_bytes_);
}

void Checkpoint::FindIgnoredFiles() {
  for (std::string& name : files_->Names()) {
    const bool is_read =
        std::any_of(shards_.begin(), shards_.end(),
                    [&](const SafetensorsFile& shard) { return shard.file_name() == name; });
    if (name.ends_with(kSafetensorsSuffix) && !is_read) ignored_files_.push_back(std::move(name));
  }
  if (ignored_files_.empty()) return;
  Log(LogLevel::kWarning, "files with tensors that do not belong to the model are not read",
      {{"files", ListSome(ignored_files_, ", ")},
       {"read", shards_.size() == 1 ? shards_.front().file_name()
                                    : fmt::format("{} shards", shards_.size())}});
}

const TensorInfo* Checkpoint::Info(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found != tensors_.end() ? found->second.info : nullptr;
}

const std::string& Checkpoint::FileOf(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: there is no tensor {}",
                                                  files_->description(), QuoteForMessage(name)));
  }
  return shards_[found->second.shard_idx].file_name();
}

TensorView Checkpoint::View(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: there is no tensor {}",
                                                  files_->description(), QuoteForMessage(name)));
  }
  return shards_[found->second.shard_idx].View(*found->second.info);
}

std::string_view Checkpoint::IgnoredReason(std::string_view name) const {
  return ledger_->IgnoredReason(name);
}

std::vector<std::string_view> Checkpoint::Names() const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  return names;
}

TensorView Checkpoint::Take(std::string_view name, const Shape& expected,
                            std::span<const DType> allowed) {
  if (!ledger_->Take(name, expected, allowed))
    return {nullptr, allowed.empty() ? DType::kF32 : allowed.front(), expected};
  const Entry& entry = tensors_.find(name)->second;
  return shards_[entry.shard_idx].View(*entry.info);
}

void Checkpoint::Ignore(std::string_view name, std::string_view reason) {
  ledger_->Ignore(name, reason);
}

void Checkpoint::Finish() const { ledger_->Finish(files_->description(), "config.json"); }

namespace {

// `Int` is a signed integer as wide as an element: masked of its sign bit a value is never
// negative, and baseline x86-64 compares signed lanes only. A NaN is above `infinity`, the bits of
// that value.
template <typename Int, Int kInfinity>
BadValues ScanBits(const std::byte* data, size_t count) {
  using Unsigned = std::make_unsigned_t<Int>;
  constexpr auto kMagnitude = static_cast<Int>(static_cast<Unsigned>(~Unsigned{0}) >> 1);
  // Counters as wide as an element keep every lane of a vector busy; a block is so short that they
  // cannot overflow.
  constexpr size_t kBlock = 4096;
  const auto load = [&](size_t i) {
    Int bits;
    std::memcpy(&bits, data + i * sizeof(Int), sizeof(Int));
    return static_cast<Int>(bits & kMagnitude);
  };
  BadValues bad;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t end = std::min(count, begin + kBlock);
    Int nan = 0;
    Int nan_or_inf = 0;
    for (size_t i = begin; i < end; ++i) {
      const Int bits = load(i);
      nan = static_cast<Int>(nan + (bits > kInfinity));
      nan_or_inf = static_cast<Int>(nan_or_inf + (bits >= kInfinity));
    }
    if (nan_or_inf > 0 && !bad.any()) {
      size_t first = begin;
      while (load(first) < kInfinity) ++first;
      bad.first_index = first;
    }
    bad.nan += static_cast<size_t>(nan);
    bad.inf += static_cast<size_t>(nan_or_inf - nan);
  }
  return bad;
}

}  // namespace

BadValues ScanForBadValues(const TensorView& view) {
  const size_t count = view.NumElements();
  if (view.dtype == DType::kF32) return ScanBits<int32_t, 0x7f800000>(view.data, count);
  if (view.dtype == DType::kBF16) return ScanBits<int16_t, 0x7f80>(view.data, count);
  if (view.dtype == DType::kF16) return ScanBits<int16_t, 0x7c00>(view.data, count);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("cannot look for NaN in {}, expected {}", DTypeName(view.dtype),
                          DescribeDTypes(kFloatDTypes)));
}

}  // namespace switchyard
