#include "model/gguf_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "model/architectures/architecture.h"
#include "model/config_reader.h"
#include "model/rope.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"

namespace switchyard {
namespace {

constexpr size_t kMaxPositions = size_t{1} << 30;
constexpr double kMaxFactor = 1e6;
constexpr std::string_view kRopeFreqs = "rope_freqs.weight";

// expert_gating_func of the format.
enum class GatingFunc : uint8_t { kNone = 0, kSoftmax = 1, kSigmoid = 2, kSoftmaxOfChosen = 3 };

// Keys of an architecture that do not change what is computed.
struct HarmlessKey {
  std::string_view name;
  std::string_view reason;
};
constexpr HarmlessKey kHarmless[] = {
    {"rope.scaling.finetuned", "how the model was trained, not how it is computed"},
    {"tensor_data_layout", "a note of the converter about rows of q and k, always the same"},
    {"attention.layer_norm_epsilon", "of LayerNorm, which these families do not have"},
    {"pooling_type", "of embeddings of texts, not of generation"},
};

// The keys of one architecture; remembers which were read.
class ArchitectureKeys {
 public:
  ArchitectureKeys(const GgufModel& gguf, std::string_view architecture)
      : gguf_(gguf), file_(gguf.metadata()), prefix_(std::string(architecture) + ".") {}

  const GgufModel& gguf() const { return gguf_; }
  const GgufFile& file() const { return file_; }

  bool Has(std::string_view name) const { return file_.FindEntry(prefix_ + std::string(name)); }
  size_t Count(std::string_view name, size_t min, size_t max) {
    return file_.Count(Use(name), min, max);
  }
  size_t Count(std::string_view name, size_t min, size_t max, size_t default_value) {
    return file_.OptionalCount(Use(name), min, max).value_or(default_value);
  }
  double Number(std::string_view name, double min, double max) {
    return file_.Number(Use(name), min, max);
  }
  double Number(std::string_view name, double min, double max, double default_value) {
    return file_.OptionalNumber(Use(name), min, max).value_or(default_value);
  }
  bool Flag(std::string_view name, bool default_value) {
    return file_.OptionalFlag(Use(name)).value_or(default_value);
  }
  std::string_view Text(std::string_view name, std::string_view default_value) {
    return file_.OptionalText(Use(name)).value_or(default_value);
  }
  std::vector<size_t> Counts(std::string_view name, size_t min, size_t max) {
    return file_.Counts(Use(name), min, max);
  }

  // A number, or an array with that number for every layer.
  size_t SameCount(std::string_view name, size_t min, size_t max) {
    const std::vector<size_t> counts = Counts(name, min, max);
    if (counts.empty() || std::ranges::count(counts, counts.front()) != std::ssize(counts))
      Refuse(name, "it must be the same for all layers");
    return counts.front();
  }

  [[noreturn]] void Refuse(std::string_view name, std::string_view why) const {
    Throw(ErrorCode::kUnsupported, name, why);
  }
  [[noreturn]] void Contradict(std::string_view name, std::string_view why) const {
    Throw(ErrorCode::kCorruptData, name, why);
  }

  // Errors: kUnsupported naming every key of the architecture that nobody read.
  void Finish() const {
    std::vector<std::string> unknown;
    for (const GgufEntry& entry : file_.entries()) {
      if (!entry.key.starts_with(prefix_) || used_.contains(entry.key)) continue;
      const std::string_view name = entry.key.substr(prefix_.size());
      if (std::ranges::any_of(kHarmless, [&](const HarmlessKey& key) { return key.name == name; }))
        continue;
      unknown.push_back(QuoteForMessage(entry.key));
    }
    if (unknown.empty()) return;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: unknown metadata keys of the architecture: {}; they may change "
                            "what is computed",
                            file_.file_name(), fmt::join(unknown, ", ")));
  }

 private:
  std::string Use(std::string_view name) {
    std::string key = prefix_ + std::string(name);
    used_.insert(key);
    return key;
  }
  [[noreturn]] void Throw(ErrorCode code, std::string_view name, std::string_view why) const {
    throw Error(
        code, fmt::format("{}: metadata key \"{}{}\": {}", file_.file_name(), prefix_, name, why));
  }

