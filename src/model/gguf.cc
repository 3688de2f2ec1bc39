#include "switchyard/model/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are read as they lie");

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "GGUF";
constexpr uint32_t kVersion = 3;
constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr std::string_view kSuffix = ".gguf";

struct TypeRow {
  std::string_view name;
  size_t bytes;  // of one value; 0 = it varies
};
constexpr std::array<TypeRow, 13> kTypes = {{{"u8", 1},
                                             {"i8", 1},
                                             {"u16", 2},
                                             {"i16", 2},
                                             {"u32", 4},
                                             {"i32", 4},
                                             {"f32", 4},
                                             {"bool", 1},
                                             {"string", 0},
                                             {"array", 0},
                                             {"u64", 8},
                                             {"i64", 8},
                                             {"f64", 8}}};

// The number of a tensor type in the file.
struct TensorTypeRow {
  uint32_t id;
  DType dtype;
};
constexpr TensorTypeRow kTensorTypes[] = {
    {0, DType::kF32},         {1, DType::kF16},        {2, DType::kGgmlQ40},
    {3, DType::kGgmlQ41},     {6, DType::kGgmlQ50},    {7, DType::kGgmlQ51},
    {8, DType::kGgmlQ80},     {10, DType::kGgmlQ2K},   {11, DType::kGgmlQ3K},
    {12, DType::kGgmlQ4K},    {13, DType::kGgmlQ5K},   {14, DType::kGgmlQ6K},
    {16, DType::kGgmlIq2Xxs}, {17, DType::kGgmlIq2Xs}, {18, DType::kGgmlIq3Xxs},
    {19, DType::kGgmlIq1S},   {20, DType::kGgmlIq4Nl}, {21, DType::kGgmlIq3S},
    {22, DType::kGgmlIq2S},   {23, DType::kGgmlIq4Xs}, {24, DType::kI8},
    {25, DType::kI16},        {26, DType::kI32},       {27, DType::kI64},
    {28, DType::kF64},        {29, DType::kGgmlIq1M},  {30, DType::kBF16},
    {34, DType::kGgmlTq10},   {35, DType::kGgmlTq20},  {39, DType::kGgmlMxFp4},
};

// Types that have a number but that we do not read, and why.
struct RefusedTypeRow {
  uint32_t id;
  std::string_view name;
  std::string_view reason;
};
constexpr std::string_view kRemoved = "was removed from the format in 2023";
constexpr std::string_view kInterleaved =
    "was removed from the format in 2024: rows interleaved for one CPU; convert the model to Q4_0 "
    "or IQ4_NL";
constexpr std::string_view kNotStored = "is a type of activations, which files do not store";
constexpr std::string_view kNotRead = "is not supported";
constexpr RefusedTypeRow kRefusedTypes[] = {
    {4, "Q4_2", kRemoved},
    {5, "Q4_3", kRemoved},
    {9, "Q8_1", kNotStored},
    {15, "Q8_K", kNotStored},
    {31, "Q4_0_4_4", kInterleaved},
    {32, "Q4_0_4_8", kInterleaved},
    {33, "Q4_0_8_8", kInterleaved},
    {36, "IQ4_NL_4_4", kInterleaved},
    {37, "IQ4_NL_4_8", kInterleaved},
    {38, "IQ4_NL_8_8", kInterleaved},
    {40, "NVFP4", kNotRead},
    {41, "Q1_0", kNotRead},
};

[[noreturn]] void Throw(ErrorCode code, const std::string& file, const std::string& reason) {
  throw Error(code, fmt::format("{}: {}", file, reason));
}

[[noreturn]] void ThrowCorrupt(const std::string& file, const std::string& reason) {
  Throw(ErrorCode::kCorruptData, file, reason);
}

[[noreturn]] void ThrowCorruptTensor(const std::string& file, std::string_view tensor,
                                     const std::string& reason) {
  ThrowCorrupt(file, fmt::format("tensor {}: {}", QuoteForMessage(tensor), reason));
}

// Rounds up; false if that does not fit.
bool PadTo(size_t alignment, size_t& size) {
  size_t padded = 0;
  if (__builtin_add_overflow(size, alignment - 1, &padded)) return false;
  size = padded / alignment * alignment;
  return true;
}

template <typename T>
T Load(std::span<const std::byte> bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Indices of `count` items sorted by name; the second of two equal ones is given to `twice`.
template <typename NameOf, typename Twice>
std::vector<size_t> SortByName(size_t count, const NameOf& name_of, const Twice& twice) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(name_of(a), a) < std::pair(name_of(b), b);
  });
  for (size_t i = 1; i < count; ++i) {
    if (name_of(order[i - 1]) == name_of(order[i])) twice(order[i - 1], order[i]);
  }
  return order;
}

// The index with this name, or `order.size()`.
template <typename NameOf>
size_t FindByName(const std::vector<size_t>& order, std::string_view name, const NameOf& name_of) {
  const auto found =
      std::lower_bound(order.begin(), order.end(), name,
                       [&](size_t i, std::string_view wanted) { return name_of(i) < wanted; });
  return found == order.end() || name_of(*found) != name ? order.size() : *found;
}

