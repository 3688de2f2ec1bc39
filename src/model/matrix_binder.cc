#include "model/matrix_binder.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "model/quantization/online.h"
#include "switchyard/core/error.h"
#include "switchyard/model/checkpoint.h"

namespace switchyard {
namespace {

std::string TensorName(const std::string& module, std::string_view suffix) {
  return fmt::format("{}.{}", module, suffix);
}

size_t BytesOfShape(DType dtype, const Shape& shape) {
  size_t count = 0;
  return shape.NumElements(count) ? BytesOf(dtype, count) : 0;
}

// By the names that producers give.
TensorRole RoleOf(size_t index, std::string_view suffix) {
  if (index == 0) return TensorRole::kCodes;
  const bool is_scale = suffix.find("scale") != std::string_view::npos;
  return is_scale && suffix.find("bias") == std::string_view::npos ? TensorRole::kScales
                                                                   : TensorRole::kOther;
}

// The shape that the file has, if a scheme knows it.
const Shape& ShapeOnDisk(const StoredTensor& tensor, const std::optional<TensorKind>& kind) {
  if (!kind) return tensor.shapes.front();
  const auto found = std::ranges::find(tensor.shapes, kind->shape);
  return found != tensor.shapes.end() ? *found : tensor.shapes.front();
}

}  // namespace

// The rules decide, but a matrix that lies there as plain floats is plain: producers leave routers
// and heads out without saying so. Their sizes need not fit the packing.
const StorageScheme* MatrixBinder::SchemeOf(const std::string& module, std::string* note) const {
  if (options_.rules == nullptr) return nullptr;
  const StorageScheme* scheme = options_.rules->SchemeOf(module);
  if (scheme == nullptr) {
    if (note != nullptr) *note = "left out by the quantisation config";
    return nullptr;
  }
  const auto plain = source_.KindOf(TensorName(module, "weight"));
  if (!plain || !IsFloat(plain->dtype)) return scheme;
  const std::string_view codes = scheme->codes();
  if (codes != "weight" && source_.Has(TensorName(module, codes))) return scheme;
  if (note != nullptr) *note = kPlainFloats;
  return nullptr;
}

std::vector<StoredTensor> MatrixBinder::TensorsOf(const StorageScheme& scheme,
                                                  const std::string& module, size_t rows,
                                                  size_t cols) const {
  try {
    return scheme.Tensors(rows, cols);
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported, fmt::format("matrix {} [{}, {}], stored as {}: {}", module,
                                                     rows, cols, scheme.Describe(), error.what()));
  }
}

std::string_view MatrixBinder::Bind(const std::string& module, size_t rows, size_t cols, Use use,
                                    WeightMatrix& out) {
  std::string note;
  if (const StorageScheme* scheme = SchemeOf(module, &note)) {
    TakeScheme(*scheme, module, rows, cols, out);
    return scheme->moe_scheme();
  }
  const std::string name = TensorName(module, "weight");
  const TensorView view = source_.Take(name, {rows, cols}, source_.matrix_dtypes());
  source_.Use(name, view);
  source_.Tell(name, TensorRole::kMatrix);
  return BindPlain(module, view, rows, cols, use, std::move(note), out);
}

std::string_view MatrixBinder::BindPart(const std::string& bank, const TensorView& part,
                                        WeightMatrix& out) {
  return BindPlain(bank, part, part.shape[0], part.shape[1], Use::kLinear, {}, out);
}

std::string_view MatrixBinder::BindPlain(const std::string& module, const TensorView& view,
                                         size_t rows, size_t cols, Use use, std::string note,
                                         WeightMatrix& out) {
  out = WeightMatrix::Dense(view.data, view.dtype, rows, cols);
  StoredMatrix stored{
      module, std::string(DTypeName(view.dtype)), std::move(note), IsGgmlBlock(view.dtype), rows,
      cols,   rows * BytesOf(view.dtype, cols)};
  stored.dtype = view.dtype;
  std::string_view moe_scheme = "unquant";
  if (IsGgmlBlock(view.dtype)) {
    moe_scheme = "gguf";
    stored.block_rows = 1;
    stored.block_cols = DTypeBlock(view.dtype);
  }
  if (options_.online != nullptr && use == Use::kLinear && IsFloat(view.dtype)) {
    stored.note = options_.online->WhyNot(module, rows, cols);
    if (stored.note.empty()) {
      const OnlineScheme& scheme = options_.online->scheme();
      stored.note = fmt::format("quantised on loading: {}", scheme.summary);
      moe_scheme = scheme.moe_scheme;
      MatrixTensors tensors{module, rows, cols, {view}};
      pending_.push_back({nullptr, std::move(tensors), &out, noted_.size()});
      stored.is_repacked = true;
      copied_bytes_ += options_.online->Bytes(rows, cols);
    }
  }
  stored.scheme = moe_scheme;
  noted_.push_back(std::move(stored));
  return moe_scheme;
}