  const GgufModel& gguf_;
  const GgufFile& file_;
  std::string prefix_;
  std::set<std::string, std::less<>> used_;
};

bool HasTensor(const ArchitectureKeys& keys, std::string_view name) {
  return keys.gguf().Find(name) != nullptr;
}

// Rows of the embedding; the other places that say it must agree.
size_t ReadVocabSize(ArchitectureKeys& keys) {
  const GgufModel::Tensor* embedding = keys.gguf().Find("token_embd.weight");
  if (embedding == nullptr || embedding->info->shape.rank() != 2) {
    throw Error(
        ErrorCode::kCorruptData,
        fmt::format("{}: tensor \"token_embd.weight\": {}, expected two axes",
                    keys.file().file_name(),
                    embedding == nullptr ? "is missing" : embedding->info->shape.ToString()));
  }
  const size_t size = embedding->info->shape[0];
  const auto require = [&](std::string_view what, size_t found) {
    if (found == size) return;
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: {} is {}, but \"token_embd.weight\" has {} rows",
                            keys.file().file_name(), what, found, size));
  };
  require("\"vocab_size\"", keys.Count("vocab_size", 1, kMaxSize, size));
  if (const GgufEntry* tokens = keys.file().FindEntry("tokenizer.ggml.tokens"))
    require("the number of \"tokenizer.ggml.tokens\"", tokens->count);
  return size;
}

std::vector<size_t> ReadStopIds(const GgufFile& file, size_t vocab_size) {
  std::vector<size_t> ids;
  for (std::string_view key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const auto id = file.OptionalCount(key, 0, UINT32_MAX);
    if (!id || *id == UINT32_MAX) continue;  // -1: there is none
    if (*id >= vocab_size) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}: metadata key \"{}\": {} is beyond the vocabulary of {}",
                              file.file_name(), key, *id, vocab_size));
    }
    if (std::ranges::find(ids, *id) == ids.end()) ids.push_back(*id);
  }
  return ids;
}

// Sizes, norms, heads and words: what all families have.
ModelConfig ReadCommon(ArchitectureKeys& keys) {
  ModelConfig model;
  model.vocab_size = ReadVocabSize(keys);
  model.eos_ids = ReadStopIds(keys.file(), model.vocab_size);
  model.hidden_size = keys.Count("embedding_length", 1, kMaxSize);
  model.layers.resize(keys.Count("block_count", 1, 10000));
  model.max_positions = keys.Count("context_length", 1, kMaxPositions);
  model.norm_eps = keys.Number("attention.layer_norm_rms_epsilon", 0.0, 1.0);
  model.num_heads = keys.SameCount("attention.head_count", 1, 65536);
  model.num_kv_heads = keys.Has("attention.head_count_kv")
                           ? keys.SameCount("attention.head_count_kv", 1, 65536)
                           : model.num_heads;
  model.tie_word_embeddings = !HasTensor(keys, "output.weight");
  model.num_experts = keys.Count("expert_count", 1, kMaxExperts);
  model.top_k = keys.Count("expert_used_count", 1, model.num_experts);
  if (!keys.Flag("attention.causal", true))
    keys.Refuse("attention.causal", "only causal attention is computed");
  return model;
}

// Heads that are all alike: queries, keys and values have one size and are rotated as a whole.
void ReadHeads(ArchitectureKeys& keys, ModelConfig& model) {
  model.head_dim =
      keys.Count("attention.key_length", 1, 65536, model.hidden_size / model.num_heads);
  if (keys.Count("attention.value_length", 1, 65536, model.head_dim) != model.head_dim)
    keys.Refuse("attention.value_length", "values must be as long as keys");
  if (model.head_dim == 0 || model.head_dim % 2 != 0) {
    keys.Refuse(keys.Has("attention.key_length") ? "attention.key_length" : "attention.head_count",
                fmt::format("heads of {} values cannot be rotated", model.head_dim));
  }
  if (model.num_heads % model.num_kv_heads != 0) {
    keys.Contradict("attention.head_count_kv", fmt::format("{} does not divide the {} heads",
                                                           model.num_kv_heads, model.num_heads));
  }
  if (model.num_heads / model.num_kv_heads > kMaxHeadGroup) {
    keys.Refuse("attention.head_count_kv",
                fmt::format("at most {} query heads may share a key-value head", kMaxHeadGroup));
  }
  model.attention_bias = HasTensor(keys, "blk.0.attn_q.bias");
}