// What is found instead of a GGUF file of a version that we read.
void CheckMagicAndVersion(const std::string& file, std::span<const std::byte> bytes) {
  const std::string_view text = TextOf(bytes);
  if (text.starts_with("version https://git-lfs"))
    ThrowCorrupt(file,
                 "is a Git LFS pointer, not the file itself; run \"git lfs pull\" in its folder");
  if (text.starts_with("lmgg") || text.starts_with("fmgg") || text.starts_with("tjgg")) {
    Throw(ErrorCode::kUnsupported, file,
          "is a GGML file of before August 2023, not a GGUF file; convert the model again");
  }
  if (!text.starts_with(kMagic.substr(0, text.size())))
    ThrowCorrupt(file, fmt::format("is not a GGUF file: it starts with {}, expected \"GGUF\"",
                                   QuoteForMessage(text.substr(0, 4))));
  if (bytes.size() < 8) return;  // the reader says what is missing
  const auto version = Load<uint32_t>(bytes.subspan(4), 0);
  if (version == 2 || version == 3) return;
  if (version != 0 && (version & 0xffffu) == 0)
    Throw(ErrorCode::kUnsupported, file,
          "is a big endian GGUF file; only little endian ones are read, convert the model again");
  Throw(ErrorCode::kUnsupported, file,
        fmt::format("has GGUF version {}; versions 2 and 3 are read{}", version,
                    version == 1 ? " (version 1 was in use for a few days of August 2023; convert "
                                   "the model again)"
                                 : ""));
}

}  // namespace

std::string_view GgufTypeName(GgufType type) { return kTypes[static_cast<size_t>(type)].name; }

// Reads a header from its start to its end. `what` is what is being read, for messages.
class GgufFile::Reader {
 public:
  Reader(GgufFile& file, std::span<const std::byte> bytes) : file_(file), bytes_(bytes) {}

  void Read() {
    CheckMagicAndVersion(file_.file_name_, bytes_);
    what_ = "the header";
    Take(kMagic.size());
    file_.version_ = Number<uint32_t>();
    const auto num_tensors = Number<uint64_t>();
    const auto num_entries = Number<uint64_t>();
    // The smallest entry is a key of one byte with a value of one byte; the smallest tensor has
    // one axis. This also bounds every loop below by the file.
    CheckCount(num_entries, 14, "metadata entries");
    CheckCount(num_tensors, 33, "tensors");
    for (uint64_t i = 0; i < num_entries; ++i) ReadEntry(i);
    IndexEntries();
    ReadAlignment();
    for (uint64_t i = 0; i < num_tensors; ++i) ReadTensor(i);
    IndexTensors();
    ReadData();
  }

 private:
  void CheckCount(uint64_t count, size_t least_bytes, std::string_view of) const {
    const size_t left = bytes_.size() - at_;
    if (count > left / least_bytes) {
      ThrowCorrupt(
          file_.file_name_,
          fmt::format("the header says {} {}, but only {} bytes follow it: the file is cut "
                      "short or damaged",
                      count, of, left));
    }
  }

  std::span<const std::byte> Take(uint64_t count) {
    const size_t left = bytes_.size() - at_;
    if (count > left) {
      ThrowCorrupt(file_.file_name_,
                   fmt::format("is cut short or damaged: {} needs {} bytes at byte {}, {} are left "
                               "({} missing)",
                               what_, count, at_, left, count - left));
    }
    const auto taken = bytes_.subspan(at_, static_cast<size_t>(count));
    at_ += taken.size();
    return taken;
  }

  template <typename T>
  T Number() {
    return Load<T>(Take(sizeof(T)), 0);
  }

  std::string_view String() { return TextOf(Take(Number<uint64_t>())); }

  GgufType Type(std::string_view key) {
    const auto type = Number<uint32_t>();
    if (type >= kTypes.size()) {
      ThrowCorrupt(file_.file_name_,
                   fmt::format("metadata key {}: unknown value type {}, expected 0 to {}",
                               QuoteForMessage(key), type, kTypes.size() - 1));
    }
    return static_cast<GgufType>(type);
  }

  void ReadEntry(uint64_t i) {
    what_ = fmt::format("the key of metadata entry {}", i);
    const auto length = Number<uint64_t>();
    if (length == 0) ThrowCorrupt(file_.file_name_, fmt::format("{} is empty", what_));
    if (length > kMaxKeyBytes) {
      ThrowCorrupt(file_.file_name_, fmt::format("{} has {} bytes, the format allows {}", what_,
                                                 length, kMaxKeyBytes));
    }
    GgufEntry entry;
    entry.key = TextOf(Take(length));
    what_ = fmt::format("metadata key {}", QuoteForMessage(entry.key));
    entry.type = Type(entry.key);
    if (entry.type == GgufType::kArray) {
      entry.is_array = true;
      entry.type = Type(entry.key);
      if (entry.type == GgufType::kArray) {
        Throw(ErrorCode::kUnsupported, file_.file_name_,
              fmt::format("{}: is an array of arrays, which no known key is", what_));
      }
      entry.count = static_cast<size_t>(Number<uint64_t>());
    }
    const size_t begin = at_;
    ReadValues(entry);
    entry.bytes = bytes_.subspan(begin, at_ - begin);
    file_.entries_.push_back(entry);
  }

