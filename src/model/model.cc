#include "switchyard/model/model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "kernels/activations/activations.h"
#include "kernels/convert/convert.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "model/architectures/architecture.h"
#include "model/attention.h"
#include "model/expert_placer.h"
#include "model/gguf_config.h"
#include "model/gguf_source.h"
#include "model/latent_attention.h"
#include "model/load_scan.h"
#include "model/quantization/online.h"
#include "model/quantization/quantization.h"
#include "model/random_scheme.h"
#include "model/random_source.h"
#include "model/stage_work.h"
#include "model/tensor_parallel.h"
#include "model/value_scan.h"
#include "model/weight_packer.h"
#include "model/weights.h"
#include "quant/expert_matmul.h"
#include "quant/linear.h"
#include "quant/matrix.h"
#include "quant/panel_matmul.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/memory.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/gguf.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/moe/layer/register_builtins.h"

namespace switchyard {
namespace {

// Few, so that the rows of a batch of answers are spread over the threads too.
constexpr size_t kTokensPerTask = 4;

// Calls body(token) for all tokens, some to a task.
template <typename Body>
void ForEachToken(ExecContext& context, size_t num_tokens, const Body& body) {
  context.pool.Run((num_tokens + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (size_t t = task * kTokensPerTask; t < end; ++t) body(t);
  });
}

Rows Normalize(ExecContext& context, ConstRows x, const std::vector<float>& weight, double eps) {
  const StageTimer timer(context.profile, Stage::kNorm);
  const Rows out = context.arena.AllocateRows(x.rows, x.cols);
  ForEachToken(context, x.rows, [&](size_t t) {
    kernels::RmsNorm(x.Row(t), weight.data(), x.cols, static_cast<float>(eps), out.Row(t));
  });
  return out;
}

void AddRows(ExecContext& context, ConstRows x, Rows out) {
  const StageTimer timer(context.profile, Stage::kNorm);
  ForEachToken(context, x.rows, [&](size_t t) { kernels::AddTo(x.Row(t), x.cols, out.Row(t)); });
}

const float* DataOrNull(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

bool IsElastic(const ModelOptions& options) {
  return options.moe.a2a == "mooncake" || options.moe.a2a == "nixl";
}

// Columns of the products outside the experts that are computed together.
size_t WidestProducts(const ModelConfig& config) {
  size_t widest = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
  if (config.latent) {
    const size_t heads = config.num_heads * std::max(config.head_dim, config.latent->value_dim);
    widest = heads + config.latent->q_rank + config.kv_shape().key_dim;
  }
  return std::max({widest, config.hidden_size, 2 * config.dense_intermediate_size,
                   2 * config.shared_intermediate_size, config.vocab_size});
}

// All matrices that a token's attention multiplies with.
std::vector<const WeightMatrix*> MatricesOf(const AttentionWeights& attention) {
  std::vector<const WeightMatrix*> matrices;
  for (const WeightMatrix* matrix :
       {&attention.q_a, &attention.q, &attention.k, &attention.v, &attention.kv_a, &attention.o}) {
    if (matrix->rows != 0) matrices.push_back(matrix);
  }
  for (const WeightMatrix& matrix : attention.key_up) matrices.push_back(&matrix);
  for (const WeightMatrix& matrix : attention.value_up) matrices.push_back(&matrix);
  return matrices;
}

size_t DenseBytes(const DenseMlpWeights& dense) {
  return MatrixBytes(dense.gate) + MatrixBytes(dense.up) + MatrixBytes(dense.down);
}

}  // namespace

std::vector<KvGroup> PlanKvGroups(const ModelConfig& config) {
  std::vector<KvGroup> groups;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const size_t window = config.layers[i].window;
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const KvGroup& g) { return g.window == window; });
    if (group == groups.end()) group = groups.insert(groups.end(), KvGroup{window, {}});
    group->layers.push_back(i);
  }
  return groups;
}

// Owns the bytes (mapped files or memory), the bound weights and the MoE layers.
struct Model::Impl {
  ModelConfig config;
  ModelOptions options;
  std::shared_ptr<const ModelFiles> files;      // null of a random model
  std::unique_ptr<Checkpoint> checkpoint;       // of a model in safetensors files
  std::unique_ptr<GgufModel> gguf;              // of one in GGUF files
  std::shared_ptr<MappedMemory> random_memory;  // of a random one
  std::shared_ptr<const MappedMemory> panels;   // weights that were repacked
  size_t random_bytes = 0;                      // that a checkpoint of it would have
  TransformerWeights weights;
  std::optional<ExpertPlacer> placer;
  std::optional<TensorParallel> tensor_parallel;
  std::vector<std::unique_ptr<moe::MoeLayer>> moe_layers;  // one per layer, nullptr for dense ones
  std::vector<size_t> moe_index;                           // of each layer among the MoE layers
  std::vector<float> frequencies;  // of rope kinds that are the same for all sequences
  std::unique_ptr<LoadScan> scan;  // until FinishScan; null if values are not checked
  std::vector<std::string> bad_tensors;
  std::vector<FileTensor> tensors;  // of look_only
  Verification verification;        // of verify