// rope_freqs.weight holds what each frequency is divided by: llama3 scaling, worked out.
void ReadRopeFreqs(const ArchitectureKeys& keys, RopeConfig& rope) {
  const GgufModel::Tensor* tensor = keys.gguf().Find(kRopeFreqs);
  if (tensor == nullptr) return;
  const TensorView view = tensor->View();
  const size_t pairs = rope.rotary_dim / 2;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: tensor \"{}\": {}", tensor->file->file_name(), kRopeFreqs, why));
  };
  if (view.dtype != DType::kF32 || view.shape != Shape({pairs}))
    refuse(fmt::format("expected F32 of shape [{}], found {} of shape {}", pairs,
                       DTypeName(view.dtype), view.shape.ToString()));
  if (rope.kind != RopeConfig::Kind::kDefault)
    refuse(fmt::format("and {} scaling cannot both be applied", RopeKindName(rope.kind)));
  std::vector<float> factors(pairs);
  std::memcpy(factors.data(), view.data, pairs * sizeof(float));
  for (float factor : factors) {
    if (!(factor >= 1e-6f && factor <= 1e6f))
      refuse(fmt::format("a factor is {}, expected a number from 1e-06 to 1e+06", factor));
  }
  rope.kind = RopeConfig::Kind::kLongrope;
  rope.short_factors.assign(factors.begin(), factors.end());
  rope.long_factors = rope.short_factors;
  rope.original_max_positions = rope.max_positions;
}

// The stretch of contexts. `uses_log_multiplier`: of deepseek2, where the softmax is sharpened by
// mscale_all_dim instead of the rotation.
void ReadYarn(ArchitectureKeys& keys, bool uses_log_multiplier, RopeConfig& rope) {
  rope.kind = RopeConfig::Kind::kYarn;
  rope.factor = keys.Number("rope.scaling.factor", 1e-3, kMaxFactor);
  rope.original_max_positions =
      keys.Count("rope.scaling.original_context_length", 1, kMaxPositions, rope.max_positions);
  rope.beta_fast = keys.Number("rope.scaling.yarn_beta_fast", 1e-6, kMaxFactor, 32.0);
  rope.beta_slow = keys.Number("rope.scaling.yarn_beta_slow", 1e-6, kMaxFactor, 1.0);
  if (keys.Number("rope.scaling.yarn_ext_factor", -kMaxFactor, kMaxFactor, 1.0) != 1.0)
    keys.Refuse("rope.scaling.yarn_ext_factor", "only 1, the whole of the stretch, is computed");
  const double inferred = rope.factor <= 1.0 ? 1.0 : 0.1 * std::log(rope.factor) + 1.0;
  rope.attention_factor = keys.Number("rope.scaling.yarn_attn_factor", 1e-6, kMaxFactor, inferred);
  if (!keys.Has("rope.scaling.yarn_log_multiplier")) return;
  const double multiplier = keys.Number("rope.scaling.yarn_log_multiplier", 0.0, kMaxFactor);
  if (!uses_log_multiplier)
    keys.Refuse("rope.scaling.yarn_log_multiplier", "only deepseek2 is known to use it");
  // The converter writes a tenth of mscale_all_dim as f32; six decimals bring the number back. It
  // does not write mscale, which all published models have equal to mscale_all_dim: the two cancel
  // in the rotation.
  rope.mscale_all_dim = std::round(multiplier * 1e7) / 1e6;
  if (multiplier == 0) return;
  if (keys.Has("rope.scaling.yarn_attn_factor")) {
    keys.Refuse("rope.scaling.yarn_attn_factor",
                "what it means beside yarn_log_multiplier is not known");
  }
  rope.attention_factor = 1.0;
}

