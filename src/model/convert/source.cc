#include "model/convert/source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/convert/convert.h"
#include "model/gguf_config.h"
#include "model/gguf_source.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/error.h"
#include "switchyard/core/small_floats.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/model.h"

namespace switchyard {
namespace {

using Kind = ModelPart::Kind;
using Product = ModelPart::Product;

constexpr size_t kMxBlock = 32;

// A source whose matrices are not read: to prove that every tensor is there.
template <typename Source>
class WithoutData : public Source {
 public:
  using Source::Source;
  bool has_data() const override { return false; }
};

// Element (k, n) of a matrix that is stored transposed, `stride` elements from input to input.
struct Transposed {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  size_t stride = 0;
  size_t first = 0;  // column of output 0
  size_t step = 1;   // columns from output to output
};

// Reads rows of `cols` inputs: input by input, so that the file is read in its order.
SourceMatrix::Read TransposedReader(const Transposed& from, size_t cols) {
  return [from, cols](size_t first, size_t count, float* out) {
    const size_t begin = from.first + first * from.step;
    const size_t width = (count - 1) * from.step + 1;
    std::vector<float> line(width);
    for (size_t k = 0; k < cols; ++k) {
      kernels::ConvertToF32(from.data + (k * from.stride + begin) * DTypeBytes(from.dtype),
                            from.dtype, width, line.data());
      for (size_t n = 0; n < count; ++n) out[n * cols + k] = line[n * from.step];
    }
  };
}

}  // namespace

SourceMatrix::Read ReaderOf(const WeightMatrix& matrix) {
  if (!matrix.format.is_quantized() && IsFloat(matrix.dtype())) {
    return [matrix](size_t first, size_t count, float* out) {
      for (size_t n = 0; n < count; ++n)
        kernels::ConvertToF32(matrix.RowAt(first + n), matrix.dtype(), matrix.cols,
                              out + n * matrix.cols);
    };
  }
  return [matrix](size_t first, size_t count, float* out) {
    const ExpertMatrices bank = matrix.AsBank();
    for (size_t n = 0; n < count; ++n)
      quant::DecodeMatrixRow(bank, 0, first + n, out + n * matrix.cols);
  };
}

std::unique_ptr<ConvertSource> ConvertSource::Open(const std::filesystem::path& path) {
  std::unique_ptr<ConvertSource> source(new ConvertSource());
  source->files_ = path.extension() == ".gguf" ? OpenGgufFiles(path) : ModelFiles::OpenFolder(path);
  source->config_ = Model::ReadConfig(source->files_);
  if (IsGgufModel(*source->files_)) {
    source->gguf_ = std::make_unique<GgufModel>(GgufModel::Open(source->files_));
    source->source_ = std::make_unique<GgufSource>(*source->gguf_, *source->files_);
  } else {
    source->rules_ = ReadQuantization(*source->files_, {});
    source->checkpoint_ = std::make_unique<Checkpoint>(Checkpoint::Open(source->files_));
    source->source_ = std::make_unique<CheckpointSource>(*source->checkpoint_);
  }
  source->options_.rules = source->rules_.get();
  source->Prove();
  return source;
}

// Tensors are taken once: the proof has a source of its own.
void ConvertSource::Prove() const {
  if (gguf_ != nullptr) {
    WithoutData<GgufSource> source(*gguf_, *files_);
    BindWeights(config_, source, options_);
    return;
  }
  Checkpoint checkpoint = Checkpoint::Open(files_);
  WithoutData<CheckpointSource> source(checkpoint);
  BindWeights(config_, source, options_);
}

bool ConvertSource::is_quantized() const {
  if (rules_ != nullptr) return true;
  if (gguf_ == nullptr) return false;
  return std::ranges::any_of(gguf_->tensors(), [](const GgufModel::Tensor& tensor) {
    return IsGgmlBlock(tensor.info->dtype);
  });
}

// Checkpoints of transformers 5 call Mixtral's block "mlp" too.
std::string ConvertSource::BlockPrefix(const ModelPart& part) const {
  constexpr std::string_view kMixtral = ".block_sparse_moe.";
  const size_t at = part.module.find(kMixtral);
  if (at == std::string::npos || gguf_ != nullptr) return part.module;
  std::string other = part.module;
  other.replace(at, kMixtral.size(), ".mlp.");
  const std::string router = other.substr(0, at) + ".mlp.gate.weight";
  return source_->Has(router) ? other : part.module;
}

ConvertSource::Experts ConvertSource::ExpertsAt(const std::string& prefix) const {
  if (source_->Has(prefix + "gate_up_proj_blocks")) return Experts::kMxfp4;
  if (source_->Has(prefix + "gate_proj")) return Experts::kBanks;
  if (config_.experts_are_transposed) return Experts::kTransposed;
  if (source_->Has(prefix + "gate_up_proj")) return Experts::kStacked;
  return Experts::kSeparate;
}

// Module that stores a matrix of its own.
std::string ConvertSource::StoredModule(const ModelPart& part) const {
  std::string prefix = BlockPrefix(part);
  if (part.kind != Kind::kExpert) return prefix;
  ModelPart stored = part;
  stored.module = prefix;
  std::string module = ExpertModule(config_, stored);
  // By any tensor of it: the names of products are a family's, or those of all others.
  for (std::string_view suffix : {"weight", "qweight", "weight_packed"}) {
    if (source_->Has(fmt::format("{}.{}", module, suffix))) return module;
  }
  return fmt::format("{}{}.{}", prefix, part.expert, ProductName(part.product));
}

// As MatrixBinder decides: what lies there as plain floats is plain.
const StorageScheme* ConvertSource::SchemeOf(const std::string& module) const {
  if (rules_ == nullptr) return nullptr;
  const StorageScheme* scheme = rules_->SchemeOf(module);
  const auto plain = source_->KindOf(module + ".weight");
  return plain && IsFloat(plain->dtype) ? nullptr : scheme;
}

DType ConvertSource::KeptDType(const ModelPart& part) const {
  std::string name = part.module;
  if (part.is_matrix()) name = StoredModule(part) + ".weight";
  if (part.kind == Kind::kExpert) {
    const std::string prefix = BlockPrefix(part);
    const std::string product = ProductName(part.product);
    switch (ExpertsAt(prefix)) {
      case Experts::kSeparate: break;
      case Experts::kMxfp4: return DType::kBF16;
      case Experts::kBanks: name = prefix + product; break;
      case Experts::kStacked:
      case Experts::kTransposed:
        name = prefix + (part.product == Product::kDown ? "down_proj" : "gate_up_proj");
        break;
    }
  }
  const auto kind = source_->KindOf(name);
  return kind && IsFloat(kind->dtype) ? kind->dtype : DType::kBF16;
}

std::vector<std::string> ConvertSource::TensorNames(const ModelPart& part) const {
  if (part.kind == Kind::kVector) return {part.module};
  if (part.kind == Kind::kExpert || part.kind == Kind::kExpertBias) {
    const std::string prefix = BlockPrefix(part);
    const std::string bank =
        prefix + (part.product == Product::kDown ? "down_proj" : "gate_up_proj");
    if (part.kind == Kind::kExpertBias) return {bank + "_bias"};
    const Experts layout = ExpertsAt(prefix);
    if (layout == Experts::kMxfp4) return {bank + "_blocks", bank + "_scales"};
    if (layout != Experts::kSeparate) return {bank};
  }
  const std::string module = StoredModule(part);
  const StorageScheme* scheme = SchemeOf(module);
  if (scheme == nullptr) return {module + ".weight"};
  std::vector<std::string> names;
  for (const StoredTensor& tensor : scheme->Tensors(part.rows, part.cols)) {
    const std::string name = fmt::format("{}.{}", module, tensor.suffix);
    if (source_->Has(name)) names.push_back(name);
  }
  return names;
}

TensorView ConvertSource::Bank(const std::string& name) {
  const auto found = banks_.find(name);
  if (found != banks_.end()) return found->second;
  const auto kind = source_->KindOf(name);
  if (!kind) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: tensor \"{}\" is missing", files_->description(), name));
  }
  const DType allowed[] = {kind->dtype};
  return banks_[name] = source_->Take(name, kind->shape, allowed);
}