  void Open(std::shared_ptr<const ModelFiles> opened, ThreadPool& pool);
  template <typename Source>
  void LookAt(const Source& source, ThreadPool& pool);
  void AddProblems(const std::vector<std::pair<std::string, std::string>>& refused);
  template <typename Source>
  void Bind(Source& source, const QuantizationRules* rules, ThreadPool& pool);
  void MakeUp(const RandomScheme& scheme, ThreadPool& pool);
  uint64_t Fingerprint() const;
  void Pack(ThreadPool& pool);
  void FinishScan(ThreadPool& pool);
  void Build();
  void BuildOrNote();
  ComputePlan PlanExperts(size_t layer, const moe::ExpertBank& bank,
                          std::string_view scheme_name) const;
  DType ActFor(const WeightMatrix& weight) const {
    return quant::ResolveActDType(options.moe.act_dtype, options.moe.fast_activations,
                                  weight.format, weight.cols);
  }
  quant::LinearJob Job(const WeightMatrix& weight, const std::vector<float>& bias, Rows out) const {
    return {weight, DataOrNull(bias), out, ActFor(weight)};
  }

  Rows Embed(ExecContext& context, std::span<const SequenceChunk> chunks) const;
  void RunAttention(ExecContext& context, std::span<const SequenceChunk> chunks,
                    const KvView& cache, size_t index, const RopeTable& rope, Rows x);
  Rows AttendHeads(ExecContext& context, std::span<const SequenceChunk> chunks, const KvView& cache,
                   size_t index, const RopeTable& rope, ConstRows x);
  void RotateAndNormalize(ExecContext& context, const AttentionWeights& attention,
                          const RopeTable& rope, Rows q, Rows k, Rows v) const;
  Rows RunDense(ExecContext& context, size_t index, ConstRows x);
  Rows RunMoe(ExecContext& context, size_t index, ConstRows x, ForwardObserver* observer);
  void ServeOthers(ExecContext& context);
  Rows Forward(ExecContext& context, std::span<const SequenceChunk> chunks, const KvView& cache,
               ForwardObserver* observer);
  Rows Head(ExecContext& context, std::span<const SequenceChunk> chunks, ConstRows x);
};

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

ModelConfig Model::ReadConfig(const std::shared_ptr<const ModelFiles>& shared) {
  const ModelFiles& files = *shared;
  if (IsGgufModel(files)) return ReadGgufConfig(GgufModel::Open(shared));
  return ParseModelConfig(
      ConfigReader::Parse(files.PathOf("config.json"), files.ReadText("config.json")));
}

namespace {

// FNV-1a.
class Hash {
 public:
  void Add(const void* data, size_t bytes) {
    const auto* byte = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ byte[i]) * 0x100000001b3u;
  }
  void AddNumber(uint64_t number) { Add(&number, sizeof(number)); }
  // The first row of a matrix.
  void AddRow(const WeightMatrix& matrix) {
    AddNumber(static_cast<uint64_t>(matrix.dtype()));
    Add(matrix.RowAt(0), BytesOf(matrix.dtype(), matrix.cols));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Runs body on every rank, and fails everywhere if it fails on one.
void OnAllRanks(const moe::ExpertParallel* ep, const std::function<void()>& body) {
  if (ep == nullptr) return body();
  RunTogether(ep->groups().tp(), Deadline::Never("load the model"), body);
}

// The same name may stand for different files on different hosts.
void RequireSameModel(const moe::ExpertParallel* ep, uint64_t fingerprint) {
  if (ep == nullptr) return;
  ProcessGroup& ranks = ep->groups().tp();
  const auto all = AllGatherValue(ranks, fingerprint, Deadline::Never("compare the models"));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("rank {} has another model than rank {}: give all ranks the same "
                            "checkpoint",
                            ranks.WorldRank(rank), ranks.WorldRank(0)));
  }
}

}  // namespace

// Of the config, the sizes and some of the weights that every rank has.
uint64_t Model::Impl::Fingerprint() const {
  Hash hash;
  hash.Add(config.architecture.data(), config.architecture.size());
  for (size_t number : {config.vocab_size, config.hidden_size, config.num_heads,
                        config.num_kv_heads, config.head_dim, config.num_experts, config.top_k,
                        config.moe_intermediate_size, config.layers.size()})
    hash.AddNumber(number);
  hash.AddRow(weights.embedding);
  hash.AddRow(weights.head);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    hash.AddRow(weights.layers[i].attention.q);
    if (config.layers[i].is_moe) hash.AddRow(weights.layers[i].router);
  }
  return hash.value();
}

std::unique_ptr<Model> Model::Load(std::shared_ptr<const ModelFiles> files,
                                   const ModelOptions& options, ThreadPool& pool) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  OnAllRanks(options.moe.ep, [&] { impl->Open(std::move(files), pool); });
  if (options.look_only) {
    impl->BuildOrNote();
  } else {
    RequireSameModel(options.moe.ep, impl->Fingerprint());
    OnAllRanks(options.moe.ep, [&] {
      impl->Pack(pool);
      impl->FinishScan(pool);
    });
    impl->Build();
  }
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

namespace {

// Runs body; errors that do not begin with the name of the model do so afterwards.
template <typename Body>
void Naming(const std::string& model, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.message().starts_with(model)) throw;
    throw Error(error.code(), fmt::format("{}: {}", model, error.message()));
  }
}

// A source that remembers every view that the model reads and that may hold NaN, for the scan.
template <typename Source>
class Recorder : public Source {
 public:
  using Source::Source;
  void Use(std::string_view name, const TensorView& part) override {
    if (!IsFloat(part.dtype) && part.dtype != DType::kF8E4M3 && !IsGgmlBlock(part.dtype)) return;
    views.push_back(part);
    names.emplace_back(name);
  }
  void Tell(std::string_view name, TensorRole role) override {
    if (is_looking) roles[this->FileName(name)] = {role, std::string(name)};
  }
  std::vector<TensorView> views;
  std::vector<std::string> names;
  bool is_looking = false;
  std::map<std::string, std::pair<TensorRole, std::string>, std::less<>> roles;  // by file name
};

}  // namespace