  void ReadValues(const GgufEntry& entry) {
    if (entry.type == GgufType::kString) {
      // Ends at the end of the file at the latest: every string takes 8 bytes.
      for (size_t i = 0; i < entry.count; ++i) String();
      return;
    }
    size_t bytes = 0;
    if (__builtin_mul_overflow(entry.count, kTypes[static_cast<size_t>(entry.type)].bytes,
                               &bytes)) {
      ThrowCorrupt(file_.file_name_, fmt::format("{}: the size of {} values of {} overflows", what_,
                                                 entry.count, GgufTypeName(entry.type)));
    }
    const auto values = Take(bytes);
    if (entry.type != GgufType::kBool) return;
    for (std::byte value : values) {
      if (std::to_integer<int>(value) > 1) {
        ThrowCorrupt(file_.file_name_, fmt::format("{}: a bool is {}, expected 0 or 1", what_,
                                                   std::to_integer<int>(value)));
      }
    }
  }

  void IndexEntries() {
    file_.entries_by_key_ = SortByName(
        file_.entries_.size(), [&](size_t i) { return file_.entries_[i].key; },
        [&](size_t, size_t i) {
          ThrowCorrupt(file_.file_name_, fmt::format("metadata key {} is there twice",
                                                     QuoteForMessage(file_.entries_[i].key)));
        });
  }

  void ReadAlignment() {
    const auto alignment = file_.OptionalCount(kAlignmentKey, 0, SIZE_MAX);
    if (!alignment) return;
    if (*alignment < 8 || *alignment > kMaxAlignment || !std::has_single_bit(*alignment)) {
      ThrowCorrupt(
          file_.file_name_,
          fmt::format("metadata key \"{}\": expected a power of two from 8 to {}, found {}",
                      kAlignmentKey, kMaxAlignment, *alignment));
    }
    file_.alignment_ = *alignment;
  }

  void ReadTensor(uint64_t i) {
    what_ = fmt::format("the name of tensor {}", i);
    const auto length = Number<uint64_t>();
    if (length == 0) ThrowCorrupt(file_.file_name_, fmt::format("{} is empty", what_));
    if (length > kMaxNameBytes) {
      ThrowCorrupt(file_.file_name_, fmt::format("{} has {} bytes, the format allows {}", what_,
                                                 length, kMaxNameBytes));
    }
    GgufTensorInfo info;
    info.name = TextOf(Take(length));
    what_ = fmt::format("the description of tensor {}", QuoteForMessage(info.name));
    info.shape = ReadShape(info.name);
    info.dtype = ReadTensorType(info.name);
    const auto offset = Number<uint64_t>();
    info.offset = static_cast<size_t>(offset);
    info.bytes = ProvenBytes(info);
    file_.tensors_.push_back(info);
  }

  Shape ReadShape(std::string_view tensor) {
    const auto rank = Number<uint32_t>();
    if (rank == 0 || rank > kMaxAxes)
      ThrowCorruptTensor(file_.file_name_, tensor,
                         fmt::format("has {} axes, expected 1 to {}", rank, kMaxAxes));
    std::array<size_t, kMaxAxes> dims{};
    for (size_t axis = rank; axis-- > 0;) {
      dims[axis] = static_cast<size_t>(Number<uint64_t>());
      if (dims[axis] == 0)
        ThrowCorruptTensor(file_.file_name_, tensor,
                           fmt::format("axis {} of the file has size 0", rank - 1 - axis));
    }
    return Shape(std::span<const size_t>(dims.data(), rank));
  }

  DType ReadTensorType(std::string_view tensor) {
    const auto id = Number<uint32_t>();
    for (const TensorTypeRow& row : kTensorTypes) {
      if (row.id == id) return row.dtype;
    }
    for (const RefusedTypeRow& row : kRefusedTypes) {
      if (row.id == id) {
        Throw(ErrorCode::kUnsupported, file_.file_name_,
              fmt::format("tensor {}: type {} ({}) {}", QuoteForMessage(tensor), id, row.name,
                          row.reason));
      }
    }
    Throw(ErrorCode::kUnsupported, file_.file_name_,
          fmt::format("tensor {}: unknown type {}", QuoteForMessage(tensor), id));
  }

  size_t ProvenBytes(const GgufTensorInfo& info) const {
    const size_t row = info.shape[info.shape.rank() - 1];
    const size_t block = DTypeBlock(info.dtype);
    if (row % block != 0) {
      ThrowCorruptTensor(
          file_.file_name_, info.name,
          fmt::format("rows of {} values of {} are no whole blocks of {}: the file is damaged or "
                      "was quantised by a faulty program",
                      row, DTypeName(info.dtype), block));
    }
    size_t count = 0;
    size_t bytes = 0;
    // The last comparison keeps the sum of an offset and a size from wrapping.
    if (!info.shape.NumElements(count) ||
        __builtin_mul_overflow(count / block, DTypeBlockBytes(info.dtype), &bytes) ||
        bytes > SIZE_MAX / 4 || info.offset > SIZE_MAX / 4) {
      ThrowCorruptTensor(file_.file_name_, info.name,
                         fmt::format("the size of shape {} at offset {} overflows",
                                     info.shape.ToString(), info.offset));
    }
    return bytes;
  }

  void IndexTensors() {
    file_.tensors_by_name_ = SortByName(
        file_.tensors_.size(), [&](size_t i) { return file_.tensors_[i].name; },
        [&](size_t, size_t i) {
          ThrowCorruptTensor(file_.file_name_, file_.tensors_[i].name, "is there twice");
        });
  }

