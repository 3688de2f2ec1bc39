#include "model/gguf_source.h"

#include <fmt/format.h>

#include <vector>

#include "model/gguf_config.h"

namespace switchyard {
namespace {

std::vector<DType> MatrixDTypes() {
  std::vector<DType> dtypes(kFloatDTypes.begin(), kFloatDTypes.end());
  for (auto i = static_cast<int>(kFirstGgmlBlock); i <= static_cast<int>(kLastGgmlBlock); ++i)
    dtypes.push_back(static_cast<DType>(i));
  return dtypes;
}

}  // namespace

GgufSource::GgufSource(const GgufModel& gguf, const ModelFiles& files)
    : gguf_(gguf), files_(files), architecture_(gguf.metadata().Text("general.architecture")) {
  for (const GgufModel::Tensor& tensor : gguf.tensors()) {
    ledger_.Add(tensor.info->name, tensor.info->dtype, tensor.info->shape,
                tensor.file->file_name());
    if (const auto reason = GgufIgnoredReason(tensor.info->name))
      ledger_.Ignore(tensor.info->name, *reason);
  }
}

const GgufModel::Tensor* GgufSource::Find(std::string_view name) const {
  const auto file_name = GgufTensorName(architecture_, name);
  return file_name ? gguf_.Find(*file_name) : nullptr;
}

std::string GgufSource::FileName(std::string_view name) const {
  return GgufTensorName(architecture_, name).value_or(std::string(name));
}

std::optional<TensorKind> GgufSource::KindOf(std::string_view name) const {
  const GgufModel::Tensor* tensor = Find(name);
  if (tensor == nullptr) return {};
  return TensorKind{tensor->info->dtype, tensor->info->shape};
}

std::span<const DType> GgufSource::matrix_dtypes() const {
  static const std::vector<DType> kDTypes = MatrixDTypes();
  return kDTypes;
}

TensorView GgufSource::Take(std::string_view name, const Shape& shape,
                            std::span<const DType> allowed) {
  if (!ledger_.Take(FileName(name), shape, allowed)) return {nullptr, allowed.front(), shape};
  return Find(name)->View();
}

void GgufSource::Release(const TensorView& view) { files_.Release({view.data, view.NumBytes()}); }

void GgufSource::Ignore(std::string_view name, std::string_view reason) {
  ledger_.Ignore(FileName(name), reason);
}

void GgufSource::IgnoreAll(std::string_view prefix, std::string_view reason) {
  // "model.layers.61." is "blk.61.".
  constexpr std::string_view kHub = "model.layers.";
  const std::string start = prefix.starts_with(kHub)
                                ? fmt::format("blk.{}", prefix.substr(kHub.size()))
                                : std::string(prefix);
  for (std::string_view name : ledger_.Names()) {
    if (name.starts_with(start)) ledger_.Ignore(name, reason);
  }
}

std::vector<LocatedTensor> GgufSource::List() const {
  std::vector<LocatedTensor> list;
  for (const GgufModel::Tensor& tensor : gguf_.tensors()) {
    const GgufTensorInfo& info = *tensor.info;
    list.push_back(
        {{std::string(info.name), tensor.file->file_name(), info.dtype, info.shape, info.bytes,
          TensorRole::kUnused, std::string(ledger_.IgnoredReason(info.name))},
         tensor.View()});
  }
  return list;
}

void GgufSource::Finish() { ledger_.Finish(files_.description(), "its metadata"); }

}  // namespace switchyard