// Reads what is this rank's; nothing of it needs the others.
void Model::Impl::Open(std::shared_ptr<const ModelFiles> opened, ThreadPool& pool) {
  files = std::move(opened);
  if (IsGgufModel(*files)) {
    gguf = std::make_unique<GgufModel>(GgufModel::Open(files));
    config = ReadGgufConfig(*gguf);
    placer.emplace(config, options);
    Recorder<GgufSource> source(*gguf, *files);
    Naming(files->description(), [&] { Bind(source, nullptr, pool); });
    return;
  }
  config = ReadConfig(files);
  const std::unique_ptr<QuantizationRules> rules =
      ReadQuantization(*files, {options.w4a4_new_packing});
  const std::string& folder = files->description();
  checkpoint = std::make_unique<Checkpoint>(Checkpoint::Open(files));
  placer.emplace(config, options);
  Recorder<CheckpointSource> source(*checkpoint);
  Naming(folder, [&] { Bind(source, rules.get(), pool); });
}

template <typename Source>
void Model::Impl::Bind(Source& source, const QuantizationRules* rules, ThreadPool& pool) {
  BindOptions bind;
  bind.share = placer->Share();
  bind.rules = rules;
  bind.activation_quant = options.moe.activation_quant;
  bind.pool = &pool;
  bind.look_only = source.is_looking = options.look_only;
  bind.verify = options.look_only && options.verify;
  std::optional<OnlineQuantization> online;
  if (!options.quantize.empty()) bind.online = &online.emplace(options.quantize);
  // The scan of what is quantised on loading comes with it.
  weights = BindWeights(config, source, bind);
  if (options.look_only) return LookAt(source, pool);
  if (!options.check_values || bind.online != nullptr) return;
  scan = std::make_unique<LoadScan>(std::move(source.views), std::move(source.names));
}

// Lists the tensors with what the model does with each, and checks what they hold.
template <typename Source>
void Model::Impl::LookAt(const Source& source, ThreadPool& pool) {
  std::vector<LocatedTensor> located = source.List();
  for (LocatedTensor& tensor : located) {
    const auto found = source.roles.find(tensor.info.name);
    if (found == source.roles.end()) continue;
    tensor.info.role = found->second.first;
    tensor.info.use = found->second.second;
  }
  if (options.verify) verification = ScanTensors(located, pool);
  for (LocatedTensor& tensor : located) tensors.push_back(std::move(tensor.info));
  if (!options.verify) return;
  AddProblems(weights.problems);
  if (gguf == nullptr) return;
  for (const GgufFile& part : gguf->parts()) {
    for (std::span<const std::byte> gap : part.padding()) {
      const auto found = std::ranges::find_if(gap, [](std::byte b) { return b != std::byte{0}; });
      if (found == gap.end()) continue;
      verification.remarks.push_back(fmt::format(
          "{}: {} bytes of padding are not all 0, the first at {}: {}", part.file_name(),
          gap.size(), found - gap.begin(), std::to_integer<int>(*found)));
    }
  }
}

// A scheme refuses with its first reason what the scan may have described already.
void Model::Impl::AddProblems(const std::vector<std::pair<std::string, std::string>>& refused) {
  for (const auto& [module, message] : refused) {
    const std::string prefix = module + ".";
    const auto file = std::ranges::find_if(
        tensors, [&](const FileTensor& tensor) { return tensor.name.starts_with(prefix); });
    const std::string start =
        file == tensors.end() ? std::string() : fmt::format("{}: ", file->file);
    const bool is_known = std::ranges::any_of(
        verification.problems,
        [&](const std::string& problem) { return problem.starts_with(start + prefix); });
    if (!is_known) verification.problems.push_back(start + message);
  }
}

// A model whose values are bad can be looked at all the same.
void Model::Impl::BuildOrNote() {
  std::string error = weights.load_error;
  if (error.empty()) {
    try {
      return Build();
    } catch (const Error& caught) {
      if (!options.verify) throw;
      error = caught.what();
    }
  }
  moe_layers.clear();
  moe_layers.resize(config.layers.size());
  weights.load_error = error;
  if (verification.problems.empty()) verification.problems.push_back(error);
}

std::unique_ptr<Model> Model::Random(const ModelConfig& config, std::string_view scheme_name,
                                     const ModelOptions& options, ThreadPool& pool) {
  const RandomScheme& scheme = FindRandomScheme(scheme_name);
  auto impl = std::make_unique<Impl>();
  impl->config = ConfigFor(scheme, config);
  impl->options = options;
  OnAllRanks(options.moe.ep, [&] { impl->MakeUp(scheme, pool); });
  RequireSameModel(options.moe.ep, impl->Fingerprint());
  OnAllRanks(options.moe.ep, [&] { impl->Pack(pool); });
  impl->Build();
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

void Model::Impl::MakeUp(const RandomScheme& scheme, ThreadPool& pool) {
  placer.emplace(config, options);
  const std::unique_ptr<QuantizationRules> rules = RulesFor(scheme, config);
  BindOptions bind;
  bind.share = placer->Share();
  bind.rules = rules.get();
  bind.activation_quant = options.moe.activation_quant;
  bind.pool = &pool;
  RandomSource count(scheme, config);
  const size_t copied = BindWeights(config, count, bind).owned_bytes;
  const size_t needed = count.memory_bytes() + copied;
  if (const size_t available = AvailableBytes(); available != 0 && needed > available) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("random weights of this shape take {} bytes, {} are available", needed,
                            available));
  }
  RandomSource source(scheme, config, count.memory_bytes(), pool);
  weights = BindWeights(config, source, bind);
  random_memory = source.memory();
  random_bytes = source.tensor_bytes();
}

