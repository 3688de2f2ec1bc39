// The GGUF container: metadata and named tensors in one file, or in the numbered parts of a split
// one.
//
// Layout, little endian: "GGUF", u32 version, u64 number of tensors, u64 number of metadata
//   entries; the entries (key, u32 type, value); the tensors (name, u32 number of axes, u64 sizes
//   with the innermost first, u32 type, u64 offset into the data section); padding to
//   general.alignment; the data section, where each tensor starts at a multiple of the alignment
//   right after the one before. A string is a u64 length and bytes; an array is a u32 type, a u64
//   count and values.
// Source: docs/gguf.md of ggml-org/ggml.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"
#include "switchyard/model/files.h"

namespace switchyard {

// Types of metadata values, by their numbers in the file.
enum class GgufType : uint8_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};
// "u32", "string", …
std::string_view GgufTypeName(GgufType type);

// One metadata entry; all views are into the file.
struct GgufEntry {
  std::string_view key;
  GgufType type = GgufType::kU8;  // of the values, if it is an array
  bool is_array = false;
  size_t count = 1;                  // of values
  std::span<const std::byte> bytes;  // the values as they lie in the file
};

// One tensor. `offset` is in bytes from the start of the data section.
struct GgufTensorInfo {
  std::string_view name;  // into the file
  DType dtype = DType::kF32;
  Shape shape;  // row-major as everywhere: the sizes of the file, reversed
  size_t offset = 0;
  size_t bytes = 0;
};

// A parsed and proven header over somebody else's bytes, which must outlive it. All const functions
// may be called concurrently.
class GgufFile {
 public:
  static constexpr size_t kMaxKeyBytes = 65535;
  static constexpr size_t kMaxNameBytes = 64;
  static constexpr size_t kMaxAxes = 4;
  static constexpr size_t kDefaultAlignment = 32;
  static constexpr size_t kMaxAlignment = size_t{1} << 20;

  // Reads the header of version 2 or 3 and proves that it describes exactly these bytes, which
  // start at an address that is a multiple of 8; reads no tensor data. `file_name` is used in
  // messages only. Allocates in proportion to the entries and tensors that are really there, never
  // to a size that the header claims; arrays stay in the file.
  // Errors: kCorruptData naming the file, the key or tensor and the reason, and the bytes missing
  //   (with the first tensor that they belong to) or left over; kUnsupported for other versions,
  //   big endian files and tensor types that this build lacks; kInvalidArgument for a wrong
  //   address.
  static GgufFile Parse(std::string file_name, std::span<const std::byte> bytes);

  const std::string& file_name() const { return file_name_; }
  uint32_t version() const { return version_; }
  size_t alignment() const { return alignment_; }
  // Bytes of the data section, the padding behind the last tensor not counted.
  size_t data_bytes() const { return data_.size(); }
  // The bytes that belong to nothing: before the data, between tensors, behind the last one. They
  // are zero in the files of most writers.
  const std::vector<std::span<const std::byte>>& padding() const { return padding_; }

  // In the order of the file.
  const std::vector<GgufEntry>& entries() const { return entries_; }
  const std::vector<GgufTensorInfo>& tensors() const { return tensors_; }

  // nullptr if there is none of that name.
  const GgufEntry* FindEntry(std::string_view key) const;
  const GgufTensorInfo* FindTensor(std::string_view name) const;

  // The tensor that `info`, one of tensors(), describes. Aligned to 8 bytes, never null.
  // Shapes: as in `info`.
  TensorView View(const GgufTensorInfo& info) const;

  // Values of entries. The Optional forms give nullopt if there is no such key, the others throw.
  // Every integer type serves as a count, f32 and f64 and integers as a number.
  // Errors: kCorruptData naming file, key, expected type and range, and what was found.
  size_t Count(std::string_view key, size_t min, size_t max) const;
  std::optional<size_t> OptionalCount(std::string_view key, size_t min, size_t max) const;
  double Number(std::string_view key, double min, double max) const;
  std::optional<double> OptionalNumber(std::string_view key, double min, double max) const;
  bool Flag(std::string_view key) const;
  std::optional<bool> OptionalFlag(std::string_view key) const;
  std::string_view Text(std::string_view key) const;
  std::optional<std::string_view> OptionalText(std::string_view key) const;

  // Arrays; Counts and Numbers take a single value as an array of one, and bools as 0 and 1. The
  // texts are views into the file and need not be UTF-8.
  // Errors: as above.
  std::vector<size_t> Counts(std::string_view key, size_t min, size_t max) const;
  std::vector<double> Numbers(std::string_view key, double min, double max) const;
  std::vector<std::string_view> Texts(std::string_view key) const;

 private:
  class Reader;

  GgufFile() = default;

  const GgufEntry& Require(std::string_view key, std::string_view expected) const;
  [[noreturn]] void ThrowWrong(const GgufEntry& entry, const std::string& expected) const;
  size_t CountAt(const GgufEntry& entry, size_t i, size_t min, size_t max) const;
  double NumberAt(const GgufEntry& entry, size_t i, double min, double max) const;