  // Proves that the tensors fill the data section one after the other, each aligned.
  void ReadData() {
    std::vector<const GgufTensorInfo*> by_offset;
    for (const GgufTensorInfo& info : file_.tensors_) by_offset.push_back(&info);
    std::sort(
        by_offset.begin(), by_offset.end(),
        [](const GgufTensorInfo* a, const GgufTensorInfo* b) { return a->offset < b->offset; });
    size_t end = 0;
    const GgufTensorInfo* before = nullptr;
    for (const GgufTensorInfo* info : by_offset) {
      CheckOffset(*info, before, end);
      end = info->offset + info->bytes;
      before = info;
    }
    CheckLength(by_offset, end);
  }

  void CheckOffset(const GgufTensorInfo& info, const GgufTensorInfo* before, size_t end) const {
    if (info.offset % file_.alignment_ != 0) {
      ThrowCorruptTensor(file_.file_name_, info.name,
                         fmt::format("its offset {} is not a multiple of the alignment {}",
                                     info.offset, file_.alignment_));
    }
    if (info.offset < end) {
      ThrowCorruptTensor(
          file_.file_name_, info.name,
          fmt::format("its bytes [{}, {}) overlap those of tensor {}, which end at "
                      "{}",
                      info.offset, info.offset + info.bytes, QuoteForMessage(before->name), end));
    }
    if (info.offset - end >= file_.alignment_) {
      ThrowCorruptTensor(file_.file_name_, info.name,
                         fmt::format("begins at byte {} of the data, but the tensor before it ends "
                                     "at {}: there is a gap",
                                     info.offset, end));
    }
  }

  void CheckLength(const std::vector<const GgufTensorInfo*>& by_offset, size_t data_bytes) {
    size_t begin = at_;
    PadTo(file_.alignment_, begin);
    // A file without tensors may end with its header.
    const size_t found = bytes_.size() > begin ? bytes_.size() - begin : 0;
    if (found < data_bytes) {
      const auto first = std::find_if(
          by_offset.begin(), by_offset.end(),
          [&](const GgufTensorInfo* info) { return info->offset + info->bytes > found; });
      ThrowCorrupt(
          file_.file_name_,
          fmt::format("is cut short: the header describes {} bytes of data, found {} ({} "
                      "missing); the first tensor affected is {}; download it again",
                      data_bytes, found, data_bytes - found, QuoteForMessage((*first)->name)));
    }
    size_t padded = data_bytes;
    PadTo(file_.alignment_, padded);
    if (found > padded) {
      const bool is_joined = TextOf(bytes_.subspan(begin + padded)).starts_with(kMagic);
      ThrowCorrupt(file_.file_name_,
                   fmt::format("is too long: the header describes {} bytes of data, found {} ({} "
                               "extra){}",
                               data_bytes, found, found - data_bytes,
                               is_joined ? "; what follows is another GGUF file: the parts of a "
                                           "split model must stay files of their own"
                                         : ""));
    }
    if (data_bytes != 0) file_.data_ = bytes_.subspan(begin, data_bytes);
    NotePadding(by_offset, begin);
  }

  void NotePadding(const std::vector<const GgufTensorInfo*>& by_offset, size_t data_begin) {
    size_t end = at_;
    const auto note = [&](size_t next) {
      if (next > end) file_.padding_.push_back(bytes_.subspan(end, next - end));
    };
    for (const GgufTensorInfo* info : by_offset) {
      note(data_begin + info->offset);
      end = data_begin + info->offset + info->bytes;
    }
    note(bytes_.size());
  }

  GgufFile& file_;
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  std::string what_;
};

GgufFile GgufFile::Parse(std::string file_name, std::span<const std::byte> bytes) {
  GgufFile file;
  file.file_name_ = std::move(file_name);
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 8 != 0) {
    Throw(ErrorCode::kInvalidArgument, file.file_name_,
          "the bytes of a GGUF file must lie at an address that is a multiple of 8");
  }
  Reader(file, bytes).Read();
  return file;
}

const GgufEntry* GgufFile::FindEntry(std::string_view key) const {
  const size_t i = FindByName(entries_by_key_, key, [&](size_t at) { return entries_[at].key; });
  return i == entries_.size() ? nullptr : &entries_[i];
}

const GgufTensorInfo* GgufFile::FindTensor(std::string_view name) const {
  const size_t i = FindByName(tensors_by_name_, name, [&](size_t at) { return tensors_[at].name; });
  return i == tensors_.size() ? nullptr : &tensors_[i];
}

TensorView GgufFile::View(const GgufTensorInfo& info) const {
  SY_CHECK(info.offset <= data_.size() && info.bytes <= data_.size() - info.offset);
  return {data_.data() + info.offset, info.dtype, info.shape};
}