// `default_theta` 0: the key must be there.
void ReadRope(ArchitectureKeys& keys, size_t rotary_dim, double default_theta, ModelConfig& model) {
  RopeConfig& rope = model.rope;
  rope.rotary_dim = rotary_dim;
  rope.max_positions = model.max_positions;
  rope.theta = default_theta == 0 ? keys.Number("rope.freq_base", 1.0001, 1e12)
                                  : keys.Number("rope.freq_base", 1.0001, 1e12, default_theta);
  if (keys.Count("rope.dimension_count", 1, 65536, rotary_dim) != rotary_dim) {
    keys.Refuse("rope.dimension_count",
                fmt::format("this architecture rotates {} values of a head", rotary_dim));
  }
  if (keys.Number("rope.scaling.attn_factor", 0.0, kMaxFactor, 1.0) != 1.0)
    keys.Refuse("rope.scaling.attn_factor", "it belongs to longrope, which is not known here");
  // The older name of a linear factor; 0 and 1 stand for none.
  const double old_factor = keys.Number("rope.scale_linear", 0.0, kMaxFactor, 0.0);
  const bool has_factor = keys.Has("rope.scaling.factor") || old_factor > 0;
  const std::string_view type = keys.Text("rope.scaling.type", has_factor ? "linear" : "none");
  if (type == "yarn") {
    ReadYarn(keys, model.latent.has_value(), rope);
  } else if (type == "linear") {
    const double factor = keys.Number("rope.scaling.factor", 0.0, kMaxFactor, old_factor);
    if (factor != 0 && factor != 1) {
      rope.kind = RopeConfig::Kind::kLinear;
      rope.factor = factor;
    }
  } else if (type == "none") {
    const double factor = keys.Number("rope.scaling.factor", 0.0, kMaxFactor, 1.0);
    if (factor != 0 && factor != 1)
      keys.Contradict("rope.scaling.factor", "there is no scaling (\"rope.scaling.type\")");
  } else {
    keys.Refuse("rope.scaling.type", fmt::format("known are none, linear and yarn, found {}",
                                                 QuoteForMessage(type, 40)));
  }
  ReadRopeFreqs(keys, rope);
}

// Of families whose router has one rule: softmax, and no groups.
void ReadSoftmaxRouter(ArchitectureKeys& keys, bool renormalize, ModelConfig& model) {
  const auto func = static_cast<GatingFunc>(keys.Count("expert_gating_func", 0, 255, 0));
  if (func != GatingFunc::kNone && func != GatingFunc::kSoftmax)
    keys.Refuse("expert_gating_func", "this architecture has softmax scores (1)");
  model.renormalize = keys.Flag("expert_weights_norm", renormalize);
  model.routed_scaling_factor = keys.Number("expert_weights_scale", 1e-6, kMaxFactor, 1.0);
  for (std::string_view name : {"expert_group_count", "expert_group_used_count"}) {
    if (keys.Count(name, 0, kMaxSize, 0) > 1)
      keys.Refuse(name, "this architecture has no groups of experts");
  }
}

ModelConfig ReadOlmoe(ArchitectureKeys& keys) {
  ModelConfig model = ReadCommon(keys);
  model.architecture = "olmoe";
  ReadHeads(keys, model);
  ReadRope(keys, model.head_dim, 10000.0, model);
  model.qk_norm = QkNorm::kFull;
  if (keys.Has("attention.clamp_kqv")) {
    const double clip = keys.Number("attention.clamp_kqv", 0.0, 1e30);
    if (clip != 0) model.clip_qkv = clip;
  }
  // The experts have the size that dense layers would have; some converters write both keys.
  const size_t inner = keys.Count("feed_forward_length", 1, kMaxSize);
  model.moe_intermediate_size = keys.Count("expert_feed_forward_length", 1, kMaxSize, inner);
  ReadSoftmaxRouter(keys, false, model);
  return model;
}

ModelConfig ReadQwen3Moe(ArchitectureKeys& keys) {
  ModelConfig model = ReadCommon(keys);
  model.architecture = "qwen3_moe";
  ReadHeads(keys, model);
  ReadRope(keys, model.head_dim, 0, model);
  model.qk_norm = QkNorm::kPerHead;
  model.moe_intermediate_size = keys.Count("expert_feed_forward_length", 1, kMaxSize);
  model.dense_intermediate_size =
      keys.Count("feed_forward_length", 1, kMaxSize, model.moe_intermediate_size);
  ReadSoftmaxRouter(keys, true, model);
  return model;
}