std::unique_ptr<SourceMatrix> ConvertSource::FromMatrix(const WeightMatrix& matrix,
                                                        std::string format, size_t bytes,
                                                        const TensorView& pages) const {
  auto part = std::make_unique<SourceMatrix>(matrix.rows, matrix.cols, std::move(format), bytes);
  part->set_read(ReaderOf(matrix));
  part->set_release([this, pages] { files_->Release({pages.data, pages.NumBytes()}); });
  return part;
}

std::unique_ptr<SourceMatrix> ConvertSource::BindTensor(const TensorView& view) const {
  const size_t cols = view.shape.rank() == 0 ? 1 : view.shape[view.shape.rank() - 1];
  const size_t elements = view.NumElements();
  const size_t rows = cols == 0 ? 0 : elements / cols;
  auto matrix = FromMatrix(WeightMatrix::Dense(view.data, view.dtype, rows, cols),
                           std::string(DTypeName(view.dtype)), view.NumBytes(), view);
  const size_t row_bytes = BytesOf(view.dtype, cols);
  matrix->set_release_rows([this, view, row_bytes](size_t first, size_t count) {
    files_->Release({view.data + first * row_bytes, count * row_bytes});
  });
  return matrix;
}

std::unique_ptr<SourceMatrix> ConvertSource::BindTensor(std::string_view folder_name) {
  return BindTensor(Bank(std::string(folder_name)));
}

