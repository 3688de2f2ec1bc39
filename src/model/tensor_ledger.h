// Which tensors of a checkpoint a model has used, and what does not fit.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/dtype.h"
#include "switchyard/core/shape.h"

namespace switchyard {

// Whoever builds a model takes every tensor it needs and ignores by name those that it knows and
// does not need; Finish then reports all that is missing, does not fit or is left over in one
// error.
class TensorLedger {
 public:
  static constexpr size_t kMaxListed = 8;

  // `name` and `file` must outlive the ledger. False if there is one of this name already.
  bool Add(std::string_view name, DType dtype, const Shape& shape, std::string_view file);

  // Whether the tensor is there and fits; if not, the problem is kept for Finish.
  // Errors: kInternal if it has been taken or ignored before.
  bool Take(std::string_view name, const Shape& expected, std::span<const DType> allowed);

  // Nothing happens if there is no such tensor; `reason` is logged at debug level.
  // Errors: kInternal if it has been taken before.
  void Ignore(std::string_view name, std::string_view reason);

  // Why a tensor was ignored; empty if it was not.
  std::string_view IgnoredReason(std::string_view name) const;

  // The file that holds a tensor; nullptr if there is none of this name.
  const std::string_view* FileOf(std::string_view name) const;
  std::vector<std::string_view> Names() const;

  // Errors: kCorruptData listing the tensors that are missing, that have the wrong shape or dtype,
  //   and that were neither taken nor ignored, each by name with what was expected, found, and in
  //   which file; the first kMaxListed of each kind and the number of the others. `checkpoint` and
  //   `config` stand in the message.
  void Finish(std::string_view checkpoint, std::string_view config) const;

 private:
  enum class State { kUnused, kTaken, kIgnored };
  struct Entry {
    DType dtype;
    Shape shape;
    std::string_view file;
    State state = State::kUnused;
    std::string reason = {};  // of kIgnored
  };

  std::map<std::string_view, Entry> entries_;
  // Kept for Finish, each a whole line.
  std::vector<std::string> missing_;
  std::vector<std::string> misfits_;
};

// "F32", "F32 or F16", "F32, F16 or BF16".
std::string DescribeDTypes(std::span<const DType> dtypes);
// The first kMaxListed items, and how many more there are.
std::string ListSome(const std::vector<std::string>& items, std::string_view separator);

}  // namespace switchyard
