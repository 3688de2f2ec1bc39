// The tensors of a GGUF model under the names that hub checkpoints have.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "model/tensor_ledger.h"
#include "model/tensor_source.h"
#include "switchyard/model/files.h"
#include "switchyard/model/gguf.h"

namespace switchyard {

// Blocks of ggml are used where they lie.
class GgufSource : public TensorSource {
 public:
  GgufSource(const GgufModel& gguf, const ModelFiles& files);

  bool Has(std::string_view name) const override { return Find(name) != nullptr; }
  std::optional<TensorKind> KindOf(std::string_view name) const override;
  std::span<const DType> matrix_dtypes() const override;
  TensorView Take(std::string_view name, const Shape& shape,
                  std::span<const DType> allowed) override;
  void Skip(std::string_view name, const Shape& shape, std::span<const DType> allowed) override {
    Take(name, shape, allowed);
  }
  void Release(const TensorView& view) override;
  void Ignore(std::string_view name, std::string_view reason) override;
  void IgnoreAll(std::string_view prefix, std::string_view reason) override;
  void Finish() override;

  // For those who look into files: all tensors, in the order of the parts; use is why one is
  // ignored.
  std::vector<LocatedTensor> List() const;
  // The name in the file, or `name` itself where GGUF has none, for messages.
  std::string FileName(std::string_view name) const;

 private:
  // nullptr if there is none.
  const GgufModel::Tensor* Find(std::string_view name) const;

  const GgufModel& gguf_;
  const ModelFiles& files_;
  std::string architecture_;
  TensorLedger ledger_;
};

}  // namespace switchyard
