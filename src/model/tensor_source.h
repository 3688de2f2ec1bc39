// Where weights come from: a checkpoint, or what model/random_source.h makes up.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/value_scan.h"
#include "switchyard/core/shape.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/file_tensor.h"

namespace switchyard {

// What a source says about a tensor before it is taken.
struct TensorKind {
  DType dtype = DType::kF32;
  Shape shape;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual bool Has(std::string_view name) const = 0;
  // Nothing if there is no such tensor, or if the source makes what is asked for.
  virtual std::optional<TensorKind> KindOf(std::string_view /*name*/) const { return {}; }
  // The view may have no data until Finish has passed: problems are collected, so that one error
  // can list them all.
  // Types that plain matrices have there.
  virtual std::span<const DType> matrix_dtypes() const { return kFloatDTypes; }
  virtual TensorView Take(std::string_view name, const Shape& shape,
                          std::span<const DType> allowed) = 0;
  // A tensor that must be there, but whose data is another rank's.
  virtual void Skip(std::string_view name, const Shape& shape, std::span<const DType> allowed) = 0;
  // Nobody reads these bytes again: their memory may go.
  virtual void Release(const TensorView& /*view*/) {}
  // `part` of a tensor that was taken will be read: all that is, where ranks share a model. Its
  // data may be missing until Finish has passed.
  virtual void Use(std::string_view /*name*/, const TensorView& /*part*/) {}
  // What a tensor that was taken is to the model.
  virtual void Tell(std::string_view /*name*/, TensorRole /*role*/) {}
  virtual void Ignore(std::string_view name, std::string_view reason) = 0;
  // All that nobody has taken and whose names end so.
  virtual void IgnoreSuffixes(std::span<const std::string_view> /*suffixes*/) {}
  // False if views never have data: sizes alone are counted.
  virtual bool has_data() const { return true; }
  // All whose names begin so.
  virtual void IgnoreAll(std::string_view /*prefix*/, std::string_view /*reason*/) {}
  // Errors: kCorruptData naming every tensor that is missing, left over, or of the wrong shape or
  //   type.
  virtual void Finish() = 0;
};

// The tensors of a checkpoint, as they lie in its mapped files.
class CheckpointSource : public TensorSource {
 public:
  explicit CheckpointSource(Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  bool Has(std::string_view name) const override { return checkpoint_.Has(name); }
  std::optional<TensorKind> KindOf(std::string_view name) const override {
    const TensorInfo* info = checkpoint_.Info(name);
    if (info == nullptr) return {};
    return TensorKind{info->dtype, info->shape};
  }
  TensorView Take(std::string_view name, const Shape& shape,
                  std::span<const DType> allowed) override {
    return checkpoint_.Take(name, shape, allowed);
  }
  void Skip(std::string_view name, const Shape& shape, std::span<const DType> allowed) override {
    checkpoint_.Take(name, shape, allowed);
  }
  void Release(const TensorView& view) override {
    checkpoint_.files().Release({view.data, view.NumBytes()});
  }
  void Ignore(std::string_view name, std::string_view reason) override {
    checkpoint_.Ignore(name, reason);
  }
  void IgnoreAll(std::string_view prefix, std::string_view reason) override {
    for (std::string_view name : checkpoint_.Names()) {
      if (name.starts_with(prefix)) checkpoint_.Ignore(name, reason);
    }
  }
  void IgnoreSuffixes(std::span<const std::string_view> suffixes) override {
    for (std::string_view suffix : suffixes) {
      for (std::string_view name : checkpoint_.Names()) {
        if (name.ends_with(suffix)) checkpoint_.Ignore(name, "not used by this engine");
      }
    }
  }
  void Finish() override { checkpoint_.Finish(); }

  // For those who look into files: all tensors, by name; use is why one is ignored.
  std::vector<LocatedTensor> List() const;
  // The name in the file.
  std::string FileName(std::string_view name) const { return std::string(name); }

 private:
  Checkpoint& checkpoint_;
};

}  // namespace switchyard
