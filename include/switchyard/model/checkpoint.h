// All tensors of a model folder, and the proof that a model uses every one of them.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"
#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"

namespace switchyard {

class TensorLedger;

// What a weight that is not quantised may be stored as.
inline constexpr std::array kFloatDTypes = {DType::kF32, DType::kF16, DType::kBF16};
constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// The tensors of one model by name, from model.safetensors or from the shards that
// model.safetensors.index.json names.
//
// Whoever builds a model takes every tensor it needs and ignores by name those that it knows and
// does not need; Finish then reports all that is missing, does not fit or is left over in one
// error. So a checkpoint in a layout that the builder does not expect is refused, instead of
// leaving weights unset. Const functions may be called concurrently, Take and Ignore may not.
class Checkpoint {
 public:
  // Reads and checks the headers of all files, and no tensor data. If there is an index it decides:
  // it must name every tensor of every file it names, in the right file. Other *.safetensors files
  // are not read; see IgnoredFiles.
  // Errors: kNotFound if there are no weights, or only in a layout that is not read (names what was
  //   found); kCorruptData if a file or the index is damaged, or they contradict each other, naming
  //   the files; kUnsupported as SafetensorsFile::Parse; and what ModelFiles::Map throws.
  static Checkpoint Open(std::shared_ptr<const ModelFiles> files);

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const ModelFiles& files() const { return *files_; }

  bool Has(std::string_view name) const { return Info(name) != nullptr; }

  // nullptr if there is no such tensor. Does not mark it as used.
  const TensorInfo* Info(std::string_view name) const;

  // Name of the file that holds a tensor.
  // Errors: kNotFound if there is no such tensor.
  const std::string& FileOf(std::string_view name) const;

  // A tensor as it lies in its file. Does not mark it as used.
  // Shapes: as in Info.
  // Errors: kNotFound if there is no such tensor.
  TensorView View(std::string_view name) const;

  // Why a tensor was ignored; empty if it was not.
  std::string_view IgnoredReason(std::string_view name) const;

  // Names of all tensors, sorted. Valid as long as *this.
  std::vector<std::string_view> Names() const;

  // Bytes of the data of all tensors together.
  size_t total_bytes() const { return total_bytes_; }

  // The tensor `name`, marked as used. If it is missing, or has another shape or a dtype that is
  // not allowed, the problem is kept for Finish and the view has no data: do not touch the data of
  // any view before Finish has passed.
  // Shapes: `expected`, also in the view without data. The data is aligned to its element size and
  //   valid as long as *this.
  // Errors: kInternal if the tensor has been taken or ignored before.
  TensorView Take(std::string_view name, const Shape& expected,
                  std::span<const DType> allowed = kFloatDTypes);

  // A tensor that is known and has no use here; `reason` is logged at debug level. Nothing happens
  // if it does not exist.
  // Errors: kInternal if the tensor has been taken before.
  void Ignore(std::string_view name, std::string_view reason);

  // Ends the building of a model.
  // Errors: kCorruptData listing the tensors that are missing, that have the wrong shape or dtype,
  //   and that were neither taken nor ignored, each by name with what was expected, found, and in
  //   which file; the first eight of each kind and the number of the others.
  void Finish() const;

  // Files with tensors that lie in the folder and were not read: *.safetensors that the index does
  // not name, copies in another layout (consolidated.safetensors). Open logs them as a warning.
  const std::vector<std::string>& IgnoredFiles() const { return ignored_files_; }

 private:
  struct Entry {
    const TensorInfo* info;  // in a file of shards_
    size_t shard_idx;
  };

  explicit Checkpoint(std::shared_ptr<const ModelFiles> files);
  void AddFile(const std::string& name);
  void OpenIndexed();
  void FindIgnoredFiles();

  std::shared_ptr<const ModelFiles> files_;
  std::vector<SafetensorsFile> shards_;
  std::map<std::string_view, Entry> tensors_;  // the names are those in shards_
  size_t total_bytes_ = 0;
  std::vector<std::string> ignored_files_;
  std::unique_ptr<TensorLedger> ledger_;
};

// NaN and infinity in a tensor. Weights have neither unless a conversion or a download went wrong.
struct BadValues {
  size_t nan = 0;
  size_t inf = 0;
  size_t first_index = 0;  // of either, in elements from the start; meaningless if there is none

  bool any() const { return nan + inf > 0; }
};

// Counts them, at the speed of memory, on the calling thread.
// Shapes: any; dtype F32, F16 or BF16, the data need not be aligned.
// Errors: kInvalidArgument for another dtype.
BadValues ScanForBadValues(const TensorView& view);

}  // namespace switchyard
