#include "model/architectures/architecture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/rope.h"
#include "switchyard/core/error.h"

namespace switchyard {

#define SY_ARCHITECTURE(name) extern const ArchitectureEntry name##_architecture;
#include "model/architectures/architectures.def"
#undef SY_ARCHITECTURE

namespace {

constexpr const ArchitectureEntry* kArchitectures[] = {
#define SY_ARCHITECTURE(name) &name##_architecture,
#include "model/architectures/architectures.def"
#undef SY_ARCHITECTURE
};

}  // namespace

std::span<const ArchitectureEntry* const> AllArchitectures() { return kArchitectures; }

size_t ModelConfig::num_moe_layers() const {
  return static_cast<size_t>(
      std::count_if(layers.begin(), layers.end(), [](const LayerConfig& l) { return l.is_moe; }));
}

ModelConfig ParseModelConfig(ConfigReader config) {
  const std::string model_type = config.Text("model_type", "");
  const std::vector<std::string> classes =
      config.Has("architectures") ? config.Texts("architectures") : std::vector<std::string>{};
  const std::string classes_text = QuoteForMessage(fmt::format("{}", fmt::join(classes, ", ")));
  for (const ArchitectureEntry* entry : kArchitectures) {
    if (model_type != entry->name) continue;
    if (!classes.empty() && (classes.size() != 1 || classes[0] != entry->class_name)) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: model_type {} goes with architectures [\"{}\"], found {}",
                              config.file_name(), entry->name, entry->class_name, classes_text));
    }
    ModelConfig result = entry->parse(config);
    result.architecture = entry->name;
    config.Finish();
    return result;
  }
  std::vector<std::string> known;
  for (const ArchitectureEntry* entry : kArchitectures)
    known.push_back(fmt::format("{} ({})", entry->name, entry->class_name));
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}: unknown architecture: model_type {}, architectures {}; known are: {}",
                  config.file_name(), QuoteForMessage(model_type), classes_text,
                  fmt::join(known, ", ")));
}

KvShape ModelConfig::kv_shape() const {
  if (latent) return {1, latent->kv_rank + rope.rotary_dim, 0};
  return {num_kv_heads, head_dim, head_dim};
}

namespace {

ModelConfig ParseSizes(ConfigReader& config) {
  ModelConfig model;
  model.vocab_size = config.Count("vocab_size", 1, kMaxSize);
  model.hidden_size = config.Count("hidden_size", 1, kMaxSize);
  model.layers.resize(config.Count("num_hidden_layers", 1, 10000));
  model.num_heads = config.Count("num_attention_heads", 1, 65536);
  model.num_kv_heads = config.Count("num_key_value_heads", 1, 65536, model.num_heads);
  if (model.num_heads % model.num_kv_heads != 0) {
    config.Refuse("num_key_value_heads",
                  fmt::format("it must divide num_attention_heads ({})", model.num_heads));
  }
  if (model.num_heads / model.num_kv_heads > kMaxHeadGroup) {
    config.Refuse("num_key_value_heads",
                  fmt::format("at most {} query heads may share a key-value head", kMaxHeadGroup));
  }
  return model;
}

void ParseRest(ConfigReader& config, double default_theta, size_t rotary_dim, ModelConfig& model);

}  // namespace

ModelConfig ParseCommonConfig(ConfigReader& config, double default_theta) {
  ModelConfig model = ParseSizes(config);
  model.head_dim = config.Count("head_dim", 1, 65536, model.hidden_size / model.num_heads);
  if (model.head_dim == 0 || model.head_dim % 2 != 0) {
    config.Refuse(
        config.Has("head_dim") ? "head_dim" : "num_attention_heads",
        fmt::format("the head size must be even to be rotated, found {}", model.head_dim));
  }
  ParseRest(config, default_theta, model.head_dim, model);
  return model;
}

ModelConfig ParseCommonConfig(ConfigReader& config, double default_theta, size_t head_dim,
                              size_t rotary_dim) {
  ModelConfig model = ParseSizes(config);
  model.head_dim = head_dim;
  config.Ignore({"head_dim"});  // says one thing or another, never what the parts do not say
  ParseRest(config, default_theta, rotary_dim, model);
  return model;
}

namespace {

void ParseRest(ConfigReader& config, double default_theta, size_t rotary_dim, ModelConfig& model) {
  model.max_positions = config.Count("max_position_embeddings", 1, size_t{1} << 30);
  model.norm_eps = config.Number("rms_norm_eps", 0.0, 1.0);
  model.tie_word_embeddings = config.Flag("tie_word_embeddings", false);
  if (config.Text("hidden_act", "silu") != "silu")
    config.Refuse("hidden_act", "this architecture is computed with silu only");
  model.eos_ids = config.Counts("eos_token_id", 0, kMaxSize, {});
  model.rope = ParseRope(config, rotary_dim, model.max_positions, default_theta);
  if (model.rope.kind == RopeConfig::Kind::kDynamic) {
    // max_position_embeddings is the trained length; the factor says how far it may be stretched.
    model.max_positions = static_cast<size_t>(static_cast<double>(model.max_positions) *
                                              std::max(1.0, model.rope.factor));
  }
  config.Ignore({"quantization_config",  // read by ReadQuantization
                 "compression_config",
                 "quantize",
                 "bos_token_id",
                 "pad_token_id",
                 "unk_token_id",
                 "sep_token_id",
                 "torch_dtype",
                 "dtype",
                 "transformers_version",
                 "use_cache",
                 "initializer_range",
                 "attention_dropout",
                 "hidden_dropout",
                 "output_router_logits",
                 "router_aux_loss_coef",
                 "router_jitter_noise",
                 "_name_or_path",
                 "auto_map",
                 "pretraining_tp",
                 "use_flash_attn",
                 "_attn_implementation",
                 "attn_implementation",
                 "output_attentions",
                 "output_hidden_states",
                 "return_dict",
                 "chunk_size_feed_forward",
                 "is_encoder_decoder",
                 "id2label",
                 "label2id",
                 "problem_type",
                 "torchscript",
                 "tokenizer_class",
                 "is_decoder",
                 "add_cross_attention",
                 "task_specific_params",
                 "name_or_path"});
}

}  // namespace

}  // namespace switchyard
