#include "switchyard/model/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>
#include <utility>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

constexpr size_t kPrefixBytes = 8;  // the length of the header
constexpr std::string_view kMetadataKey = "__metadata__";

[[noreturn]] void ThrowCorrupt(const std::string& file_name, const std::string& reason) {
  throw Error(ErrorCode::kCorruptData, fmt::format("{}: {}", file_name, reason));
}

[[noreturn]] void ThrowCorruptTensor(const std::string& file_name, std::string_view tensor,
                                     const std::string& reason) {
  ThrowCorrupt(file_name, fmt::format("tensor {}: {}", QuoteForMessage(tensor), reason));
}

// Every dtype that published files use; those that ParseDType knows are read.
constexpr std::array<std::string_view, 20> kPublishedDTypes = {
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4",
    "I64", "I32", "I16", "I8",   "U64",     "U32",     "U16",     "U8",      "BOOL",    "C64"};

[[noreturn]] void ThrowUnknownDType(const std::string& file_name, std::string_view tensor,
                                    std::string_view dtype) {
  std::string known;
  for (std::string_view name : kPublishedDTypes) {
    DType ignored{};
    if (ParseDType(name, ignored)) known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: tensor {}: dtype {} is not supported; this build reads {}",
                          file_name, QuoteForMessage(tensor), QuoteForMessage(dtype, 40), known));
}

}  // namespace