// Weights in the layout in which products read them, in place of that of the files.
void Model::Impl::Pack(ThreadPool& pool) {
  if (!options.repack) return;
  const auto is_random = [this](const std::byte* data) {
    return random_memory != nullptr && data >= random_memory->data() &&
           data < random_memory->data() + random_memory->size();
  };
  const auto release = [&](const std::byte* data, size_t bytes) {
    if (is_random(data)) {
      random_memory->Release(static_cast<size_t>(data - random_memory->data()), bytes);
    } else if (files != nullptr) {
      files->Release({data, bytes});
    }
  };
  const auto prepare = [&](const std::byte* data, size_t bytes) {
    if (scan != nullptr) scan->ScanBefore(data, bytes);
  };
  // What is random goes while it is packed; pages of files count as available.
  size_t available = AvailableBytes();
  if (available != 0 && random_memory != nullptr) available += random_memory->size();
  panels = PackWeights(weights, pool, {prepare, release}, available);
}

// Warns of values that no intact weight has, in what is packed and in the rest.
void Model::Impl::FinishScan(ThreadPool& pool) {
  if (scan == nullptr) return;
  bad_tensors = scan->Finish(pool);
  scan.reset();
  constexpr size_t kShown = 5;
  const std::vector<std::string>& bad = bad_tensors;
  for (size_t i = 0; i < std::min(kShown, bad.size()); ++i) Log(LogLevel::kWarning, bad[i]);
  if (bad.size() > kShown) {
    Log(LogLevel::kWarning,
        fmt::format("{} more tensors hold NaN or infinity", bad.size() - kShown));
  }
}

void Model::Impl::Build() {
  if (!FrequenciesDependOnSequence(config.rope))
    frequencies = InverseFrequencies(config.rope, config.max_positions);
  ActFor(weights.head);  // refuses an act dtype that no kernel has
  moe_layers.resize(config.layers.size());
  moe_index.resize(config.layers.size());
  size_t num_moe = 0;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (!config.layers[i].is_moe) continue;
    moe_index[i] = num_moe++;
    moe::MoeLayerConfig layer;
    layer.topk.num_experts = config.num_experts;
    layer.topk.top_k = config.top_k;
    layer.topk.scoring_func = config.scoring_func;
    layer.topk.policy = config.routing;
    layer.topk.renormalize = config.renormalize;
    layer.topk.correction_bias = weights.layers[i].router_correction_bias;
    layer.topk.use_grouped_topk = config.num_expert_groups > 1;
    if (layer.topk.use_grouped_topk) {
      layer.topk.num_expert_group = config.num_expert_groups;
      layer.topk.topk_group = config.top_k_groups;
    }
    // In the weights, where every backend finds it.
    layer.topk.routed_scaling_factor = config.routed_scaling_factor;
    layer.topk.apply_routed_scaling_factor_on_output = config.routed_scaling_factor != 1.0;
    layer.scheme_w13 = weights.layers[i].scheme_w13;
    layer.scheme_w2 = weights.layers[i].scheme_w2;
    layer.runner.layer_id = i;
    layer.runner.activation = config.activation;
    layer.runner.gemm1_alpha = config.activation_alpha;
    layer.runner.gemm1_clamp_limit = config.activation_limit;
    layer.num_physical_experts = placer->location().sizes().num_physical;
    moe_layers[i] = std::make_unique<moe::MoeLayer>(moe::BuiltinRegistry(), layer, options.moe,
                                                    std::move(weights.layers[i].experts));
  }
  std::vector<moe::ExpertWeights*> layers;
  for (const auto& layer : moe_layers) {
    if (layer != nullptr) layers.push_back(&layer->mutable_weights());
  }
  placer->Attach(std::move(layers));
  // An elastic exchange goes on without ranks that are lost, a gather of columns could not.
  const bool is_shared = options.moe.ep != nullptr &&
                         options.moe.ep->options().tokens_are_replicated && !IsElastic(options);
  tensor_parallel.emplace(is_shared ? options.moe.ep : nullptr, WidestProducts(config));
}

namespace {

void CheckToken(const ModelConfig& config, int32_t id, size_t position) {
  if (id >= 0 && static_cast<size_t>(id) < config.vocab_size) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("token {} at position {} is outside the vocabulary of {} entries", id,
                          position, config.vocab_size));
}

}  // namespace

Rows Model::Impl::Embed(ExecContext& context, std::span<const SequenceChunk> chunks) const {
  const StageTimer timer(context.profile, Stage::kEmbedding);
  size_t num_tokens = 0;
  for (const SequenceChunk& chunk : chunks) num_tokens += chunk.tokens.size();
  const Rows x = context.arena.AllocateRows(num_tokens, config.hidden_size);
  size_t row = 0;
  for (const SequenceChunk& chunk : chunks) {
    for (size_t t = 0; t < chunk.tokens.size(); ++t) {
      const int32_t id = chunk.tokens[t];
      switchyard::CheckToken(config, id, chunk.position + t);
      quant::DecodeMatrixRow(weights.embedding.AsBank(), 0, static_cast<size_t>(id), x.Row(row++));
    }
  }
  return x;
}

