// GGUF files: from a folder with names, layouts and metadata of llama.cpp's converter, from another
// GGUF file tensor by tensor.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

#include "model/convert/gguf_metadata.h"
#include "model/convert/plan.h"
#include "model/convert/target.h"
#include "model/gguf_config.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

using Kind = ModelPart::Kind;
using Product = ModelPart::Product;

// The version of the blocks' layouts. Source: GGML_QNT_VERSION of ggml.
constexpr uint32_t kQuantizationVersion = 2;

// A matrix that several units read: it is bound and loaded once.
class SharedMatrix {
 public:
  explicit SharedMatrix(std::function<std::unique_ptr<SourceMatrix>()> bind)
      : bind_(std::move(bind)) {}

  // By one thread at a time.
  SourceMatrix& Bind() {
    if (matrix_ == nullptr) matrix_ = bind_();
    return *matrix_;
  }
  void Load() {
    std::call_once(loaded_, [&] { matrix_->Load(); });
  }
  const SourceMatrix& matrix() const { return *matrix_; }

 private:
  std::function<std::unique_ptr<SourceMatrix>()> bind_;
  std::unique_ptr<SourceMatrix> matrix_;
  std::once_flag loaded_;
};

// A matrix whose rows are computed from those of another.
std::unique_ptr<SourceMatrix> Derived(const std::shared_ptr<SharedMatrix>& shared, size_t rows,
                                      size_t cols, SourceMatrix::Read read) {
  const SourceMatrix& from = shared->Bind();
  const size_t bytes =
      from.bytes() * (rows * cols) / std::max<size_t>(1, from.rows() * from.cols());
  auto matrix = std::make_unique<SourceMatrix>(rows, cols, from.format(), bytes);
  matrix->set_load([shared] { shared->Load(); });
  matrix->set_read(std::move(read));
  matrix->set_release([shared] { shared->matrix().Release(); });
  return matrix;
}

class Planner {
 public:
  Planner(ConvertSource& source, const QuantizeScheme& scheme)
      : source_(source), target_(GgufTargetOf(scheme.name)) {}

  ConvertPlan FromFolder(const QuantizeOptions& options, const std::string& model_name) {
    const ModelConfig& config = source_.config();
    architecture_ = GgufArchitectureOf(config);
    SetGgufConfig(config, writer_);
    writer_.SetText("general.name", model_name);
    SetFileType();
    if (options.add_tokenizer) {
      options.add_tokenizer(writer_, config.vocab_size);
    } else {
      plan_.warnings.push_back("the file has no tokenizer: token ids alone can be run");
    }
    for (const ModelPart& part : PartsOf(config)) Part(part);
    return std::move(plan_);
  }

  ConvertPlan FromGguf() {
    const GgufFile& metadata = source_.gguf()->metadata();
    for (const GgufEntry& entry : metadata.entries()) {
      const bool is_ours = entry.key == "general.file_type" ||
                           entry.key == "general.quantization_version" ||
                           entry.key.starts_with("split.");
      if (!is_ours) writer_.Copy(entry);
    }
    SetFileType();
    const bool is_tied = source_.config().tie_word_embeddings;
    for (const GgufModel::Tensor& tensor : source_.gguf()->tensors()) Copy(*tensor.info, is_tied);
    return std::move(plan_);
  }

  void LayOut(ConvertPlan& plan, const std::string& file_name) const {
    GgufWriter::Layout layout = writer_.Finish();
    for (size_t i = 0; i < plan.tensors.size(); ++i) plan.tensors[i].offset = layout.offsets[i];
    plan.files.push_back({file_name, std::move(layout.header), layout.file_bytes});
  }

 private:
  void SetFileType() {
    writer_.SetU32("general.file_type", target_.file_type);
    if (IsGgmlBlock(target_.dtype))
      writer_.SetU32("general.quantization_version", kQuantizationVersion);
  }

  size_t Tensor(const std::string& name, DType dtype, const Shape& shape) {
    writer_.AddTensor(name, dtype, shape);
    plan_.tensors.push_back({name, dtype, shape, 0, 0});
    return plan_.tensors.size() - 1;
  }