  std::string file_name_;
  uint32_t version_ = 0;
  size_t alignment_ = kDefaultAlignment;
  std::vector<GgufEntry> entries_;
  std::vector<GgufTensorInfo> tensors_;
  std::vector<size_t> entries_by_key_;   // indices, sorted by key
  std::vector<size_t> tensors_by_name_;  // indices, sorted by name
  std::span<const std::byte> data_;
  std::vector<std::span<const std::byte>> padding_;
};

// A model in one GGUF file or in all parts of a split one: the metadata of the first part, the
// tensors of all. Keeps the files mapped. All const functions may be called concurrently.
class GgufModel {
 public:
  // A tensor and the part that holds it.
  struct Tensor {
    const GgufFile* file = nullptr;
    const GgufTensorInfo* info = nullptr;

    TensorView View() const { return file->View(*info); }
  };

  // Opens the model that `name` of `files` is, or is any part of.
  // Errors: those of GgufFile::Parse; kNotFound naming the part that is missing; kCorruptData
  //   naming the part whose number, count of parts, count of tensors or other metadata disagrees
  //   with its name or with the first part, and both parts that hold one tensor.
  static GgufModel Open(std::shared_ptr<const ModelFiles> files, std::string_view name);

  // Opens the only GGUF model in `files`.
  // Errors: as above; kNotFound if there is none; kInvalidArgument naming them if there are
  //   several.
  static GgufModel Open(const std::shared_ptr<const ModelFiles>& files);

  // The file, or first part, of the only GGUF model in `files`; nullopt if there is none.
  // Errors: kInvalidArgument naming them if there are several.
  static std::optional<std::string> FindIn(const ModelFiles& files);

  GgufModel(GgufModel&&) noexcept = default;
  GgufModel& operator=(GgufModel&&) noexcept = default;
  GgufModel(const GgufModel&) = delete;  // its tensors point to its parts
  GgufModel& operator=(const GgufModel&) = delete;
  ~GgufModel() = default;

  // Of the first part.
  const GgufFile& metadata() const { return parts_.front(); }
  const std::vector<GgufFile>& parts() const { return parts_; }

  // Of all parts, in order.
  const std::vector<Tensor>& tensors() const { return tensors_; }

  // nullptr if there is no such tensor.
  const Tensor* Find(std::string_view name) const;

 private:
  GgufModel() = default;
  void JoinParts();

  std::shared_ptr<const ModelFiles> files_;
  std::vector<GgufFile> parts_;
  std::vector<Tensor> tensors_;
  std::vector<size_t> by_name_;
};

// The files of the model that a .gguf file is, or is any part of: that file, or all parts.
// Errors: kNotFound if there is no such file.
std::shared_ptr<const ModelFiles> OpenGgufFiles(const std::filesystem::path& path);

// Whether a set of files is a GGUF model: it holds one, and no weights in safetensors files.
// Errors: kInvalidArgument naming them if there are several.
bool IsGgufModel(const ModelFiles& files);

// Lays out a GGUF file of version 3: the caller writes the header, then each tensor at its offset
// (in the order in which they were added), with zeros between, and decides how files are replaced.
//
// Deterministic: equal calls give equal bytes.
class GgufWriter {
 public:
  // The bytes before the data, and where it goes.
  struct Layout {
    std::string header;           // padded to the alignment
    std::vector<size_t> offsets;  // of each tensor, from the start of the file
    size_t file_bytes = 0;        // with the padding behind the last tensor
  };

  // Metadata. Errors: kInvalidArgument if the key is empty, too long or there already.
  void SetU32(std::string_view key, uint32_t value);
  void SetU64(std::string_view key, uint64_t value);
  void SetF32(std::string_view key, float value);
  void SetFlag(std::string_view key, bool value);
  void SetText(std::string_view key, std::string_view value);
  void SetTexts(std::string_view key, std::span<const std::string> values);
  void SetI32s(std::string_view key, std::span<const int32_t> values);
  void SetF32s(std::string_view key, std::span<const float> values);
  // As it stands in another file. Does nothing for general.alignment: that of this file is 32.
  void Copy(const GgufEntry& entry);

  // A tensor; it can have every type that a GGUF file can.
  // Shapes: 1 to 4 axes, none of size 0; the last a multiple of DTypeBlock(dtype).
  // Errors: kInvalidArgument naming the tensor and the reason.
  void AddTensor(std::string_view name, DType dtype, const Shape& shape);

  // Errors: kResourceExhausted if the file would not fit an offset.
  Layout Finish() const;

 private:
  struct TensorRow {
    std::string name;
    DType dtype;
    Shape shape;
  };

  void StartEntry(std::string_view key, GgufType type);
  void StartArray(std::string_view key, GgufType type, size_t count);

  std::vector<std::string> keys_;
  std::string entries_;
  std::vector<TensorRow> tensors_;
};

}  // namespace switchyard