void Model::Impl::RotateAndNormalize(ExecContext& context, const AttentionWeights& attention,
                                     const RopeTable& rope, Rows q, Rows k, Rows v) const {
  const size_t dim = config.head_dim;
  const auto eps = static_cast<float>(config.norm_eps);
  const auto rotate = config.rope.interleaved ? kernels::RotatePairs : kernels::RotateHalves;
  const auto prepare = [&](float* row, size_t size, const std::vector<float>& norm, size_t token) {
    if (config.qk_norm == QkNorm::kFull) kernels::RmsNorm(row, norm.data(), size, eps, row);
    if (config.clip_qkv) kernels::Clamp(row, static_cast<float>(*config.clip_qkv), size);
    for (size_t at = 0; at < size; at += dim) {
      if (config.qk_norm == QkNorm::kPerHead)
        kernels::RmsNorm(row + at, norm.data(), dim, eps, row + at);
      rotate(row + at, rope.cos.Row(token), rope.sin.Row(token), config.rope.rotary_dim / 2);
    }
  };
  ForEachToken(context, q.rows, [&](size_t t) {
    prepare(q.Row(t), q.cols, attention.q_norm, t);
    prepare(k.Row(t), k.cols, attention.k_norm, t);
    if (config.clip_qkv) kernels::Clamp(v.Row(t), static_cast<float>(*config.clip_qkv), v.cols);
  });
}

// What the heads see, before the projection o. Shapes: x normalised; returns [T, heads * D].
Rows Model::Impl::AttendHeads(ExecContext& context, std::span<const SequenceChunk> chunks,
                              const KvView& cache, size_t index, const RopeTable& rope,
                              ConstRows x) {
  const AttentionWeights& attention = weights.layers[index].attention;
  const Rows q = context.arena.AllocateRows(x.rows, attention.q.rows);
  const Rows k = context.arena.AllocateRows(x.rows, attention.k.rows);
  const Rows v = context.arena.AllocateRows(x.rows, attention.v.rows);
  const quant::LinearJob jobs[] = {Job(attention.q, attention.q_bias, q),
                                   Job(attention.k, attention.k_bias, k),
                                   Job(attention.v, attention.v_bias, v)};
  {
    const StageTimer timer(context.profile, Stage::kQkv, [&] { return WorkOf(jobs, x.rows); });
    tensor_parallel->RunLinears(context, x, jobs, index);
  }
  {
    const StageTimer timer(context.profile, Stage::kRope);
    RotateAndNormalize(context, attention, rope, q, k, v);
    StoreKeysAndValues(context, config, chunks, cache, index, k, v);
  }
  const Rows attended = context.arena.AllocateRows(x.rows, attention.q.rows);
  const TensorParallel::Slice mine = tensor_parallel->MySlice(config.num_kv_heads);
  QueryHeads heads{mine.first, mine.count, config.num_heads / config.num_kv_heads};
  if (!attention.sinks.empty()) heads.sinks = attention.sinks.data() + heads.first * heads.group;
  // The columns of the own heads.
  const size_t width = heads.group * config.head_dim;
  const auto own = [&](const Rows& rows) {
    return Rows(rows.data + heads.first * width, rows.rows, heads.count * width, rows.stride);
  };
  const StageTimer timer(context.profile, Stage::kAttention,
                         [&] { return AttentionWork(config, chunks, cache, index, heads); });
  const DType act = ActFor(attention.q) == DType::kF32 ? DType::kF32 : DType::kBF16;
  Attend(context, config, chunks, cache, index, act, heads, own(q), own(attended));
  const TensorParallel::Matrix by_head{attended, width};
  tensor_parallel->Gather(context, {&by_head, 1}, index);
  return attended;
}

// x += attention(norm(x))
void Model::Impl::RunAttention(ExecContext& context, std::span<const SequenceChunk> chunks,
                               const KvView& cache, size_t index, const RopeTable& rope, Rows x) {
  const ArenaScope scope(context.arena);
  const LayerWeights& layer = weights.layers[index];
  const AttentionWeights& attention = layer.attention;
  const Rows normed = Normalize(context, x, layer.input_norm, config.norm_eps);
  const std::function<DType(const WeightMatrix&)> act_for = [&](const WeightMatrix& matrix) {
    return ActFor(matrix);
  };
  const Rows attended =
      config.latent
          ? AttendLatent(context,
                         {config, attention, *tensor_parallel, act_for, chunks, cache, index, rope},
                         normed)
          : AttendHeads(context, chunks, cache, index, rope, normed);
  const Rows projected = context.arena.AllocateRows(x.rows, config.hidden_size);
  const quant::LinearJob job = Job(attention.o, attention.o_bias, projected);
  {
    const StageTimer timer(context.profile, Stage::kOutput, [&] {
      return WorkOf({&job, 1}, x.rows);
    });
    tensor_parallel->Linear(context, attended, job, index);
  }
  AddRows(context, projected, x);
}

Rows Model::Impl::RunDense(ExecContext& context, size_t index, ConstRows x) {
  const DenseMlpWeights& dense = weights.layers[index].dense;
  const Rows gate = context.arena.AllocateRows(x.rows, dense.gate.rows);
  const Rows up = context.arena.AllocateRows(x.rows, dense.up.rows);
  const Rows out = context.arena.AllocateRows(x.rows, dense.down.rows);
  const quant::LinearJob jobs[] = {Job(dense.gate, {}, gate), Job(dense.up, {}, up),
                                   Job(dense.down, {}, out)};
  const StageTimer timer(context.profile, Stage::kDense, [&] { return WorkOf(jobs, x.rows); });
  tensor_parallel->RunLinears(context, x, std::span(jobs).first(2), index);
  const Rows hidden = context.arena.AllocateRows(x.rows, dense.gate.rows);
  const Activation activation{kernels::FindActivation(config.activation), {}};
  ForEachToken(context, x.rows,
               [&](size_t t) { activation(gate.Row(t), up.Row(t), hidden.cols, hidden.Row(t)); });
  tensor_parallel->Linear(context, hidden, jobs[2], index);
  return out;
}