// Receives the events of nlohmann's parser and checks the structure of a header as it comes: at
// most four levels deep, so that a hostile header can neither recurse nor build a large value.
class SafetensorsFile::HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(SafetensorsFile& file) : file_(file) {}

  bool null() override { Unexpected("null"); }
  bool boolean(bool value) override { Unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    Unexpected(value == 0 ? "-0" : std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& digits) override {
    Unexpected(digits.substr(0, 40));
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      if (shape_.size() == Shape::kMaxRank) {
        throw Error(
            ErrorCode::kUnsupported,
            fmt::format("{}: tensor {}: has more than {} axes, the most that this build reads",
                        file_.file_name_, QuoteForMessage(info_.name), Shape::kMaxRank));
      }
      shape_.push_back(value);
    } else if (place_ == Place::kOffsets && offsets_.size() < 2) {
      offsets_.push_back(value);
    } else {
      Unexpected(std::to_string(value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      if (!file_.metadata_.emplace(key_, std::move(value)).second) {
        ThrowCorrupt(file_.file_name_,
                     fmt::format("metadata key {} is there twice", QuoteForMessage(key_)));
      }
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      if (!ParseDType(value, info_.dtype)) ThrowUnknownDType(file_.file_name_, info_.name, value);
    } else {
      Unexpected(fmt::format("the string {}", QuoteForMessage(value, 40)));
    }
    return true;
  }
  bool binary(binary_t&) override { return true; }  // not in text

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kOutside: place_ = Place::kHeader; return true;
      case Place::kHeader:
        if (key_ == kMetadataKey) {
          // Two empty ones would otherwise pass unseen.
          if (std::exchange(has_metadata_, true)) ThrowTwice(kMetadataKey);
          place_ = Place::kMetadata;
          return true;
        }
        place_ = Place::kTensor;
        StartTensor();
        return true;
      case Place::kMetadata:
      case Place::kTensor:
      case Place::kShape:
      case Place::kOffsets: break;
    }
    Unexpected("an object");
  }

  bool key(string_t& name) override {
    key_ = std::move(name);
    if (place_ != Place::kTensor) return true;
    bool* seen = key_ == "dtype"          ? &has_dtype_
                 : key_ == "shape"        ? &has_shape_
                 : key_ == "data_offsets" ? &has_offsets_
                                          : nullptr;
    if (seen == nullptr) {
      ThrowCorruptTensor(file_.file_name_, info_.name,
                         fmt::format("unknown field {}, expected dtype, shape and data_offsets",
                                     QuoteForMessage(key_, 40)));
    }
    if (std::exchange(*seen, true)) {
      ThrowCorruptTensor(file_.file_name_, info_.name,
                         fmt::format("field \"{}\" is there twice", key_));
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) FinishTensor();
    place_ = place_ == Place::kHeader ? Place::kOutside : Place::kHeader;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      Unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offsets_.size() != 2) {
      ThrowCorruptTensor(file_.file_name_, info_.name,
                         fmt::format("data_offsets has {} values, expected 2", offsets_.size()));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    ThrowCorrupt(file_.file_name_,
                 fmt::format("the header is not valid JSON at byte {} of the file: {}",
                             kPrefixBytes + position, CleanJsonError(error.what())));
  }

 private:
  // What the innermost open value is.
  enum class Place { kOutside, kHeader, kMetadata, kTensor, kShape, kOffsets };

  [[noreturn]] void ThrowTwice(std::string_view name) const {
    ThrowCorrupt(file_.file_name_, fmt::format("the header has {} twice", QuoteForMessage(name)));
  }

  [[noreturn]] void Unexpected(const std::string& found) const {
    switch (place_) {
      case Place::kOutside:
        ThrowCorrupt(file_.file_name_,
                     fmt::format("the header is not a JSON object but {}", found));
      case Place::kHeader:
        ThrowCorrupt(file_.file_name_, fmt::format("header field {}: expected an object, found {}",
                                                   QuoteForMessage(key_), found));
      case Place::kMetadata:
        ThrowCorrupt(file_.file_name_, fmt::format("metadata key {}: expected a string, found {}",
                                                   QuoteForMessage(key_), found));
      case Place::kTensor:
        ThrowCorruptTensor(file_.file_name_, info_.name,
                           fmt::format("field \"{}\": expected {}, found {}", key_,
                                       key_ == "dtype" ? "a string" : "an array", found));
      case Place::kShape:
        ThrowCorruptTensor(file_.file_name_, info_.name,
                           fmt::format("shape: expected sizes from 0 up, found {}", found));
      case Place::kOffsets:
        ThrowCorruptTensor(
            file_.file_name_, info_.name,
            fmt::format("data_offsets: expected two offsets from 0 up, found {}", found));
    }
    throw Error(ErrorCode::kInternal, "HeaderReader: place out of range");
  }

  void StartTensor() {
    if (key_.empty()) ThrowCorrupt(file_.file_name_, "a tensor has an empty name");
    if (key_.find('\0') != std::string::npos) {
      ThrowCorruptTensor(file_.file_name_, key_, "the name contains NUL");
    }
    info_ = TensorInfo();
    info_.name = key_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    shape_.clear();
    offsets_.clear();
  }

  void FinishTensor() {
    const std::string& file = file_.file_name_;
    if (!has_dtype_ || !has_shape_ || !has_offsets_) {
      ThrowCorruptTensor(file, info_.name,
                         fmt::format("field \"{}\" is missing", !has_dtype_   ? "dtype"
                                                                : !has_shape_ ? "shape"
                                                                              : "data_offsets"));
    }
    info_.shape = Shape(std::span<const size_t>(shape_));
    info_.begin = offsets_[0];
    info_.end = offsets_[1];
    if (info_.begin > info_.end) {
      ThrowCorruptTensor(file, info_.name,
                         fmt::format("data_offsets are reversed: begin {} is after end {}",
                                     info_.begin, info_.end));
    }
    size_t expected_bytes = 0;
    if (!info_.shape.NumElements(expected_bytes) ||
        __builtin_mul_overflow(expected_bytes, DTypeBytes(info_.dtype), &expected_bytes)) {
      ThrowCorruptTensor(file, info_.name,
                         fmt::format("the size of shape {} overflows", info_.shape.ToString()));
    }
    if (info_.end - info_.begin != expected_bytes) {
      ThrowCorruptTensor(
          file, info_.name,
          fmt::format("shape {} of {} needs {} bytes, but data_offsets [{}, {}] hold {}",
                      info_.shape.ToString(), DTypeName(info_.dtype), expected_bytes, info_.begin,
                      info_.end, info_.end - info_.begin));
    }
    file_.tensors_.push_back(std::move(info_));
  }

  SafetensorsFile& file_;
  Place place_ = Place::kOutside;
  std::string key_;
  bool has_metadata_ = false;
  // The tensor being read.
  TensorInfo info_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::vector<size_t> shape_;
  std::vector<size_t> offsets_;
};

// Tensors that the file does not align, by their first byte in the data section.
struct SafetensorsFile::AlignedCopies {
  std::mutex mutex;
  std::map<size_t, std::unique_ptr<std::byte[]>> by_begin;
};