  std::string NameOf(const std::string& hub_name) const {
    const auto name = GgufTensorName(architecture_, hub_name);
    if (name) return *name;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("tensor \"{}\": GGUF files of {} have no place for it", hub_name,
                            architecture_));
  }

  GgufRole RoleOf(Kind kind) const {
    switch (kind) {
      case Kind::kEmbedding:
        return source_.config().tie_word_embeddings ? GgufRole::kTiedEmbedding
                                                    : GgufRole::kEmbedding;
      case Kind::kHead: return GgufRole::kOutput;
      case Kind::kExpert: return GgufRole::kExperts;
      case Kind::kRouter: return GgufRole::kRouter;
      case Kind::kLinear:
      case Kind::kLatentUp:
      case Kind::kVector:
      case Kind::kExpertBias: break;
    }
    return GgufRole::kOther;
  }

  void Part(const ModelPart& part) {
    switch (part.kind) {
      case Kind::kLatentUp: return LatentUp(part);
      case Kind::kVector: return Add(part, NameOf(part.module), DType::kF32, {}, Shape{part.cols});
      case Kind::kExpertBias:
        return Add(part, NameOf(part.module + ProductName(part.product) + "_bias"), DType::kF32, {},
                   Shape{part.rows, part.cols});
      case Kind::kExpert: return Expert(part);
      case Kind::kEmbedding:
      case Kind::kHead:
      case Kind::kLinear:
      case Kind::kRouter: break;
    }
    const GgufChoice choice = ChooseGgufType(target_, RoleOf(part.kind), part.cols);
    Add(part, NameOf(part.module + ".weight"), choice.dtype, choice.note,
        Shape{part.rows, part.cols});
    if (architecture_ == "llama") Interleave(part);
  }

  void Add(const ModelPart& part, const std::string& name, DType dtype, std::string note,
           const Shape& shape) {
    ConvertUnit unit;
    unit.name = name;
    unit.note = std::move(note);
    unit.rows = part.rows;
    unit.cols = part.cols;
    unit.bind = [this_source = &source_, part] { return this_source->Bind(part); };
    unit.encoding = plan_.EncodingOf(dtype);
    unit.tensors = {Tensor(name, dtype, shape)};
    plan_.units.push_back(std::move(unit));
  }

  // One tensor [E, rows, cols] for all experts.
  void Expert(const ModelPart& part) {
    const std::string name = NameOf(part.module + ProductName(part.product));
    const GgufChoice choice = ChooseGgufType(target_, GgufRole::kExperts, part.cols);
    if (part.expert == 0) {
      const size_t count = source_.config().num_experts;
      Add(part, name, choice.dtype, choice.note, Shape{count, part.rows, part.cols});
      return;
    }
    ConvertUnit unit = plan_.units.back();
    unit.bind = [this_source = &source_, part] { return this_source->Bind(part); };
    unit.place.first = part.expert * part.rows;
    plan_.units.push_back(std::move(unit));
  }

  // The rows of q and k of "llama" files: of each head, the two values that rotate together are
  // neighbours. Row 2 j + half of a head is row half * (dim / 2) + j of the checkpoint.
  void Interleave(const ModelPart& part) {
    if (!part.module.ends_with(".q_proj") && !part.module.ends_with(".k_proj")) return;
    const size_t dim = source_.config().head_dim;
    const auto shared = std::make_shared<SharedMatrix>(plan_.units.back().bind);
    plan_.units.back().bind = [shared, dim, rows = part.rows, cols = part.cols] {
      return Derived(shared, rows, cols,
                     [shared, dim, cols](size_t first, size_t count, float* out) {
                       for (size_t n = 0; n < count; ++n) {
                         const size_t head = (first + n) / dim, row = (first + n) % dim;
                         const size_t from = head * dim + row % 2 * (dim / 2) + row / 2;
                         shared->matrix().ReadRows(from, 1, out + n * cols);
                       }
                     });
    };
  }

  // kv_b_proj [heads * (nope + value), rank] as attn_k_b [heads, rank, nope], transposed, and
  // attn_v_b [heads, value, rank].
  void LatentUp(const ModelPart& part) {
    const LatentAttention& latent = *source_.config().latent;
    const size_t heads = source_.config().num_heads;
    const size_t nope = latent.nope_dim, value = latent.value_dim, rank = latent.kv_rank;
    const std::string prefix = part.module.substr(0, part.module.rfind('.') + 1);
    const auto shared = std::make_shared<SharedMatrix>(
        [this_source = &source_, part] { return this_source->Bind(part); });
    const auto add = [&](const char* hub, size_t rows, size_t cols, SourceMatrix::Read read) {
      const GgufChoice choice = ChooseGgufType(target_, GgufRole::kOther, cols);
      ModelPart half = part;
      half.rows = heads * rows;
      half.cols = cols;
      Add(half, NameOf(prefix + hub), choice.dtype, choice.note, Shape{heads, rows, cols});
      plan_.units.back().bind = [shared, half, read] {
        return Derived(shared, half.rows, half.cols, read);
      };
    };
    add("k_b_proj.weight", rank, nope, [=](size_t first, size_t count, float* out) {
      std::vector<float> head(nope * rank);
      size_t decoded = SIZE_MAX;
      for (size_t n = 0; n < count; ++n) {
        const size_t h = (first + n) / rank, row = (first + n) % rank;
        if (h != decoded) shared->matrix().ReadRows(h * (nope + value), nope, head.data());
        decoded = h;
        for (size_t k = 0; k < nope; ++k) out[n * nope + k] = head[k * rank + row];
      }
    });
    add("v_b_proj.weight", value, rank, [=](size_t first, size_t count, float* out) {
      for (size_t n = 0; n < count; ++n) {
        const size_t h = (first + n) / value, row = (first + n) % value;
        shared->matrix().ReadRows(h * (nope + value) + nope + row, 1, out + n * rank);
      }
    });
  }

  static GgufRole RoleOfTensor(std::string_view name, bool is_tied) {
    if (name == "token_embd.weight")
      return is_tied ? GgufRole::kTiedEmbedding : GgufRole::kEmbedding;
    if (name == "output.weight") return GgufRole::kOutput;
    if (name.ends_with("ffn_gate_inp.weight")) return GgufRole::kRouter;
    if (name.find("_exps.") != std::string_view::npos) return GgufRole::kExperts;
    // "blk.0.ffn_up.3.weight", of files of before April 2024.
    const std::string_view stem = name.substr(0, name.rfind('.'));
    const bool is_old_expert = !stem.empty() && stem.back() >= '0' && stem.back() <= '9';
    return is_old_expert ? GgufRole::kExperts : GgufRole::kOther;
  }

  // From another GGUF file: matrices in the new type, vectors and biases as they are.
  void Copy(const GgufTensorInfo& info, bool is_tied) {
    const std::string name(info.name);
    const size_t rank = info.shape.rank();
    const bool is_matrix = rank >= 2 && info.name.ends_with(".weight");
    GgufChoice choice{info.dtype, {}};
    const size_t cols = rank == 0 ? 1 : info.shape[rank - 1];
    if (is_matrix) choice = ChooseGgufType(target_, RoleOfTensor(info.name, is_tied), cols);
    size_t elements = 0;
    info.shape.NumElements(elements);
    ConvertUnit unit;
    unit.name = name;
    unit.note = choice.note;
    unit.cols = cols;
    unit.rows = cols == 0 ? 0 : elements / cols;
    unit.bind = [this_source = &source_, name] {
      return this_source->BindTensor(this_source->gguf()->Find(name)->View());
    };
    unit.encoding = plan_.EncodingOf(choice.dtype);
    unit.tensors = {Tensor(name, choice.dtype, info.shape)};
    plan_.units.push_back(std::move(unit));
  }

  ConvertSource& source_;
  GgufTarget target_;
  std::string_view architecture_;
  GgufWriter writer_;
  ConvertPlan plan_;
};

}  // namespace

ConvertPlan PlanGguf(ConvertSource& source, const QuantizeScheme& scheme,
                     const QuantizeOptions& options, const std::string& file_name) {
  Planner planner(source, scheme);
  const std::string model_name = file_name.substr(0, file_name.rfind('.'));
  ConvertPlan plan =
      source.gguf() != nullptr ? planner.FromGguf() : planner.FromFolder(options, model_name);
  planner.LayOut(plan, file_name);
  return plan;
}

}  // namespace switchyard