void MatrixBinder::TakeScheme(const StorageScheme& scheme, const std::string& module, size_t rows,
                              size_t cols, WeightMatrix& out) {
  MatrixTensors tensors{module, rows, cols, {}};
  StoredMatrix stored{module, scheme.Describe(), {}, true, rows, cols, 0};
  stored.scheme = scheme.moe_scheme();
  stored.is_repacked = scheme.repacks();
  for (const StoredTensor& tensor : TensorsOf(scheme, module, rows, cols)) {
    const std::string name = TensorName(module, tensor.suffix);
    const std::optional<TensorKind> kind = source_.KindOf(name);
    source_.Tell(name, RoleOf(tensors.views.size(), tensor.suffix));
    if (!kind && !tensor.is_required) {
      tensors.views.push_back({nullptr, tensor.dtypes.front(), tensor.shapes.front()});
      continue;
    }
    const TensorView view = source_.Take(name, ShapeOnDisk(tensor, kind), tensor.dtypes);
    // Scales are checked when they are read, codes that may be NaN with the floats.
    if (tensors.views.empty() && !scheme.repacks()) source_.Use(name, view);
    tensors.views.push_back(view);
    stored.bytes += BytesOfShape(view.dtype, view.shape);
  }
  if (scheme.repacks()) copied_bytes_ += stored.bytes;
  stored.dtype = tensors.views[0].dtype;
  out = WeightMatrix::Dense(nullptr, tensors.views[0].dtype, rows, cols);  // until Load
  pending_.push_back({&scheme, std::move(tensors), &out, noted_.size()});
  noted_.push_back(std::move(stored));
}

MatrixBinder::Skipped MatrixBinder::Skip(const std::string& module, size_t rows, size_t cols) {
  const StorageScheme* scheme = SchemeOf(module, nullptr);
  if (scheme == nullptr) {
    const std::string name = TensorName(module, "weight");
    const std::optional<TensorKind> kind = source_.KindOf(name);
    source_.Skip(name, {rows, cols}, source_.matrix_dtypes());
    const bool online = options_.online != nullptr && (!kind || IsFloat(kind->dtype)) &&
                        options_.online->WhyNot(module, rows, cols).empty();
    if (online) return {options_.online->scheme().moe_scheme, {}};
    return {kind && IsGgmlBlock(kind->dtype) ? "gguf" : "unquant", {}};
  }
  Skipped skipped{scheme->moe_scheme(), {}};
  for (const StoredTensor& tensor : TensorsOf(*scheme, module, rows, cols)) {
    const std::string name = TensorName(module, tensor.suffix);
    const std::optional<TensorKind> kind = source_.KindOf(name);
    if (!kind && !tensor.is_required) continue;
    const Shape& shape = ShapeOnDisk(tensor, kind);
    if (tensor.suffix == scheme->act_scale()) {
      skipped.act_scale = source_.Take(name, shape, tensor.dtypes);
    } else {
      source_.Skip(name, shape, tensor.dtypes);
    }
  }
  return skipped;
}

WeightMatrix MatrixBinder::Make(const Pending& pending, WeightMemory& memory) const {
  const MatrixTensors& tensors = pending.tensors;
  if (pending.scheme != nullptr) return pending.scheme->Load(tensors, memory);
  return options_.online->Quantize(tensors.module, tensors.views[0], memory);
}

// What only the finished matrix says.
void MatrixBinder::Complete(const Pending& pending) {
  StoredMatrix& note = noted_[pending.note];
  if (options_.activation_quant) note.activations = pending.out->act.kind;
  if (pending.scheme == nullptr) return;  // the note is about the floats in the file
  const MatrixFormat& format = pending.out->format;
  note.dtype = format.dtype;
  note.block_rows = format.scale_rows;
  note.block_cols = format.scale_cols;
}

void MatrixBinder::Load() {
  if (options_.look_only) return LoadSamples();
  const auto load = [&](size_t i) {
    const Pending& pending = pending_[i];
    *pending.out = Make(pending, memory_);
    Complete(pending);
    if (!noted_[pending.note].is_repacked) return;
    for (const TensorView& view : pending.tensors.views) {
      if (view.data != nullptr) source_.Release(view);
    }
  };
  if (options_.pool != nullptr) {
    options_.pool->Run(pending_.size(), [&](size_t i, size_t) { load(i); });
  } else {
    for (size_t i = 0; i < pending_.size(); ++i) load(i);
  }
  pending_.clear();
}

void MatrixBinder::LoadSamples() {
  using Kind = std::tuple<const StorageScheme*, size_t, size_t, std::vector<DType>>;
  std::map<Kind, WeightMatrix> samples;
  std::map<Kind, std::string> errors;
  const auto kind_of = [](const Pending& pending) {
    std::vector<DType> dtypes;
    for (const TensorView& view : pending.tensors.views) {
      if (view.data != nullptr) dtypes.push_back(view.dtype);
    }
    return Kind(pending.scheme, pending.tensors.rows, pending.tensors.cols, std::move(dtypes));
  };
  // A damaged matrix does not hide what the others of its kind are.
  for (const Pending& pending : pending_) {
    const Kind kind = kind_of(pending);
    if (samples.contains(kind)) continue;
    try {
      samples.emplace(kind, Make(pending, memory_));
      errors.erase(kind);
    } catch (const Error& error) {
      errors.emplace(kind, error.what());
    }
  }
  if (!errors.empty()) throw Error(ErrorCode::kCorruptData, errors.begin()->second);
  for (const Pending& pending : pending_) {
    *pending.out = samples.at(kind_of(pending));
    Complete(pending);
  }
  pending_.clear();
}

std::vector<std::pair<std::string, std::string>> MatrixBinder::Verify() {
  std::vector<std::string> messages(pending_.size());
  const auto verify = [&](size_t i, size_t) {
    if (pending_[i].scheme == nullptr) return;
    WeightMemory memory;
    try {
      Make(pending_[i], memory);
    } catch (const Error& error) {
      messages[i] = error.what();
    }
  };
  if (options_.pool != nullptr) {
    options_.pool->Run(pending_.size(), verify);
  } else {
    for (size_t i = 0; i < pending_.size(); ++i) verify(i, 0);
  }
  std::vector<std::pair<std::string, std::string>> problems;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!messages[i].empty()) problems.emplace_back(pending_[i].tensors.module, messages[i]);
  }
  return problems;
}

}  // namespace switchyard