namespace {

std::string DescribeType(const GgufEntry& entry) {
  if (!entry.is_array) return std::string(GgufTypeName(entry.type));
  return fmt::format("an array of {} {}", entry.count, GgufTypeName(entry.type));
}

// The value as text, for messages.
std::string DescribeValue(const GgufEntry& entry, size_t i) {
  const auto bytes = entry.bytes;
  switch (entry.type) {
    case GgufType::kU8: return fmt::format("{}", Load<uint8_t>(bytes, i));
    case GgufType::kI8: return fmt::format("{}", Load<int8_t>(bytes, i));
    case GgufType::kU16: return fmt::format("{}", Load<uint16_t>(bytes, i));
    case GgufType::kI16: return fmt::format("{}", Load<int16_t>(bytes, i));
    case GgufType::kU32: return fmt::format("{}", Load<uint32_t>(bytes, i));
    case GgufType::kI32: return fmt::format("{}", Load<int32_t>(bytes, i));
    case GgufType::kF32: return fmt::format("{}", Load<float>(bytes, i));
    case GgufType::kBool: return Load<uint8_t>(bytes, i) != 0 ? "true" : "false";
    case GgufType::kU64: return fmt::format("{}", Load<uint64_t>(bytes, i));
    case GgufType::kI64: return fmt::format("{}", Load<int64_t>(bytes, i));
    case GgufType::kF64: return fmt::format("{}", Load<double>(bytes, i));
    case GgufType::kString: return QuoteForMessage(TextOf(bytes.subspan(8)), 40);
    case GgufType::kArray: break;
  }
  return "an array";
}

// Value i of an integer type; false for the other types and for negative numbers.
bool CountOf(const GgufEntry& entry, size_t i, uint64_t& count) {
  const auto from = [&](auto value) {
    count = static_cast<uint64_t>(value);
    return value >= 0;
  };
  const auto bytes = entry.bytes;
  switch (entry.type) {
    case GgufType::kU8:
    case GgufType::kBool: return from(int{Load<uint8_t>(bytes, i)});
    case GgufType::kI8: return from(int64_t{Load<int8_t>(bytes, i)});
    case GgufType::kU16: return from(int{Load<uint16_t>(bytes, i)});
    case GgufType::kI16: return from(int64_t{Load<int16_t>(bytes, i)});
    case GgufType::kU32: return from(int64_t{Load<uint32_t>(bytes, i)});
    case GgufType::kI32: return from(Load<int32_t>(bytes, i));
    case GgufType::kU64: count = Load<uint64_t>(bytes, i); return true;
    case GgufType::kI64: return from(Load<int64_t>(bytes, i));
    case GgufType::kF32:
    case GgufType::kF64:
    case GgufType::kString:
    case GgufType::kArray: break;
  }
  return false;
}

// Value i of a number; NaN for the other types.
double NumberOf(const GgufEntry& entry, size_t i) {
  const auto bytes = entry.bytes;
  switch (entry.type) {
    case GgufType::kF32: return Load<float>(bytes, i);
    case GgufType::kF64: return Load<double>(bytes, i);
    case GgufType::kU8: return Load<uint8_t>(bytes, i);
    case GgufType::kI8: return Load<int8_t>(bytes, i);
    case GgufType::kU16: return Load<uint16_t>(bytes, i);
    case GgufType::kI16: return Load<int16_t>(bytes, i);
    case GgufType::kU32: return Load<uint32_t>(bytes, i);
    case GgufType::kI32: return Load<int32_t>(bytes, i);
    case GgufType::kU64: return static_cast<double>(Load<uint64_t>(bytes, i));
    case GgufType::kI64: return static_cast<double>(Load<int64_t>(bytes, i));
    case GgufType::kBool:
    case GgufType::kString:
    case GgufType::kArray: break;
  }
  return std::nan("");
}

std::string CountRange(size_t min, size_t max) {
  if (max == SIZE_MAX) return fmt::format("a whole number of at least {}", min);
  return fmt::format("a whole number from {} to {}", min, max);
}

}  // namespace

const GgufEntry& GgufFile::Require(std::string_view key, std::string_view expected) const {
  const GgufEntry* entry = FindEntry(key);
  if (entry == nullptr) {
    ThrowCorrupt(file_name_, fmt::format("metadata key {}: is missing, expected {}",
                                         QuoteForMessage(key), expected));
  }
  return *entry;
}

void GgufFile::ThrowWrong(const GgufEntry& entry, const std::string& expected) const {
  const std::string found =
      entry.is_array ? DescribeType(entry)
                     : fmt::format("{} {}", DescribeType(entry), DescribeValue(entry, 0));
  ThrowCorrupt(file_name_, fmt::format("metadata key {}: expected {}, found {}",
                                       QuoteForMessage(entry.key), expected, found));
}

size_t GgufFile::CountAt(const GgufEntry& entry, size_t i, size_t min, size_t max) const {
  uint64_t count = 0;
  if (CountOf(entry, i, count) && count >= min && count <= max) return static_cast<size_t>(count);
  if (!entry.is_array) ThrowWrong(entry, CountRange(min, max));
  ThrowCorrupt(file_name_,
               fmt::format("metadata key {}: expected {}, found {} at index {} of {}",
                           QuoteForMessage(entry.key), CountRange(min, max),
                           entry.type == GgufType::kString ? "a string" : DescribeValue(entry, i),
                           i, DescribeType(entry)));
}

double GgufFile::NumberAt(const GgufEntry& entry, size_t i, double min, double max) const {
  const double number = NumberOf(entry, i);
  if (number >= min && number <= max) return number;
  const std::string expected = fmt::format("a number from {} to {}", min, max);
  if (!entry.is_array) ThrowWrong(entry, expected);
  ThrowCorrupt(file_name_,
               fmt::format("metadata key {}: expected {}, found {} at index {} of {}",
                           QuoteForMessage(entry.key), expected,
                           entry.type == GgufType::kString ? "a string" : DescribeValue(entry, i),
                           i, DescribeType(entry)));
}