// The binder of the engine, for one matrix.
std::unique_ptr<SourceMatrix> ConvertSource::BindModule(const std::string& module, size_t rows,
                                                        size_t cols) {
  struct Bound {
    Bound(TensorSource& source, const BindOptions& options) : binder(source, options) {}
    MatrixBinder binder;
    WeightMatrix matrix;
    std::vector<OwnedBytes> owned;
  };
  const auto bound = std::make_shared<Bound>(*source_, options_);
  bound->binder.Bind(module, rows, cols, MatrixBinder::Use::kOther, bound->matrix);
  const StoredMatrix& stored = bound->binder.notes().front();
  auto part = std::make_unique<SourceMatrix>(rows, cols, stored.format, stored.bytes);
  SourceMatrix* self = part.get();
  part->set_load([self, bound] {
    bound->binder.Load();
    bound->owned = bound->binder.TakeOwned();
    self->set_read([bound, read = ReaderOf(bound->matrix)](size_t first, size_t count, float* out) {
      read(first, count, out);
    });
  });
  part->set_release([this, bound] {
    const WeightMatrix& matrix = bound->matrix;
    if (matrix.rows == 0) return;
    files_->Release({matrix.data, matrix.rows * BytesOf(matrix.dtype(), matrix.cols)});
  });
  return part;
}