Rows Model::Impl::RunMoe(ExecContext& context, size_t index, ConstRows x,
                         ForwardObserver* observer) {
  // The router stays in f32 whatever the other activations do: which experts are chosen must not
  // depend on it.
  const Rows logits = context.arena.AllocateRows(x.rows, config.num_experts);
  const LayerWeights& layer = weights.layers[index];
  const quant::LinearJob job{layer.router, DataOrNull(layer.router_bias), logits, DType::kF32};
  {
    const StageTimer timer(context.profile, Stage::kRouter, [&] {
      return WorkOf({&job, 1}, x.rows);
    });
    quant::RunLinears(context, x, {&job, 1});
  }
  moe::RoutingRecord record;
  moe::TopKInputs inputs;
  moe::ExpertPlacement placement;
  placer->Fill(moe_index[index], placement, inputs);
  const Rows out = [&] {
    // All but what its parts count as their own.
    const StageTimer timer(context.profile, Stage::kMoePrepare);
    return moe_layers[index]->Forward(context, x, logits, &record, inputs);
  }();
  if (config.shared_intermediate_size != 0 && x.rows != 0)
    AddRows(context, RunDense(context, index, x), out);
  if (observer == nullptr) return out;
  if (placer->has_copies()) {
    // Who looks on wants to know which experts, not which of their copies.
    const std::span<const int32_t> logical = placer->PhysicalToLogical(moe_index[index]);
    const std::span<int32_t> ids = context.arena.AllocateSpan<int32_t>(record.topk.ids.size());
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      const int32_t id = record.topk.ids[slot];
      ids[slot] = id < 0 ? id : logical[static_cast<size_t>(id)];
    }
    record.topk.ids = ids;
  }
  observer->OnRouting(index, record.topk);
  return out;
}

Rows Model::Impl::Head(ExecContext& context, std::span<const SequenceChunk> chunks, ConstRows x) {
  size_t wanted = 0;
  for (const SequenceChunk& chunk : chunks) {
    if (chunk.logits == LogitsWanted::kAll) wanted += chunk.tokens.size();
    if (chunk.logits == LogitsWanted::kLast && !chunk.tokens.empty()) ++wanted;
  }
  const Rows logits = context.arena.AllocateRows(wanted, config.vocab_size);
  if (wanted == 0) return logits;
  const Rows normed = context.arena.AllocateRows(wanted, config.hidden_size);
  const quant::LinearJob job = Job(weights.head, {}, logits);
  const StageTimer timer(context.profile, Stage::kHead, [&] { return WorkOf({&job, 1}, wanted); });
  size_t row = 0;
  size_t next = 0;
  for (const SequenceChunk& chunk : chunks) {
    for (size_t t = 0; t < chunk.tokens.size(); ++t, ++row) {
      const bool is_last = t + 1 == chunk.tokens.size();
      if (chunk.logits == LogitsWanted::kNone || (chunk.logits == LogitsWanted::kLast && !is_last))
        continue;
      kernels::RmsNorm(x.Row(row), weights.final_norm.data(), config.hidden_size,
                       static_cast<float>(config.norm_eps), normed.Row(next++));
    }
  }
  tensor_parallel->Linear(context, normed, job, config.layers.size());
  return logits;
}

Rows Model::Forward(ExecContext& context, std::span<const SequenceChunk> chunks,
                    const KvView& cache, ForwardObserver* observer) {
  Impl& impl = *impl_;
  SY_CHECK(!impl.options.look_only);
  impl.placer->BeginPass();
  try {
    const Rows logits = impl.Forward(context, chunks, cache, observer);
    impl.placer->EndPass();
    return logits;
  } catch (...) {
    impl.placer->AbortPass();
    throw;
  }
}

Rows Model::Impl::Forward(ExecContext& context, std::span<const SequenceChunk> chunks,
                          const KvView& cache, ForwardObserver* observer) {
  SY_CHECK_EQ(cache.layers.size(), config.layers.size());
  const Rows x = Embed(context, chunks);
  if (x.rows == 0) {
    ServeOthers(context);
    return Rows(nullptr, 0, config.vocab_size);
  }
  const RopeTable rope = [&] {
    const StageTimer timer(context.profile, Stage::kRope);
    return MakeRopeTable(context, config.rope, frequencies, chunks, x.rows);
  }();
  for (size_t i = 0; i < config.layers.size(); ++i) {
    RunAttention(context, chunks, cache, i, rope, x);
    const ArenaScope scope(context.arena);
    const Rows normed =
        Normalize(context, x, weights.layers[i].post_attention_norm, config.norm_eps);
    const Rows out = config.layers[i].is_moe ? RunMoe(context, i, normed, observer)
                                             : RunDense(context, i, normed);
    AddRows(context, out, x);
    if (observer != nullptr) observer->OnLayer(i, x);
  }
  return Head(context, chunks, x);
}

// A pass without tokens of its own: the experts of this rank still compute those of the others.
void Model::Impl::ServeOthers(ExecContext& context) {
  if (options.moe.ep == nullptr || options.moe.ep->options().tokens_are_replicated) return;
  const Rows none(nullptr, 0, config.hidden_size);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const ArenaScope scope(context.arena);
    if (config.layers[i].is_moe) RunMoe(context, i, none, nullptr);
  }
}