// Mixtral: converted as llama, with experts. The rows of q and k are reordered so that pairs of
// values that rotate together are neighbours.
ModelConfig ReadMixtral(ArchitectureKeys& keys) {
  if (keys.Count("expert_count", 0, kMaxExperts, 0) == 0)
    keys.Refuse("expert_count",
                "is 0 or missing: a dense model, and only Mixtral is read as llama");
  ModelConfig model = ReadCommon(keys);
  model.architecture = "mixtral";
  ReadHeads(keys, model);
  ReadRope(keys, model.head_dim, 10000.0, model);
  model.rope.interleaved = true;
  const size_t inner = keys.Count("feed_forward_length", 1, kMaxSize);
  model.moe_intermediate_size = keys.Count("expert_feed_forward_length", 1, kMaxSize, inner);
  ReadSoftmaxRouter(keys, true, model);
  const size_t window = keys.Count("attention.sliding_window", 0, kMaxSize, 0);
  for (LayerConfig& layer : model.layers) layer.window = window;
  return model;
}

// Sizes of latent attention. Files of before April 2025 give the sizes of a head as key_length and
// value_length; newer ones as …_mla, beside those of the latent row.
LatentAttention ReadLatent(ArchitectureKeys& keys, size_t rotary_dim) {
  LatentAttention latent;
  latent.q_rank = keys.Count("attention.q_lora_rank", 0, kMaxSize, 0);
  latent.kv_rank = keys.Count("attention.kv_lora_rank", 1, kMaxSize);
  const bool is_new = keys.Has("attention.key_length_mla");
  const std::string_view key_name = is_new ? "attention.key_length_mla" : "attention.key_length";
  const size_t key_dim = keys.Count(key_name, 1, 65536);
  latent.value_dim =
      keys.Count(is_new ? "attention.value_length_mla" : "attention.value_length", 1, 65536);
  if (is_new) {
    const size_t row = latent.kv_rank + rotary_dim;
    if (keys.Count("attention.key_length", 1, kMaxSize, row) != row)
      keys.Contradict("attention.key_length", fmt::format("expected {}, the latent row", row));
    if (keys.Count("attention.value_length", 1, kMaxSize, latent.kv_rank) != latent.kv_rank)
      keys.Contradict("attention.value_length",
                      fmt::format("expected {}, kv_lora_rank", latent.kv_rank));
  }
  if (key_dim <= rotary_dim) {
    keys.Contradict(key_name, fmt::format("{} leaves nothing beside the {} rotated values", key_dim,
                                          rotary_dim));
  }
  latent.nope_dim = key_dim - rotary_dim;
  return latent;
}

// Files of DeepSeek-V2 of before V3 have no gating function; theirs is softmax. A correction bias
// belongs to sigmoid scores in every known model, so a file that has one must say which they are.
moe::ScoringFunc ReadScoringFunc(ArchitectureKeys& keys, bool has_correction_bias) {
  switch (static_cast<GatingFunc>(keys.Count("expert_gating_func", 0, 255, 0))) {
    case GatingFunc::kSoftmax: return moe::ScoringFunc::kSoftmax;
    case GatingFunc::kSigmoid: return moe::ScoringFunc::kSigmoid;
    case GatingFunc::kNone:
      if (has_correction_bias) {
        keys.Contradict("expert_gating_func",
                        "is missing, although the router has a correction bias (exp_probs_b): "
                        "whether its scores are softmax or sigmoid is not known; convert the model "
                        "again");
      }
      Log(LogLevel::kInfo, "the file has no expert_gating_func: softmax, as all that lack it",
          {{"file", keys.file().file_name()}});
      return moe::ScoringFunc::kSoftmax;
    case GatingFunc::kSoftmaxOfChosen: break;
  }
  keys.Refuse("expert_gating_func", "known are 1 (softmax) and 2 (sigmoid)");
}