std::unique_ptr<SourceMatrix> ConvertSource::BindMxfp4(const ModelPart& part,
                                                       const std::string& prefix) {
  const bool down = part.product == Product::kDown;
  const std::string name = prefix + (down ? "down_proj" : "gate_up_proj");
  const TensorView blocks = Bank(name + "_blocks"), scales = Bank(name + "_scales");
  const size_t step = down ? 1 : 2;
  const size_t first = part.product == Product::kUp ? 1 : 0;
  const size_t groups = part.cols / kMxBlock;
  const size_t bank_rows = part.rows * step;
  WeightMatrix matrix =
      WeightMatrix::Dense(blocks.data + (part.expert * bank_rows + first) * part.cols / 2,
                          DType::kF4E2M1, part.rows, part.cols);
  matrix.stride = step * part.cols;
  matrix.format.scale_dtype = DType::kF8E8M0;
  matrix.format.scale_rows = 1;
  matrix.format.scale_cols = kMxBlock;
  matrix.scale = scales.data + (part.expert * bank_rows + first) * groups;
  matrix.scale_stride = step * groups;
  const TensorView pages{blocks.data + part.expert * bank_rows * part.cols / 2, DType::kU8,
                         Shape{bank_rows, part.cols / 2}};
  return FromMatrix(matrix, "F4_E2M1, a scale per 32 inputs",
                    part.rows * groups * (kMxBlock / 2 + 1), pages);
}

std::unique_ptr<SourceMatrix> ConvertSource::BindExpert(const ModelPart& part) {
  const std::string prefix = BlockPrefix(part);
  const Experts layout = ExpertsAt(prefix);
  if (layout == Experts::kSeparate) return BindModule(StoredModule(part), part.rows, part.cols);
  if (layout == Experts::kMxfp4) return BindMxfp4(part, prefix);
  const bool down = part.product == Product::kDown;
  const bool is_up = part.product == Product::kUp;
  if (layout == Experts::kBanks) {
    const TensorView bank = Bank(prefix + ProductName(part.product));
    const size_t bytes = part.rows * BytesOf(bank.dtype, part.cols);
    const TensorView view{bank.data + part.expert * bytes, bank.dtype, Shape{part.rows, part.cols}};
    return BindTensor(view);
  }
  const TensorView bank = Bank(prefix + (down ? "down_proj" : "gate_up_proj"));
  const size_t matrix_elements = part.rows * part.cols * (down ? 1 : 2);
  const size_t element = DTypeBytes(bank.dtype);
  const TensorView pages{bank.data + part.expert * matrix_elements * element, bank.dtype,
                         Shape{matrix_elements}};
  const size_t bytes = part.rows * part.cols * element;
  const std::string format(DTypeName(bank.dtype));
  if (layout == Experts::kStacked) {
    return FromMatrix(
        WeightMatrix::Dense(pages.data + (is_up ? bytes : 0), bank.dtype, part.rows, part.cols),
        format, bytes, pages);
  }
  auto matrix = std::make_unique<SourceMatrix>(part.rows, part.cols, format, bytes);
  const size_t step = down ? 1 : 2;
  matrix->set_read(TransposedReader(
      {pages.data, bank.dtype, part.rows * step, is_up ? size_t{1} : size_t{0}, step}, part.cols));
  matrix->set_release([this, pages] { files_->Release({pages.data, pages.NumBytes()}); });
  return matrix;
}

// [E, rows]; gate and up lie in turn in hub checkpoints.
std::unique_ptr<SourceMatrix> ConvertSource::BindBias(const ModelPart& part) {
  const std::string prefix = BlockPrefix(part);
  if (gguf_ != nullptr) return BindTensor(Bank(prefix + ProductName(part.product) + "_bias"));
  const bool down = part.product == Product::kDown;
  const TensorView bank = Bank(prefix + (down ? "down_proj_bias" : "gate_up_proj_bias"));
  if (down) return BindTensor(bank);
  const size_t first = part.product == Product::kUp ? 1 : 0;
  auto bias = std::make_unique<SourceMatrix>(
      part.rows, part.cols, std::string(DTypeName(bank.dtype)), bank.NumBytes() / 2);
  bias->set_read([bank, first, cols = part.cols](size_t row, size_t count, float* out) {
    std::vector<float> both(2 * cols);
    for (size_t n = 0; n < count; ++n) {
      kernels::ConvertToF32(bank.data + (row + n) * 2 * cols * DTypeBytes(bank.dtype), bank.dtype,
                            2 * cols, both.data());
      for (size_t i = 0; i < cols; ++i) out[n * cols + i] = both[2 * i + first];
    }
  });
  return bias;
}