SafetensorsFile::SafetensorsFile() : copies_(std::make_unique<AlignedCopies>()) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::Parse(std::string file_name, std::span<const std::byte> bytes) {
  SafetensorsFile file;
  file.file_name_ = std::move(file_name);
  const std::string& name = file.file_name_;

  if (bytes.size() < kPrefixBytes) {
    ThrowCorrupt(name,
                 fmt::format("is cut short: has {} bytes, and a safetensors file has at least {}; "
                             "download it again",
                             bytes.size(), kPrefixBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  // What a clone without git-lfs leaves in place of the weights.
  if (text.starts_with("version https://git-lfs")) {
    ThrowCorrupt(name,
                 "is a Git LFS pointer, not the file itself; run \"git lfs pull\" in its folder");
  }
  uint64_t header_bytes = 0;
  for (size_t i = kPrefixBytes; i-- > 0;) {
    header_bytes = header_bytes << 8 | static_cast<uint64_t>(bytes[i]);
  }
  if (header_bytes > kMaxHeaderBytes) {
    ThrowCorrupt(
        name,
        fmt::format("the header length is {}, and at most {} is allowed; the file begins with {} "
                    "and may be no safetensors file",
                    header_bytes, kMaxHeaderBytes, QuoteForMessage(text.substr(0, 16))));
  }
  if (header_bytes > bytes.size() - kPrefixBytes) {
    const size_t expected = kPrefixBytes + header_bytes;
    ThrowCorrupt(
        name,
        fmt::format("is cut short inside its header: the header alone needs {} bytes, found {} "
                    "({} missing); download it again",
                    expected, bytes.size(), expected - bytes.size()));
  }
  const std::string_view header = text.substr(kPrefixBytes, header_bytes);
  if (!header.starts_with('{')) {
    ThrowCorrupt(name, header.empty()
                           ? "the header has length 0"
                           : fmt::format("the header is not a JSON object but begins with {}",
                                         QuoteForMessage(header.substr(0, 16))));
  }
  // nlohmann takes a NUL for the end of the text and would not look at what follows.
  if (const size_t nul = header.find('\0'); nul != std::string_view::npos) {
    ThrowCorrupt(name, fmt::format("the header is not valid JSON: NUL at byte {} of the file",
                                   kPrefixBytes + nul));
  }
  HeaderReader reader(file);
  nlohmann::json::sax_parse(header.data(), header.data() + header.size(), &reader);

  std::vector<TensorInfo>& tensors = file.tensors_;
  file.by_name_.resize(tensors.size());
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  for (size_t i = 0; i < tensors.size(); ++i) file.by_name_[i] = i;
  std::sort(file.by_name_.begin(), file.by_name_.end(),
            [&](size_t a, size_t b) { return tensors[a].name < tensors[b].name; });
  for (size_t i = 1; i < tensors.size(); ++i) {
    const std::string& tensor = tensors[file.by_name_[i]].name;
    if (tensor == tensors[file.by_name_[i - 1]].name) {
      ThrowCorruptTensor(name, tensor, "is there twice");
    }
  }

  // Overlaps and gaps before the length of the file: they are faults of the header, whatever
  // follows it.
  size_t data_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    if (tensor.begin < data_bytes) {
      ThrowCorruptTensor(name, tensor.name,
                         fmt::format("its bytes [{}, {}) overlap those of tensor {} [{}, {})",
                                     tensor.begin, tensor.end, QuoteForMessage(tensors[i - 1].name),
                                     tensors[i - 1].begin, tensors[i - 1].end));
    }
    if (tensor.begin > data_bytes) {
      ThrowCorruptTensor(
          name, tensor.name,
          fmt::format(
              "begins at byte {} of the data, expected {}: there is a gap of {} bytes before it",
              tensor.begin, data_bytes, tensor.begin - data_bytes));
    }
    data_bytes = tensor.end;
  }

  file.data_ = bytes.subspan(kPrefixBytes + header_bytes);
  // No sum below overflows: offsets fit 64 bits, but a header may claim data_bytes near 2^64.
  const size_t found_bytes = file.data_.size();
  if (found_bytes < data_bytes) {
    const auto first = std::find_if(tensors.begin(), tensors.end(), [&](const TensorInfo& tensor) {
      return tensor.end > found_bytes;
    });
    ThrowCorrupt(
        name,
        fmt::format(
            "is cut short: the header describes {} bytes of data, found {} ({} missing); the first "
            "tensor affected is {}; download it again",
            data_bytes, found_bytes, data_bytes - found_bytes, QuoteForMessage(first->name)));
  }
  if (found_bytes > data_bytes) {
    ThrowCorrupt(
        name, fmt::format("is too long: the header describes {} bytes of data, found {} ({} extra)",
                          data_bytes, found_bytes, found_bytes - data_bytes));
  }
  return file;
}

const TensorInfo* SafetensorsFile::Find(std::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](size_t i, std::string_view key) { return tensors_[i].name < key; });
  if (found == by_name_.end() || tensors_[*found].name != name) return nullptr;
  return &tensors_[*found];
}