const ModelConfig& Model::config() const { return impl_->config; }
std::span<const int32_t> Model::ExpertMap(size_t moe_layer) const {
  return impl_->placer->PhysicalToLogical(moe_layer);
}
bool Model::is_elastic() const { return IsElastic(impl_->options); }
bool Model::is_shared() const { return impl_->tensor_parallel->size() > 1; }
size_t Model::max_tokens_per_rank() const {
  const moe::ExpertParallel* ep = impl_->options.moe.ep;
  if (ep == nullptr) return SIZE_MAX;
  const bool low_latency_only = is_elastic() || impl_->options.moe.a2a == "ascend_fuseep" ||
                                (impl_->options.moe.a2a == "deepep" &&
                                 ep->options().deepep_mode == moe::DeepepMode::kLowLatency);
  return low_latency_only ? ep->options().num_max_dispatch_tokens_per_rank
                          : ep->options().max_tokens_per_rank;
}
void Model::CheckToken(int32_t token, size_t position) const {
  switchyard::CheckToken(impl_->config, token, position);
}
const moe::ExpertWeights& Model::experts(size_t moe_layer) const {
  size_t layer = 0;
  while (impl_->moe_layers[layer] == nullptr || impl_->moe_index[layer] != moe_layer) ++layer;
  return impl_->moe_layers[layer]->weights();
}
const std::vector<StoredMatrix>& Model::matrices() const { return impl_->weights.matrices; }
const std::vector<FileTensor>& Model::tensors() const { return impl_->tensors; }
const Verification& Model::verification() const { return impl_->verification; }
const GgufModel* Model::gguf() const { return impl_->gguf.get(); }
const std::vector<std::string>& Model::bad_tensors() const { return impl_->bad_tensors; }
DType Model::weight_dtype() const {
  for (const auto& layer : impl_->moe_layers) {
    if (layer != nullptr) return layer->weights().w1.format.dtype;
  }
  return impl_->weights.head.dtype();
}
DType Model::activation_dtype() const {
  for (const auto& layer : impl_->moe_layers) {
    if (layer != nullptr) return layer->runner().config().activation_dtype;
  }
  return impl_->ActFor(impl_->weights.head);
}

size_t Model::weight_bytes() const {
  if (impl_->checkpoint != nullptr) return impl_->checkpoint->total_bytes();
  if (impl_->gguf == nullptr) return impl_->random_bytes;
  size_t bytes = 0;
  for (const GgufModel::Tensor& tensor : impl_->gguf->tensors()) bytes += tensor.info->bytes;
  return bytes;
}

size_t Model::copied_bytes() const { return impl_->weights.owned_bytes; }
size_t Model::released_bytes() const {
  size_t bytes = 0;
  for (const StoredMatrix& matrix : matrices()) bytes += matrix.is_repacked ? matrix.bytes : 0;
  return bytes;
}

size_t Model::active_bytes_per_token() const {
  const ModelConfig& config = impl_->config;
  if (!impl_->weights.load_error.empty()) return 0;
  size_t bytes = MatrixBytes(impl_->weights.head);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerWeights& layer = impl_->weights.layers[i];
    for (const WeightMatrix* matrix : MatricesOf(layer.attention)) bytes += MatrixBytes(*matrix);
    bytes += DenseBytes(layer.dense);
    if (!config.layers[i].is_moe) continue;
    const moe::ExpertWeights& experts = impl_->moe_layers[i]->weights();
    const auto matrix =
        static_cast<double>(experts.hidden_size * experts.intermediate_size * config.top_k);
    const double bits = 2 * BitsPerWeight(experts.w1) + BitsPerWeight(experts.w2);
    bytes += MatrixBytes(layer.router) + static_cast<size_t>(matrix * bits / 8);
  }
  return bytes;
}

size_t Model::active_params() const {
  const ModelConfig& config = impl_->config;
  size_t params = 0;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerWeights& layer = impl_->weights.layers[i];
    for (const WeightMatrix* matrix : MatricesOf(layer.attention))
      params += matrix->rows * matrix->cols;
    params += 3 * layer.dense.gate.rows * config.hidden_size;
    if (!config.layers[i].is_moe) continue;
    params += config.num_experts * config.hidden_size +
              config.top_k * 3 * config.hidden_size * config.moe_intermediate_size;
  }
  return params;
}

size_t Model::head_params() const { return impl_->config.vocab_size * impl_->config.hidden_size; }

namespace {

// Plans of many matrices, equal ones once, in the order in which they came.
class PlanCount {
 public:
  void Add(ComputePlan plan) {
    ++total_;
    for (auto& [known, count] : plans_) {
      if (known.weights != plan.weights || known.kernel != plan.kernel ||
          known.runner != plan.runner || known.reason != plan.reason)
        continue;
      ++count;
      return;
    }
    plans_.emplace_back(std::move(plan), 1);
  }
  // "attention", or "attention, 12 of 16 matrices" where they differ.
  void MoveTo(std::vector<ComputePlan>& out, std::string_view part, std::string_view unit) {
    for (auto& [plan, count] : plans_) {
      plan.part = plans_.size() == 1 ? std::string(part)
                                     : fmt::format("{}, {} of {} {}", part, count, total_, unit);
      out.push_back(std::move(plan));
    }
  }
  // "experts of 4 layers"
  void MoveTo(std::vector<ComputePlan>& out, std::string_view part) {
    for (auto& [plan, count] : plans_) {
      plan.part = fmt::format("{} of {} layers", part, count);
      out.push_back(std::move(plan));
    }
  }