void ReadGroups(ArchitectureKeys& keys, ModelConfig& model) {
  const size_t groups = keys.Count("expert_group_count", 0, kMaxSize, 0);
  const size_t taken = keys.Count("expert_group_used_count", 0, kMaxSize, 0);
  if (!keys.Has("expert_group_count")) {
    Log(LogLevel::kWarning,
        "the file has no expert_group_count (converters of before 2025 did not write it): experts "
        "are chosen among all, which differs from a model that has groups",
        {{"file", keys.file().file_name()}});
  }
  if (groups <= 1) return;
  const size_t each = model.num_experts / groups;
  if (model.num_experts % groups != 0)
    keys.Contradict("expert_group_count",
                    fmt::format("{} experts cannot be divided by {}", model.num_experts, groups));
  if (taken < 1 || taken > groups || taken * each < model.top_k) {
    keys.Contradict("expert_group_used_count",
                    fmt::format("{} of {} groups of {} experts cannot give {}", taken, groups, each,
                                model.top_k));
  }
  if (model.router_correction_bias && each < 2)
    keys.Refuse("expert_group_count", "a group needs two experts, whose scores are added");
  model.num_expert_groups = groups;
  model.top_k_groups = taken;
}

ModelConfig ReadDeepseek(ArchitectureKeys& keys) {
  ModelConfig model = ReadCommon(keys);
  const size_t rotary_dim = keys.Count("rope.dimension_count", 2, 65536);
  if (rotary_dim % 2 != 0) keys.Refuse("rope.dimension_count", "it must be even to be rotated");
  model.latent = ReadLatent(keys, rotary_dim);
  if (model.num_heads > kMaxHeadGroup) {
    keys.Refuse("attention.head_count",
                fmt::format("at most {} heads may share a latent row", kMaxHeadGroup));
  }
  // One row serves all heads; head_count_kv is 1 or the number of heads, by the age of the file.
  model.num_kv_heads = model.num_heads;
  model.head_dim = model.latent->nope_dim + rotary_dim;
  model.attention_bias = HasTensor(keys, "blk.0.attn_kv_a_mqa.bias");
  ReadRope(keys, rotary_dim, 10000.0, model);
  model.rope.interleaved = true;
  model.score_scale = YarnScoreScale(model.rope);

  const size_t draft = keys.Count("nextn_predict_layers", 0, 64, 0);
  if (draft >= model.layers.size())
    keys.Contradict("nextn_predict_layers", "there are no other layers");
  model.layers.resize(model.layers.size() - draft);
  model.num_draft_layers = draft;
  const size_t dense = keys.Count("leading_dense_block_count", 0, kMaxSize);
  for (size_t i = 0; i < model.layers.size(); ++i) model.layers[i].is_moe = i >= dense;

  model.moe_intermediate_size = keys.Count("expert_feed_forward_length", 1, kMaxSize);
  model.dense_intermediate_size = keys.Count("feed_forward_length", 1, kMaxSize);
  model.shared_intermediate_size =
      keys.Count("expert_shared_count", 0, 4096) * model.moe_intermediate_size;
  model.router_correction_bias = HasTensor(keys, fmt::format("blk.{}.exp_probs_b.bias", dense));
  model.scoring_func = ReadScoringFunc(keys, model.router_correction_bias);
  const bool is_sigmoid = model.scoring_func == moe::ScoringFunc::kSigmoid;
  model.architecture = is_sigmoid ? "deepseek_v3" : "deepseek_v2";
  model.renormalize = keys.Flag("expert_weights_norm", false);
  model.routed_scaling_factor = is_sigmoid
                                    ? keys.Number("expert_weights_scale", 1e-6, kMaxFactor)
                                    : keys.Number("expert_weights_scale", 1e-6, kMaxFactor, 1.0);
  ReadGroups(keys, model);
  return model;
}

// Every other layer, the first included, unless the file says which.
void ReadWindows(ArchitectureKeys& keys, ModelConfig& model) {
  const size_t window = keys.Count("attention.sliding_window", 1, kMaxSize);
  const std::string_view pattern_name = "attention.sliding_window_pattern";
  std::vector<size_t> slides = {2};
  if (keys.Has(pattern_name)) slides = keys.Counts(pattern_name, 0, kMaxSize);
  const size_t layers = model.layers.size();
  // A single number n: the last of every n layers sees everything.
  if (slides.size() == 1 && layers != 1) {
    const size_t period = slides[0];
    slides.assign(layers, 0);
    for (size_t i = 0; i < layers; ++i) slides[i] = period > 1 && i % period != period - 1;
  }
  if (slides.size() != layers)
    keys.Contradict(pattern_name, fmt::format("expected one for each of {} layers", layers));
  for (size_t i = 0; i < layers; ++i) model.layers[i].window = slides[i] != 0 ? window : 0;
}