TensorView SafetensorsFile::View(const TensorInfo& info) const {
  SY_CHECK(info.begin <= info.end && info.end <= data_.size());
  const size_t num_bytes = info.end - info.begin;
  TensorView view{data_.data() + info.begin, info.dtype, info.shape};
  SY_CHECK_EQ(view.NumBytes(), num_bytes);
  if (num_bytes == 0 || reinterpret_cast<uintptr_t>(view.data) % DTypeBytes(info.dtype) == 0)
    return view;

  const std::lock_guard lock(copies_->mutex);
  std::unique_ptr<std::byte[]>& copy = copies_->by_begin[info.begin];
  if (copy == nullptr) {
    try {
      copy = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::kResourceExhausted,
                  fmt::format("{}: tensor {}: no memory for an aligned copy of {} bytes",
                              file_name_, QuoteForMessage(info.name), num_bytes));
    }
    std::memcpy(copy.get(), view.data, num_bytes);
  }
  view.data = copy.get();
  return view;
}

namespace {

// A file that comes into being only if Commit is reached. A link is followed, the permissions of a
// file that is replaced are kept, and what is no regular file (a device, a pipe) is written
// straight into: replacing it would destroy it.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& path) : path_(path) {
    std::error_code ignored;
    if (std::filesystem::is_symlink(path, ignored)) {
      path_ = std::filesystem::weakly_canonical(path, ignored);
      if (ignored) path_ = path;
    }
    const std::filesystem::file_status status = std::filesystem::status(path_, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
      if (fd_ < 0) Throw(errno);
      return;
    }
    // Unique among processes by the id and within this one by the counter; O_EXCL catches leftovers
    // of a crash.
    static std::atomic<unsigned> counter{0};
    do {
      // Not made from the name of the file: that may be as long as a name can be.
      temporary_ =
          path_.parent_path() / fmt::format(".switchyard.{}.{}.tmp", ::getpid(), counter++);
      fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd_ < 0 && errno == EEXIST);
    if (fd_ < 0) Throw(errno);
    if (std::filesystem::exists(status)) {
      ::fchmod(fd_, static_cast<mode_t>(status.permissions()));
    }
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!is_committed_ && !temporary_.empty()) ::unlink(temporary_.c_str());
  }

  void Write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) Throw(errno);
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
  }

  void Commit() {
    if (temporary_.empty()) {  // a device or pipe
      if (::close(std::exchange(fd_, -1)) != 0) Throw(errno);
      return;
    }
    if (::fsync(fd_) != 0) Throw(errno);
    // Some file systems report a full disk only here.
    if (::close(std::exchange(fd_, -1)) != 0) Throw(errno);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) Throw(errno);
    is_committed_ = true;
    // Makes the new name survive a power cut. Not every file system can, and the file is complete
    // in any case.
    const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
    const int folder_fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd >= 0) {
      ::fsync(folder_fd);
      ::close(folder_fd);
    }
  }

 private:
  [[noreturn]] void Throw(int error) {
    // An exception in the constructor skips the destructor, but then there is no file yet.
    const bool is_bad_path =
        error == ENOENT || error == ENOTDIR || error == EISDIR || error == ENAMETOOLONG;
    throw Error(is_bad_path ? ErrorCode::kInvalidArgument : ErrorCode::kUnavailable,
                fmt::format("{}: cannot be written: {}", path_.string(),
                            error == ENOENT ? "its folder does not exist"
                                            : std::generic_category().message(error)));
  }

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  bool is_committed_ = false;
};

// `text` as a JSON string. Errors: kInvalidArgument if it is not UTF-8.
std::string ToJsonString(const std::string& path, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} is not valid UTF-8", path, QuoteForMessage(text)));
  }
}