size_t GgufFile::Count(std::string_view key, size_t min, size_t max) const {
  const GgufEntry& entry = Require(key, CountRange(min, max));
  if (entry.is_array || entry.type == GgufType::kBool) ThrowWrong(entry, CountRange(min, max));
  return CountAt(entry, 0, min, max);
}

std::optional<size_t> GgufFile::OptionalCount(std::string_view key, size_t min, size_t max) const {
  if (FindEntry(key) == nullptr) return std::nullopt;
  return Count(key, min, max);
}

double GgufFile::Number(std::string_view key, double min, double max) const {
  const GgufEntry& entry = Require(key, "a number");
  if (entry.is_array) ThrowWrong(entry, "a number");
  return NumberAt(entry, 0, min, max);
}

std::optional<double> GgufFile::OptionalNumber(std::string_view key, double min, double max) const {
  if (FindEntry(key) == nullptr) return std::nullopt;
  return Number(key, min, max);
}

bool GgufFile::Flag(std::string_view key) const {
  const GgufEntry& entry = Require(key, "a bool");
  if (entry.is_array || entry.type != GgufType::kBool) ThrowWrong(entry, "a bool");
  return Load<uint8_t>(entry.bytes, 0) != 0;
}

std::optional<bool> GgufFile::OptionalFlag(std::string_view key) const {
  if (FindEntry(key) == nullptr) return std::nullopt;
  return Flag(key);
}

std::string_view GgufFile::Text(std::string_view key) const {
  const GgufEntry& entry = Require(key, "a string");
  if (entry.is_array || entry.type != GgufType::kString) ThrowWrong(entry, "a string");
  return TextOf(entry.bytes.subspan(8));
}

std::optional<std::string_view> GgufFile::OptionalText(std::string_view key) const {
  if (FindEntry(key) == nullptr) return std::nullopt;
  return Text(key);
}

std::vector<size_t> GgufFile::Counts(std::string_view key, size_t min, size_t max) const {
  const GgufEntry& entry = Require(key, "whole numbers");
  std::vector<size_t> counts;
  for (size_t i = 0; i < entry.count; ++i) counts.push_back(CountAt(entry, i, min, max));
  return counts;
}

std::vector<double> GgufFile::Numbers(std::string_view key, double min, double max) const {
  const GgufEntry& entry = Require(key, "numbers");
  std::vector<double> numbers;
  for (size_t i = 0; i < entry.count; ++i) numbers.push_back(NumberAt(entry, i, min, max));
  return numbers;
}

std::vector<std::string_view> GgufFile::Texts(std::string_view key) const {
  const GgufEntry& entry = Require(key, "an array of strings");
  if (!entry.is_array || entry.type != GgufType::kString) ThrowWrong(entry, "an array of strings");
  std::vector<std::string_view> texts;
  texts.reserve(entry.count);  // each is there, in 8 bytes at least
  std::span<const std::byte> rest = entry.bytes;
  for (size_t i = 0; i < entry.count; ++i) {
    const auto length = static_cast<size_t>(Load<uint64_t>(rest, 0));
    texts.push_back(TextOf(rest.subspan(8, length)));
    rest = rest.subspan(8 + length);
  }
  return texts;
}

namespace {

constexpr std::string_view kSplitNumber = "split.no";
constexpr std::string_view kSplitCount = "split.count";
constexpr std::string_view kSplitTensors = "split.tensors.count";
constexpr size_t kMaxParts = 99999;

// What the name of a file says: "PREFIX-00002-of-00004.gguf" is part 2 of 4.
struct PartName {
  std::string prefix;
  size_t number = 1;
  size_t count = 1;
};

std::string NameOfPart(const std::string& prefix, size_t number, size_t count) {
  return fmt::format("{}-{:05}-of-{:05}{}", prefix, number, count, kSuffix);
}

// nullopt for a name that is not of that form.
std::optional<PartName> ParsePartName(std::string_view name) {
  constexpr size_t kTail = std::string_view("-00002-of-00004.gguf").size();
  if (name.size() <= kTail || !name.ends_with(kSuffix)) return std::nullopt;
  const std::string_view tail = name.substr(name.size() - kTail);
  const auto digits = [&](size_t at) {
    size_t value = 0;
    for (char c : tail.substr(at, 5)) {
      if (c < '0' || c > '9') return kMaxParts + 1;
      value = value * 10 + static_cast<size_t>(c - '0');
    }
    return value;
  };
  PartName part{std::string(name.substr(0, name.size() - kTail)), digits(1), digits(10)};
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || part.number < 1 ||
      part.number > part.count || part.count > kMaxParts)
    return std::nullopt;
  return part;
}

// Part `number` of `count`, as its header must say it.
void CheckPart(const GgufFile& file, size_t number, size_t count) {
  const auto split_count = file.OptionalCount(kSplitCount, 0, kMaxParts);
  if (!split_count && count == 1) return;
  if (!split_count) {
    ThrowCorrupt(file.file_name(),
                 fmt::format("its name says part {} of {}, but it has no metadata key \"{}\"",
                             number, count, kSplitCount));
  }
  // The key of a model that was never split is 0 or 1.
  if (std::max<size_t>(*split_count, 1) != count) {
    ThrowCorrupt(file.file_name(),
                 fmt::format("its header says {} parts (\"{}\"), but its name says {}{}",
                             *split_count, kSplitCount, count,
                             count == 1 ? "; parts are named NAME-00001-of-00004.gguf" : ""));
  }
  if (count == 1) return;
  const size_t split_number = file.Count(kSplitNumber, 0, kMaxParts);
  if (split_number + 1 != number) {
    ThrowCorrupt(file.file_name(),
                 fmt::format("its header says part {} of {} (\"{}\" counts from 0), but its name "
                             "says part {}",
                             split_number + 1, count, kSplitNumber, number));
  }
}