// kv_b_proj of a GGUF file that keeps its halves apart.
std::unique_ptr<SourceMatrix> ConvertSource::BindJoinedLatent(const ModelPart& part) {
  const std::string prefix = part.module.substr(0, part.module.rfind('.') + 1);
  const TensorView keys = Bank(prefix + "k_b_proj.weight");
  const TensorView values = Bank(prefix + "v_b_proj.weight");
  const size_t nope = config_.latent->nope_dim, value = config_.latent->value_dim;
  const size_t rank = config_.latent->kv_rank;
  auto joined =
      std::make_unique<SourceMatrix>(part.rows, part.cols, std::string(DTypeName(keys.dtype)),
                                     keys.NumBytes() + values.NumBytes());
  joined->set_read(
      [=, key_matrix = WeightMatrix::Dense(keys.data, keys.dtype, keys.NumElements() / nope, nope),
       value_matrix = WeightMatrix::Dense(values.data, values.dtype, values.NumElements() / rank,
                                          rank)](size_t first, size_t count, float* out) {
        std::vector<float> head(rank * nope);
        size_t decoded = SIZE_MAX;
        for (size_t n = 0; n < count; ++n) {
          const size_t h = (first + n) / (nope + value), row = (first + n) % (nope + value);
          if (row >= nope) {
            ReaderOf(value_matrix)(h * value + row - nope, 1, out + n * rank);
            continue;
          }
          if (decoded != h) ReaderOf(key_matrix)(h * rank, rank, head.data());
          decoded = h;
          for (size_t k = 0; k < rank; ++k) out[n * rank + k] = head[k * nope + row];
        }
      });
  return joined;
}

// Files of "llama" have the rows of q and k in another order: of each head, values that rotate
// together are neighbours.
bool ConvertSource::IsInterleaved(const ModelPart& part) const {
  return gguf_ != nullptr && config_.architecture == "mixtral" &&
         (part.module.ends_with(".q_proj") || part.module.ends_with(".k_proj"));
}

// The rows in the order of hub checkpoints.
std::unique_ptr<SourceMatrix> ConvertSource::BindInterleaved(const ModelPart& part) {
  const std::shared_ptr<SourceMatrix> stored = BindModule(part.module, part.rows, part.cols);
  auto matrix =
      std::make_unique<SourceMatrix>(part.rows, part.cols, stored->format(), stored->bytes());
  matrix->set_load([stored] { stored->Load(); });
  matrix->set_read(
      [stored, dim = config_.head_dim, cols = part.cols](size_t first, size_t count, float* out) {
        for (size_t n = 0; n < count; ++n) {
          const size_t head = (first + n) / dim, row = (first + n) % dim;
          const size_t from = head * dim + row % (dim / 2) * 2 + row / (dim / 2);
          stored->ReadRows(from, 1, out + n * cols);
        }
      });
  matrix->set_release([stored] { stored->Release(); });
  return matrix;
}

std::unique_ptr<SourceMatrix> ConvertSource::Bind(const ModelPart& part) {
  if (IsInterleaved(part)) return BindInterleaved(part);
  switch (part.kind) {
    case Kind::kExpert: return BindExpert(part);
    case Kind::kExpertBias: return BindBias(part);
    case Kind::kVector: {
      const std::string name = BlockPrefix(part);
      return BindTensor(Bank(name));
    }
    case Kind::kLatentUp:
      if (!source_->Has(part.module + ".weight") && SchemeOf(part.module) == nullptr)
        return BindJoinedLatent(part);
      break;
    case Kind::kEmbedding:
    case Kind::kHead:
    case Kind::kLinear:
    case Kind::kRouter: break;
  }
  return BindModule(StoredModule(part), part.rows, part.cols);
}

}  // namespace switchyard