// Errors: kInvalidArgument naming the first tensor whose name or size cannot be written.
void CheckSpecs(const std::string& file_name, std::span<const TensorSpec> tensors) {
  std::vector<const TensorSpec*> order;
  for (const TensorSpec& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const TensorSpec* a, const TensorSpec* b) { return a->name < b->name; });
  for (size_t i = 0; i < order.size(); ++i) {
    const TensorSpec& tensor = *order[i];
    const auto refuse = [&](std::string_view reason) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: tensor {}: {}", file_name,
                                                           QuoteForMessage(tensor.name), reason));
    };
    if (tensor.name.empty())
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a tensor has an empty name", file_name));
    if (tensor.name.find('\0') != std::string::npos) refuse("the name contains NUL");
    if (tensor.name == kMetadataKey) refuse("the name is reserved");
    if (i > 0 && tensor.name == order[i - 1]->name) refuse("is there twice");
    size_t num_bytes = 0;
    if (!tensor.shape.NumElements(num_bytes) ||
        __builtin_mul_overflow(num_bytes, DTypeBytes(tensor.dtype), &num_bytes))
      refuse(fmt::format("the size of shape {} overflows", tensor.shape.ToString()));
  }
}

// Indices of tensors in the order of the file. Wide elements first, so that with a header padded to
// 8 bytes every tensor is aligned; otherwise as given.
std::vector<size_t> OrderInFile(std::span<const TensorSpec> tensors) {
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return DTypeBytes(tensors[a].dtype) > DTypeBytes(tensors[b].dtype);
  });
  return order;
}

size_t BytesOfSpec(const TensorSpec& tensor) {
  size_t count = 0;
  tensor.shape.NumElements(count);
  return count * DTypeBytes(tensor.dtype);
}

}  // namespace

SafetensorsLayout LayOutSafetensors(const std::string& file_name,
                                    std::span<const TensorSpec> tensors,
                                    const std::map<std::string, std::string>& metadata) {
  CheckSpecs(file_name, tensors);
  std::string header = "{";
  if (!metadata.empty()) {
    header += fmt::format("\"{}\":{{", kMetadataKey);
    for (const auto& [key, value] : metadata) {
      if (header.back() != '{') header += ',';
      header += ToJsonString(file_name, key) + ":" + ToJsonString(file_name, value);
    }
    header += '}';
  }
  SafetensorsLayout layout;
  layout.offsets.resize(tensors.size());
  size_t offset = 0;
  for (size_t i : OrderInFile(tensors)) {
    const TensorSpec& tensor = tensors[i];
    size_t end = 0;
    if (__builtin_add_overflow(offset, BytesOfSpec(tensor), &end))
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the sum of all tensors overflows", file_name));
    std::string shape = tensor.shape.ToString();
    std::erase(shape, ' ');
    if (header.size() > 1) header += ',';
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                          ToJsonString(file_name, tensor.name), DTypeName(tensor.dtype), shape,
                          offset, end);
    layout.offsets[i] = offset;
    offset = end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > SafetensorsFile::kMaxHeaderBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the header would have {} bytes, and at most {} are allowed",
                            file_name, header.size(), SafetensorsFile::kMaxHeaderBytes));
  }
  for (size_t i = 0; i < kPrefixBytes; ++i)
    layout.header += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i) & 0xff);
  layout.header += header;
  for (size_t& at : layout.offsets) at += layout.header.size();
  layout.file_bytes = layout.header.size() + offset;
  return layout;
}

void WriteSafetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata) {
  const std::string path_text = path.string();
  const auto refuse = [&](const std::string& reason) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", path_text, reason));
  };
  std::error_code ignored;
  if (!path.has_filename() || std::filesystem::is_directory(path, ignored))
    refuse("is a folder, expected the name of a file");

  std::vector<TensorSpec> specs;
  for (const NamedTensor& tensor : tensors)
    specs.push_back({tensor.name, tensor.view.dtype, tensor.view.shape});
  const SafetensorsLayout layout = LayOutSafetensors(path_text, specs, metadata);
  for (const NamedTensor& tensor : tensors) {
    if (tensor.view.NumBytes() > 0 && tensor.view.data == nullptr)
      refuse(fmt::format("tensor {}: has no data", QuoteForMessage(tensor.name)));
  }
  NewFile file(path);
  file.Write(std::as_bytes(std::span<const char>(layout.header)));
  for (size_t i : OrderInFile(specs))
    file.Write({tensors[i].view.data, tensors[i].view.NumBytes()});
  file.Commit();
}

}  // namespace switchyard