// Entries of a later part that the first has too must have its values; "split.no" tells parts
// apart, and each has its own alignment.
void CheckAgreement(const GgufFile& first, const GgufFile& part) {
  for (const GgufEntry& entry : part.entries()) {
    if (entry.key == kSplitNumber || entry.key == kAlignmentKey) continue;
    const GgufEntry* same = first.FindEntry(entry.key);
    if (same == nullptr) continue;
    if (same->type != entry.type || same->is_array != entry.is_array ||
        TextOf(same->bytes) != TextOf(entry.bytes)) {
      ThrowCorrupt(part.file_name(),
                   fmt::format("metadata key {} differs from {}: the two are parts of different "
                               "models",
                               QuoteForMessage(entry.key), first.file_name()));
    }
  }
}

}  // namespace

GgufModel GgufModel::Open(std::shared_ptr<const ModelFiles> files, std::string_view name) {
  GgufModel model;
  model.files_ = std::move(files);
  const PartName part = ParsePartName(name).value_or(PartName{});
  for (size_t number = 1; number <= part.count; ++number) {
    const std::string part_name =
        part.count == 1 ? std::string(name) : NameOfPart(part.prefix, number, part.count);
    if (part.count > 1 && !model.files_->Has(part_name)) {
      Throw(ErrorCode::kNotFound, model.files_->PathOf(part_name),
            fmt::format("part {} of {} of the model is missing; download it again", number,
                        part.count));
    }
    model.parts_.push_back(
        GgufFile::Parse(model.files_->PathOf(part_name), model.files_->Map(part_name)));
    CheckPart(model.parts_.back(), number, part.count);
    CheckAgreement(model.parts_.front(), model.parts_.back());
  }
  model.JoinParts();
  return model;
}

void GgufModel::JoinParts() {
  for (const GgufFile& file : parts_) {
    for (const GgufTensorInfo& info : file.tensors()) tensors_.push_back({&file, &info});
  }
  by_name_ = SortByName(
      tensors_.size(), [&](size_t i) { return tensors_[i].info->name; },
      [&](size_t a, size_t b) {
        ThrowCorruptTensor(tensors_[b].file->file_name(), tensors_[b].info->name,
                           fmt::format("is in {} too", tensors_[a].file->file_name()));
      });
  if (parts_.size() == 1) return;
  const size_t expected = metadata().Count(kSplitTensors, 0, SIZE_MAX);
  if (expected != tensors_.size()) {
    ThrowCorrupt(metadata().file_name(),
                 fmt::format("says {} tensors in all parts (\"{}\"), found {}", expected,
                             kSplitTensors, tensors_.size()));
  }
}

const GgufModel::Tensor* GgufModel::Find(std::string_view name) const {
  const size_t i = FindByName(by_name_, name, [&](size_t at) { return tensors_[at].info->name; });
  return i == tensors_.size() ? nullptr : &tensors_[i];
}

std::optional<std::string> GgufModel::FindIn(const ModelFiles& files) {
  std::optional<std::string> found;
  for (const std::string& name : files.Names()) {
    if (!name.ends_with(kSuffix)) continue;
    const auto part = ParsePartName(name);
    if (part && part->number != 1 && files.Has(NameOfPart(part->prefix, 1, part->count))) continue;
    // A set without its first part counts too: opening it says what is missing.
    if (part && found) {
      const auto before = ParsePartName(*found);
      if (before && before->prefix == part->prefix && before->count == part->count) continue;
    }
    if (found) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: holds more than one GGUF model ({} and {}); name the file",
                              files.description(), QuoteForMessage(*found), QuoteForMessage(name)));
    }
    found = name;
  }
  return found;
}

GgufModel GgufModel::Open(const std::shared_ptr<const ModelFiles>& files) {
  const auto name = FindIn(*files);
  if (!name)
    Throw(ErrorCode::kNotFound, files->description(), "there is no .gguf file in this folder");
  return Open(files, *name);
}

std::shared_ptr<const ModelFiles> OpenGgufFiles(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const std::string name = path.filename().string();
  std::vector<std::string> names = {name};
  if (const auto part = ParsePartName(name)) {
    names.clear();
    for (size_t number = 1; number <= part->count; ++number)
      names.push_back(NameOfPart(part->prefix, number, part->count));
  }
  auto files = ModelFiles::OpenSome(folder, names, path.string());
  if (!files->Has(name)) Throw(ErrorCode::kNotFound, path.string(), "there is no such file");
  return files;
}

bool IsGgufModel(const ModelFiles& files) {
  if (files.Has("model.safetensors") || files.Has("model.safetensors.index.json")) return false;
  return GgufModel::FindIn(files).has_value();
}