ModelConfig ReadGptOss(ArchitectureKeys& keys) {
  ModelConfig model = ReadCommon(keys);
  model.architecture = "gpt_oss";
  ReadHeads(keys, model);
  ReadRope(keys, model.head_dim, 0, model);
  // Not in the metadata; the model is published with the correction range unrounded.
  model.rope.truncate = false;
  ReadWindows(keys, model);
  model.attention_sinks = true;
  model.router_bias = true;
  model.expert_bias = true;
  model.routing = moe::RoutingPolicy::kTopKThenSoftmax;
  model.activation = "swiglu_oai";
  // Constants of the architecture: the metadata has no place for them.
  model.activation_alpha = 1.702f;
  model.activation_limit = 7.0f;
  model.moe_intermediate_size = keys.Count("expert_feed_forward_length", 1, kMaxSize);
  keys.Count("feed_forward_length", 1, kMaxSize, 1);  // of dense layers, which there are none of
  const auto func = static_cast<GatingFunc>(keys.Count("expert_gating_func", 0, 255, 0));
  if (func != GatingFunc::kNone && func != GatingFunc::kSoftmaxOfChosen)
    keys.Refuse("expert_gating_func", "this architecture has softmax over the chosen logits (3)");
  return model;
}

struct GgufFamily {
  std::string_view architecture;
  ModelConfig (*read)(ArchitectureKeys& keys);
};
constexpr GgufFamily kFamilies[] = {
    {"olmoe", &ReadOlmoe},        {"qwen3moe", &ReadQwen3Moe}, {"llama", &ReadMixtral},
    {"deepseek2", &ReadDeepseek}, {"gpt-oss", &ReadGptOss},
};

const GgufFamily* FindFamily(std::string_view architecture) {
  for (const GgufFamily& family : kFamilies) {
    if (family.architecture == architecture) return &family;
  }
  return nullptr;
}

}  // namespace

ModelConfig ReadGgufConfig(const GgufModel& gguf) {
  const GgufFile& file = gguf.metadata();
  const std::string_view type = file.OptionalText("general.type").value_or("model");
  if (type != "model") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: metadata key \"general.type\": expected \"model\", found {}",
                            file.file_name(), QuoteForMessage(type, 40)));
  }
  const std::string_view architecture = file.Text("general.architecture");
  const GgufFamily* family = FindFamily(architecture);
  if (family == nullptr) {
    std::vector<std::string_view> known;
    for (const GgufFamily& each : kFamilies) known.push_back(each.architecture);
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: metadata key \"general.architecture\": unknown architecture {}; "
                    "known are: {}",
                    file.file_name(), QuoteForMessage(architecture, 40), fmt::join(known, ", ")));
  }
  ArchitectureKeys keys(gguf, architecture);
  ModelConfig model = family->read(keys);
  keys.Finish();
  return model;
}

