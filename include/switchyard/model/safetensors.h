// The safetensors container: named tensors, described by a JSON header, in one file.
//
// Layout: u64 (little-endian) length of the header; the header, one JSON object; the data section.
//   The header maps each tensor to {"dtype", "shape", "data_offsets": [begin, end]}, offsets being
//   bytes from the start of the data section, and "__metadata__" to an object of strings. The
//   tensors fill the data section without gap or overlap.
// Source: the format description of huggingface/safetensors.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"

namespace switchyard {

// One entry of a header. [begin, end) are bytes of the data section.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  size_t begin = 0;
  size_t end = 0;
};

// A parsed and proven header over somebody else's bytes, which must outlive it. All const functions
// may be called concurrently.
class SafetensorsFile {
 public:
  // The longest header that is read; the limit of the reference implementation.
  static constexpr size_t kMaxHeaderBytes = 100'000'000;

  // Reads the header and proves that it describes exactly these bytes; reads no tensor data.
  // `file_name` is used in messages only. Allocates in proportion to the header, never to a size
  // that the header claims.
  // Errors: kCorruptData naming the file, the tensor and the reason, and the bytes missing or left
  //   over where the file is cut short or has grown; kUnsupported for a dtype that core/dtype.h
  //   lacks and for more than Shape::kMaxRank axes.
  static SafetensorsFile Parse(std::string file_name, std::span<const std::byte> bytes);

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::string& file_name() const { return file_name_; }

  // In order of offset, tensors without elements before the tensor at the same offset.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  // nullptr if there is no such tensor.
  const TensorInfo* Find(std::string_view name) const;

  // The tensor that `info`, which must be one of tensors(), describes. The data is always aligned
  // to its element size: where the file breaks that (a header whose length is no multiple of 8, or
  // an odd number of bytes before), the tensor is copied on first use and the copy lives as long as
  // *this. Otherwise the view points into the file.
  // Shapes: as in `info`. Never has null data, not even without elements.
  // Errors: kResourceExhausted if there is no memory for the copy.
  TensorView View(const TensorInfo& info) const;

  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Bytes of the data section, that is of all tensors together.
  size_t data_bytes() const { return data_.size(); }

 private:
  class HeaderReader;
  struct AlignedCopies;

  SafetensorsFile();

  std::string file_name_;
  std::vector<TensorInfo> tensors_;
  std::vector<size_t> by_name_;  // indices of tensors_, sorted by name
  std::map<std::string, std::string> metadata_;
  std::span<const std::byte> data_;
  std::unique_ptr<AlignedCopies> copies_;
};

// A tensor to write.
struct NamedTensor {
  std::string name;
  TensorView view;
};

// A tensor of a file whose data comes later.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

// A file before its data: what it starts with, and where each tensor goes.
struct SafetensorsLayout {
  std::string header;           // the length and the JSON, padded so that tensors are aligned
  std::vector<size_t> offsets;  // of each tensor as given, from the start of the file
  size_t file_bytes = 0;
};

// Lays out a file for whoever writes the data piece by piece: the header, then each tensor at its
// offset. Wide elements lie first, otherwise the order is that given; every tensor is aligned to
// its element size. Deterministic: equal arguments give equal bytes.
// Errors: kInvalidArgument naming the tensor (empty, repeated, reserved or badly encoded name, NUL,
//   a size that overflows); `file_name` stands in messages.
SafetensorsLayout LayOutSafetensors(const std::string& file_name,
                                    std::span<const TensorSpec> tensors,
                                    const std::map<std::string, std::string>& metadata = {});

// Writes a file that holds `tensors` and `metadata`; every tensor is aligned to its element size in
// it. A file of that name is replaced as a whole or not at all: the data goes to a temporary file
// beside it, reaches the disk, and is then renamed. If `path` is a link, the link is replaced.
// Deterministic: equal arguments give equal bytes.
// Shapes: any, up to Shape::kMaxRank axes.
// Errors: kInvalidArgument naming the tensor (empty, repeated, reserved or badly encoded name, NUL,
//   null data) or the path (its folder does not exist, it is a folder); kUnavailable with the
//   reason of the system if it cannot be written.
void WriteSafetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace switchyard