namespace {

template <typename T>
void Append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void AppendText(std::string& bytes, std::string_view text) {
  Append(bytes, static_cast<uint64_t>(text.size()));
  bytes += text;
}

uint32_t TypeIdOf(DType dtype) {
  for (const TensorTypeRow& row : kTensorTypes) {
    if (row.dtype == dtype) return row.id;
  }
  return UINT32_MAX;
}

[[noreturn]] void ThrowBadTensor(std::string_view name, const std::string& reason) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("tensor {}: {}", QuoteForMessage(name), reason));
}

}  // namespace

void GgufWriter::StartEntry(std::string_view key, GgufType type) {
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("metadata key {} {}", QuoteForMessage(key), why));
  };
  if (key.empty()) refuse("is empty");
  if (key.size() > GgufFile::kMaxKeyBytes) refuse("is too long");
  const auto at = std::lower_bound(keys_.begin(), keys_.end(), key);
  if (at != keys_.end() && *at == key) refuse("is there already");
  keys_.emplace(at, key);
  AppendText(entries_, key);
  Append(entries_, static_cast<uint32_t>(type));
}

void GgufWriter::StartArray(std::string_view key, GgufType type, size_t count) {
  StartEntry(key, GgufType::kArray);
  Append(entries_, static_cast<uint32_t>(type));
  Append(entries_, static_cast<uint64_t>(count));
}

void GgufWriter::SetU32(std::string_view key, uint32_t value) {
  StartEntry(key, GgufType::kU32);
  Append(entries_, value);
}
void GgufWriter::SetU64(std::string_view key, uint64_t value) {
  StartEntry(key, GgufType::kU64);
  Append(entries_, value);
}
void GgufWriter::SetF32(std::string_view key, float value) {
  StartEntry(key, GgufType::kF32);
  Append(entries_, value);
}
void GgufWriter::SetFlag(std::string_view key, bool value) {
  StartEntry(key, GgufType::kBool);
  Append(entries_, static_cast<uint8_t>(value));
}
void GgufWriter::SetText(std::string_view key, std::string_view value) {
  StartEntry(key, GgufType::kString);
  AppendText(entries_, value);
}
void GgufWriter::SetTexts(std::string_view key, std::span<const std::string> values) {
  StartArray(key, GgufType::kString, values.size());
  for (const std::string& value : values) AppendText(entries_, value);
}
void GgufWriter::SetI32s(std::string_view key, std::span<const int32_t> values) {
  StartArray(key, GgufType::kI32, values.size());
  for (int32_t value : values) Append(entries_, value);
}
void GgufWriter::SetF32s(std::string_view key, std::span<const float> values) {
  StartArray(key, GgufType::kF32, values.size());
  for (float value : values) Append(entries_, value);
}

void GgufWriter::Copy(const GgufEntry& entry) {
  if (entry.key == kAlignmentKey) return;
  if (entry.is_array) {
    StartArray(entry.key, entry.type, entry.count);
  } else {
    StartEntry(entry.key, entry.type);
  }
  entries_ += TextOf(entry.bytes);
}

void GgufWriter::AddTensor(std::string_view name, DType dtype, const Shape& shape) {
  if (name.empty() || name.size() > GgufFile::kMaxNameBytes)
    ThrowBadTensor(name, fmt::format("names have 1 to {} bytes", GgufFile::kMaxNameBytes));
  for (const TensorRow& row : tensors_) {
    if (row.name == name) ThrowBadTensor(name, "is there already");
  }
  if (TypeIdOf(dtype) == UINT32_MAX)
    ThrowBadTensor(name, fmt::format("a GGUF file cannot hold {}", DTypeName(dtype)));
  size_t count = 0;
  if (shape.rank() == 0 || shape.rank() > GgufFile::kMaxAxes || !shape.NumElements(count) ||
      count == 0 || count > SIZE_MAX / 64 || shape[shape.rank() - 1] % DTypeBlock(dtype) != 0) {
    ThrowBadTensor(name, fmt::format("a GGUF file cannot hold {} of shape {} (blocks of {})",
                                     DTypeName(dtype), shape.ToString(), DTypeBlock(dtype)));
  }
  tensors_.push_back({std::string(name), dtype, shape});
}

GgufWriter::Layout GgufWriter::Finish() const {
  Layout layout;
  std::string& header = layout.header;
  header = kMagic;
  Append(header, kVersion);
  Append(header, static_cast<uint64_t>(tensors_.size()));
  Append(header, static_cast<uint64_t>(keys_.size()));
  header += entries_;
  size_t offset = 0;
  for (const TensorRow& row : tensors_) {
    AppendText(header, row.name);
    Append(header, static_cast<uint32_t>(row.shape.rank()));
    for (size_t axis = row.shape.rank(); axis-- > 0;)
      Append(header, static_cast<uint64_t>(row.shape[axis]));
    Append(header, TypeIdOf(row.dtype));
    Append(header, static_cast<uint64_t>(offset));
    layout.offsets.push_back(offset);
    size_t count = 0;
    row.shape.NumElements(count);
    if (__builtin_add_overflow(offset, BytesOf(row.dtype, count), &offset) ||
        !PadTo(GgufFile::kDefaultAlignment, offset) || offset > SIZE_MAX / 4)
      throw Error(ErrorCode::kResourceExhausted, "the tensors do not fit one GGUF file");
  }
  size_t begin = header.size();
  PadTo(GgufFile::kDefaultAlignment, begin);
  header.resize(begin, '\0');
  for (size_t& at : layout.offsets) at += begin;
  layout.file_bytes = begin + offset;
  return layout;
}

}  // namespace switchyard