namespace {

struct NamePair {
  std::string_view hub;
  std::string_view gguf;
};

constexpr NamePair kModelNames[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};

// Modules of a layer, without ".weight" or ".bias".
constexpr NamePair kModules[] = {
    {"input_layernorm", "attn_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"},
    {"self_attn.q_a_proj", "attn_q_a"},
    {"self_attn.q_a_layernorm", "attn_q_a_norm"},
    {"self_attn.q_b_proj", "attn_q_b"},
    {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"},
    {"self_attn.kv_a_layernorm", "attn_kv_a_norm"},
    {"self_attn.kv_b_proj", "attn_kv_b"},
    {"self_attn.k_b_proj", "attn_k_b"},
    {"self_attn.v_b_proj", "attn_v_b"},
    {"mlp.gate", "ffn_gate_inp"},
    {"mlp.router", "ffn_gate_inp"},
    {"block_sparse_moe.gate", "ffn_gate_inp"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"mlp.shared_experts.gate_proj", "ffn_gate_shexp"},
    {"mlp.shared_experts.up_proj", "ffn_up_shexp"},
    {"mlp.shared_experts.down_proj", "ffn_down_shexp"},
};

// Tensors of a layer whose whole names differ.
constexpr NamePair kLayerTensors[] = {
    {"self_attn.sinks", "attn_sinks.weight"},
    {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
};

constexpr NamePair kExpertModules[] = {
    {"gate_proj", "ffn_gate"}, {"up_proj", "ffn_up"}, {"down_proj", "ffn_down"},
    {"w1", "ffn_gate"},        {"w3", "ffn_up"},      {"w2", "ffn_down"},
};

template <size_t kCount>
std::optional<std::string_view> LookUp(const NamePair (&names)[kCount], std::string_view hub) {
  for (const NamePair& pair : names) {
    if (pair.hub == hub) return pair.gguf;
  }
  return std::nullopt;
}

// Takes `prefix` off the front of `text` if it is there.
bool Consume(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Takes "12." off the front of `text`; the digits, or nothing.
std::string_view ConsumeIndex(std::string_view& text) {
  const size_t digits = text.find_first_not_of("0123456789");
  if (digits == 0 || digits == std::string_view::npos || text[digits] != '.') return {};
  const std::string_view index = text.substr(0, digits);
  text.remove_prefix(digits + 1);
  return index;
}

// What follows "experts." in a name: "gate_proj", "gate_proj_bias", "5.w1.weight".
std::optional<std::string> ExpertTensorName(std::string_view rest) {
  const std::string_view expert = ConsumeIndex(rest);
  std::string_view suffix = "weight";
  for (std::string_view bias : {".bias", "_bias"}) {
    if (!rest.ends_with(bias)) continue;
    suffix = "bias";
    rest.remove_suffix(bias.size());
    break;
  }
  if (rest.ends_with(".weight")) rest.remove_suffix(std::string_view(".weight").size());
  const auto module = LookUp(kExpertModules, rest);
  if (!module) return std::nullopt;
  if (expert.empty()) return fmt::format("{}_exps.{}", *module, suffix);
  return fmt::format("{}.{}.{}", *module, expert, suffix);
}

// What follows "model.layers.3." in a name.
std::optional<std::string> LayerTensorName(std::string_view architecture, std::string_view rest) {
  if (const auto name = LookUp(kLayerTensors, rest)) return std::string(*name);
  std::string_view expert = rest;
  if (Consume(expert, "mlp.experts.") || Consume(expert, "block_sparse_moe.experts."))
    return ExpertTensorName(expert);
  const size_t dot = rest.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view suffix = rest.substr(dot + 1);
  if (suffix != "weight" && suffix != "bias") return std::nullopt;
  const std::string_view module = rest.substr(0, dot);
  // The norm before the experts has another name in gpt-oss.
  if (module == "post_attention_layernorm")
    return fmt::format("{}.{}", architecture == "gpt-oss" ? "post_attention_norm" : "ffn_norm",
                       suffix);
  const auto name = LookUp(kModules, module);
  if (!name) return std::nullopt;
  return fmt::format("{}.{}", *name, suffix);
}

}  // namespace

std::optional<std::string> GgufTensorName(std::string_view architecture,
                                          std::string_view hub_name) {
  if (FindFamily(architecture) == nullptr) return std::nullopt;
  if (const auto name = LookUp(kModelNames, hub_name)) return std::string(*name);
  std::string_view rest = hub_name;
  if (!Consume(rest, "model.layers.")) return std::nullopt;
  const std::string_view layer = ConsumeIndex(rest);
  if (layer.empty()) return std::nullopt;
  const auto name = LayerTensorName(architecture, rest);
  if (!name) return std::nullopt;
  return fmt::format("blk.{}.{}", layer, *name);
}

std::optional<std::string_view> GgufIgnoredReason(std::string_view tensor_name) {
  if (tensor_name == kRopeFreqs) return "read into the config";
  if (tensor_name.starts_with("blk.") && tensor_name.ends_with(".attn_rot_embd.weight"))
    return "computed from the config";
  return std::nullopt;
}

}  // namespace switchyard