 private:
  std::vector<std::pair<ComputePlan, size_t>> plans_;
  size_t total_ = 0;
};

bool IsSame(const ComputePlan& a, const ComputePlan& b) {
  return a.weights == b.weights && a.kernel == b.kernel && a.reason == b.reason;
}

// How one product is computed, with weights as they are or will be laid out. `quantises`: what
// their scheme does with activations.
ComputePlan PlanProduct(const ModelOptions& options, const MatrixFormat& stored, size_t cols,
                        ActQuantKind quantises) {
  const MatrixFormat format = options.repack ? quant::InPanels(stored, cols) : stored;
  const moe::MoeLayerOptions& moe = options.moe;
  const DType activations =
      quant::ResolveActDType(moe.act_dtype, moe.fast_activations, format, cols);
  const DType weights = format.dtype;
  ComputePlan plan;
  plan.weights = DTypeName(weights);
  const bool is_quantized =
      format.is_quantized() || kernels::FindMatmul(DType::kF32, weights) == nullptr;
  if (is_quantized) {
    plan.reason =
        quantises != ActQuantKind::kNone
            ? fmt::format("quantised weights, activations {}", ActQuantKindName(quantises))
        : activations == DType::kI8 ? "quantised weights, activations in int8 (fast-activations)"
                                    : "quantised weights, activations as they are";
  } else {
    plan.reason = activations == DType::kBF16
                      ? (moe.act_dtype == "auto" ? "weights and CPU have bf16" : "--act-dtype bf16")
                  : moe.act_dtype == "f32"  ? "--act-dtype f32"
                  : weights == DType::kBF16 ? "this CPU (or --isa) has no bf16 products"
                                            : "the weights are not bf16";
  }
  if (format.in_panels) {
    ActQuant how;
    how.kind = quantises;
    how.group = format.scale_cols;
    const kernels::PanelPath path = quant::RecordsFor(how, format, cols, activations).path;
    plan.kernel = fmt::format("MultiplyPanel, {}", path == kernels::PanelPath::kInt8   ? "int8"
                                                   : path == kernels::PanelPath::kBF16 ? "bf16"
                                                                                       : "f32");
  } else if (is_quantized) {
    const bool int8 = quant::ExpertRowDType({quantises}, format, cols, activations) == DType::kI8;
    plan.kernel = int8 ? "MatmulI8I8" : "decode to f32 tiles, MatmulF32F32";
  } else {
    plan.kernel = kernels::FindMatmul(activations, weights)->name;
  }
  return plan;
}

}  // namespace

// A product of a layer's experts.
ComputePlan Model::Impl::PlanExperts(size_t layer, const moe::ExpertBank& bank,
                                     std::string_view scheme_name) const {
  const moe::MoeRunner& runner = moe_layers[layer]->runner();
  const moe::SchemeEntry& scheme = moe::BuiltinRegistry().FindScheme(scheme_name);
  ComputePlan plan =
      PlanProduct(options, bank.format, bank.cols,
                  options.moe.activation_quant ? scheme.act_quant : ActQuantKind::kNone);
  plan.runner = runner.name();
  if (plan.runner == "reference") plan.kernel = "scalar f64";
  plan.reason += options.moe.runner == "auto"
                     ? fmt::format("; --moe-runner auto: the first of {} for scheme {}",
                                   fmt::join(scheme.runners, ", "), scheme.name)
                     : fmt::format("; --moe-runner {}", options.moe.runner);
  return plan;
}

std::vector<ComputePlan> Model::Explain() const {
  const Impl& impl = *impl_;
  std::vector<ComputePlan> plans;
  if (!impl.weights.load_error.empty()) return plans;
  const auto of_matrix = [&](const WeightMatrix& matrix) {
    return PlanProduct(impl.options, matrix.format, matrix.cols, matrix.act.kind);
  };
  ModelOptions as_it_lies;  // of what is not repacked
  as_it_lies.repack = false;
  as_it_lies.moe.act_dtype = "f32";
  PlanCount attention, experts, w13, w2, router, dense, shared;
  for (size_t i = 0; i < impl.config.layers.size(); ++i) {
    const LayerWeights& layer = impl.weights.layers[i];
    for (const WeightMatrix* matrix : MatricesOf(layer.attention))
      attention.Add(of_matrix(*matrix));
    PlanCount& other = impl.config.layers[i].is_moe ? shared : dense;
    for (const WeightMatrix* matrix : {&layer.dense.gate, &layer.dense.up, &layer.dense.down}) {
      if (matrix->rows != 0) other.Add(of_matrix(*matrix));
    }
    if (!impl.config.layers[i].is_moe) continue;
    const moe::ExpertWeights& weights = impl.moe_layers[i]->weights();
    ComputePlan first = impl.PlanExperts(i, weights.w1, layer.scheme_w13);
    ComputePlan second = impl.PlanExperts(i, weights.w2, layer.scheme_w2);
    if (IsSame(first, second)) {
      experts.Add(std::move(first));
    } else {
      w13.Add(std::move(first));
      w2.Add(std::move(second));
    }
    router.Add(
        PlanProduct(as_it_lies, layer.router.format, layer.router.cols, layer.router.act.kind));
  }
  attention.MoveTo(plans, "attention", "matrices");
  experts.MoveTo(plans, "experts");
  w13.MoveTo(plans, "experts w13");
  w2.MoveTo(plans, "experts w2");
  const size_t first_router = plans.size();
  router.MoveTo(plans, "router", "layers");
  for (size_t i = first_router; i < plans.size(); ++i) plans[i].reason = "routing is always f32";
  shared.MoveTo(plans, "shared experts", "matrices");
  dense.MoveTo(plans, "dense layers", "matrices");
  plans.push_back(of_matrix(impl.weights.head));
  plans.back().part = "head";
  return plans;
}

}  // namespace switchyard
