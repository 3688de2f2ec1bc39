// The config of GGUF metadata: equal to that of the same model's config.json, key by key refused
// where it is not known.
#include "model/gguf_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <variant>

#include "model/architectures/architecture.h"
#include "testing/gguf.h"
#include "testing/goldens.h"
#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using nlohmann::json;
using testing::ExactBytes;
using testing::ExpectError;
namespace fs = std::filesystem;

// A GGUF file in memory: keys, and tensors of zeros.
struct Content {
  using Value = std::variant<uint32_t, float, bool, std::string, std::vector<int32_t>>;
  struct Tensor {
    std::vector<size_t> shape;
    std::vector<float> values;  // empty = zeros
  };
  std::string architecture;
  std::map<std::string, Value> keys;  // without the architecture in front
  std::map<std::string, Value> general;
  std::map<std::string, Tensor> tensors;
};

class MemoryGguf {
 public:
  explicit MemoryGguf(const Content& content) : bytes_(Bytes(content)) {
    files_ = ModelFiles::FromMemory("memory",
                                    {{"m.gguf", {bytes_.span().data(), bytes_.span().size()}}});
  }
  ModelConfig Read() const { return ReadGgufConfig(GgufModel::Open(files_, "m.gguf")); }

 private:
  static void Set(GgufWriter& writer, const std::string& key, const Content::Value& value) {
    if (const auto* count = std::get_if<uint32_t>(&value)) writer.SetU32(key, *count);
    if (const auto* number = std::get_if<float>(&value)) writer.SetF32(key, *number);
    if (const auto* flag = std::get_if<bool>(&value)) writer.SetFlag(key, *flag);
    if (const auto* text = std::get_if<std::string>(&value)) writer.SetText(key, *text);
    if (const auto* counts = std::get_if<std::vector<int32_t>>(&value))
      writer.SetI32s(key, *counts);
  }

  static std::string Bytes(const Content& content) {
    GgufWriter writer;
    writer.SetText("general.architecture", content.architecture);
    for (const auto& [key, value] : content.general) Set(writer, key, value);
    for (const auto& [key, value] : content.keys)
      Set(writer, content.architecture + "." + key, value);
    for (const auto& [name, tensor] : content.tensors)
      writer.AddTensor(name, DType::kF32, Shape(std::span<const size_t>(tensor.shape)));
    const GgufWriter::Layout layout = writer.Finish();
    std::string bytes = layout.header;
    bytes.resize(layout.file_bytes, '\0');
    size_t i = 0;
    for (const auto& [name, tensor] : content.tensors) {
      char* at = bytes.data() + layout.offsets[i++];
      for (float value : tensor.values) {
        std::memcpy(at, &value, sizeof(value));
        at += sizeof(value);
      }
    }
    return bytes;
  }

  ExactBytes bytes_;
  std::shared_ptr<const ModelFiles> files_;
};

uint32_t Count(const json& config, const std::string& name) { return config.at(name); }

// What the converter of llama.cpp writes for every family.
Content FromHub(const std::string& architecture, const json& config) {
  Content content;
  content.architecture = architecture;
  auto& keys = content.keys;
  keys["block_count"] = Count(config, "num_hidden_layers");
  keys["context_length"] = Count(config, "max_position_embeddings");
  keys["embedding_length"] = Count(config, "hidden_size");
  keys["feed_forward_length"] = Count(config, "intermediate_size");
  keys["attention.head_count"] = Count(config, "num_attention_heads");
  keys["attention.head_count_kv"] = Count(config, "num_key_value_heads");
  keys["attention.layer_norm_rms_epsilon"] = config.at("rms_norm_eps").get<float>();
  keys["rope.freq_base"] = config.at("rope_theta").get<float>();
  keys["vocab_size"] = Count(config, "vocab_size");
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (config.contains(name)) keys["expert_count"] = Count(config, name);
  }
  keys["expert_used_count"] = Count(config, "num_experts_per_tok");
  if (config.contains("n_group")) keys["expert_group_count"] = Count(config, "n_group");
  if (config.contains("topk_group")) keys["expert_group_used_count"] = Count(config, "topk_group");
  if (config.contains("scoring_func"))
    keys["expert_gating_func"] = config.at("scoring_func") == "sigmoid" ? 2u : 1u;
  if (config.contains("head_dim")) {
    keys["attention.key_length"] = Count(config, "head_dim");
    keys["attention.value_length"] = Count(config, "head_dim");
  }
  if (config.contains("rope_scaling") && config["rope_scaling"].is_object()) {
    const json& rope = config["rope_scaling"];
    keys["rope.scaling.type"] = std::string("yarn");
    keys["rope.scaling.factor"] = rope.at("factor").get<float>();
    keys["rope.scaling.original_context_length"] = Count(rope, "original_max_position_embeddings");
    keys["rope.scaling.yarn_beta_fast"] = rope.at("beta_fast").get<float>();
    keys["rope.scaling.yarn_beta_slow"] = rope.at("beta_slow").get<float>();
  }
  content.general["tokenizer.ggml.eos_token_id"] = Count(config, "eos_token_id");
  content.general["general.file_type"] = 15u;
  content.general["general.name"] = std::string("tiny");
  const size_t vocab = Count(config, "vocab_size");
  const size_t hidden = Count(config, "hidden_size");
  content.tensors["token_embd.weight"] = {{vocab, hidden}, {}};
  if (!config.value("tie_word_embeddings", false))
    content.tensors["output.weight"] = {{vocab, hidden}, {}};
  return content;
}

Content DeepseekFromHub(const json& config) {
  Content content = FromHub("deepseek2", config);
  auto& keys = content.keys;
  const uint32_t kv_rank = Count(config, "kv_lora_rank");
  const uint32_t rotary = Count(config, "qk_rope_head_dim");
  keys["attention.head_count_kv"] = 1u;
  keys["leading_dense_block_count"] = Count(config, "first_k_dense_replace");
  if (!config.at("q_lora_rank").is_null())
    keys["attention.q_lora_rank"] = Count(config, "q_lora_rank");
  keys["attention.kv_lora_rank"] = kv_rank;
  keys["attention.key_length"] = kv_rank + rotary;
  keys["attention.value_length"] = kv_rank;
  keys["attention.key_length_mla"] = Count(config, "qk_nope_head_dim") + rotary;
  keys["attention.value_length_mla"] = Count(config, "v_head_dim");
  keys["expert_feed_forward_length"] = Count(config, "moe_intermediate_size");
  keys["expert_shared_count"] = Count(config, "n_shared_experts");
  keys["expert_weights_scale"] = config.at("routed_scaling_factor").get<float>();
  if (config.at("norm_topk_prob")) keys["expert_weights_norm"] = true;
  keys["rope.dimension_count"] = rotary;
  if (config["rope_scaling"].is_object()) {
    keys["rope.scaling.yarn_log_multiplier"] =
        static_cast<float>(0.1 * config["rope_scaling"].at("mscale_all_dim").get<double>());
  }
  if (config.at("scoring_func") == "sigmoid") {
    content.tensors["blk.1.exp_probs_b.bias"] = {{Count(config, "n_routed_experts")}, {}};
  }
  return content;
}

json HubConfig(const std::string& golden) {
  const auto files = ModelFiles::OpenFolder(testing::LocalGoldenDir() / golden / "checkpoint");
  return json::parse(files->ReadText("config.json"));
}

ModelConfig ParseHub(const json& config) {
  return ParseModelConfig(ConfigReader::Parse("config.json", config.dump()));
}

// Equal in all that both kinds of file say; numbers as f32, which GGUF stores.
void ExpectSame(const ModelConfig& a, const ModelConfig& b) {
  const auto near = [](double x, double y) {
    EXPECT_FLOAT_EQ(static_cast<float>(x), static_cast<float>(y));
  };
  EXPECT_EQ(a.architecture, b.architecture);
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  EXPECT_EQ(a.hidden_size, b.hidden_size);
  EXPECT_EQ(a.num_heads, b.num_heads);
  EXPECT_EQ(a.num_kv_heads, b.num_kv_heads);
  EXPECT_EQ(a.head_dim, b.head_dim);
  near(a.score_scale, b.score_scale);
  ASSERT_EQ(a.latent.has_value(), b.latent.has_value());
  if (a.latent) {
    EXPECT_EQ(a.latent->q_rank, b.latent->q_rank);
    EXPECT_EQ(a.latent->kv_rank, b.latent->kv_rank);
    EXPECT_EQ(a.latent->nope_dim, b.latent->nope_dim);
    EXPECT_EQ(a.latent->value_dim, b.latent->value_dim);
  }
  EXPECT_EQ(a.max_positions, b.max_positions);
  near(a.norm_eps, b.norm_eps);
  EXPECT_EQ(a.qk_norm, b.qk_norm);
  EXPECT_EQ(a.attention_bias, b.attention_bias);
  EXPECT_EQ(a.attention_sinks, b.attention_sinks);
  EXPECT_EQ(a.clip_qkv, b.clip_qkv);
  EXPECT_EQ(a.rope.kind, b.rope.kind);
  near(a.rope.theta, b.rope.theta);
  EXPECT_EQ(a.rope.rotary_dim, b.rope.rotary_dim);
  EXPECT_EQ(a.rope.max_positions, b.rope.max_positions);
  near(a.rope.factor, b.rope.factor);
  EXPECT_EQ(a.rope.original_max_positions, b.rope.original_max_positions);
  near(a.rope.attention_factor, b.rope.attention_factor);
  near(a.rope.beta_fast, b.rope.beta_fast);
  near(a.rope.beta_slow, b.rope.beta_slow);
  EXPECT_EQ(a.rope.truncate, b.rope.truncate);
  near(a.rope.mscale_all_dim, b.rope.mscale_all_dim);
  EXPECT_EQ(a.activation, b.activation);
  EXPECT_EQ(a.activation_alpha, b.activation_alpha);
  EXPECT_EQ(a.activation_limit, b.activation_limit);
  EXPECT_EQ(a.dense_intermediate_size, b.dense_intermediate_size);
  EXPECT_EQ(a.moe_intermediate_size, b.moe_intermediate_size);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.scoring_func, b.scoring_func);
  EXPECT_EQ(a.routing, b.routing);
  EXPECT_EQ(a.renormalize, b.renormalize);
  EXPECT_EQ(a.num_expert_groups, b.num_expert_groups);
  EXPECT_EQ(a.top_k_groups, b.top_k_groups);
  EXPECT_EQ(a.router_bias, b.router_bias);
  EXPECT_EQ(a.router_correction_bias, b.router_correction_bias);
  near(a.routed_scaling_factor, b.routed_scaling_factor);
  EXPECT_EQ(a.expert_bias, b.expert_bias);
  EXPECT_EQ(a.shared_intermediate_size, b.shared_intermediate_size);
  EXPECT_EQ(a.tie_word_embeddings, b.tie_word_embeddings);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) {
    EXPECT_EQ(a.layers[i].is_moe, b.layers[i].is_moe) << i;
    EXPECT_EQ(a.layers[i].window, b.layers[i].window) << i;
  }
}

ModelConfig Read(const Content& content) { return MemoryGguf(content).Read(); }

TEST(GgufConfig, EqualsThatOfTheGoldens) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t num_read = 0;
  for (const auto& golden : fs::directory_iterator(*testing::GoldenDir() / "gguf")) {
    if (!golden.is_directory()) continue;
    SCOPED_TRACE(golden.path());
    const auto files = ModelFiles::OpenFolder(golden.path());
    const json manifest = json::parse(files->ReadText("manifest.json"));
    const ModelConfig expected = ParseHub(manifest.at("equivalent_hub_config"));
    const GgufModel gguf = testing::OpenGguf(golden.path());
    const ModelConfig found = ReadGgufConfig(gguf);
    ExpectSame(found, expected);
    EXPECT_FALSE(found.rope.interleaved);
    EXPECT_FALSE(found.experts_are_transposed);
    EXPECT_EQ(found.eos_ids, std::vector<size_t>{287});
    // Every tensor has the hub's name of something that is asked for.
    for (const auto& tensor : gguf.tensors())
      EXPECT_FALSE(GgufIgnoredReason(tensor.info->name)) << tensor.info->name;
    EXPECT_NE(gguf.Find(*GgufTensorName(manifest.at("gguf_architecture").get<std::string>(),
                                        "model.layers.0.mlp.experts.gate_proj")),
              nullptr);
    ++num_read;
  }
  EXPECT_GE(num_read, 20u);
}

Content Olmoe() {
  json config = HubConfig("olmoe_clip");
  Content content = FromHub("olmoe", config);
  content.keys["attention.clamp_kqv"] = config.at("clip_qkv").get<float>();
  return content;
}

TEST(GgufConfig, Olmoe) {
  json config = HubConfig("olmoe_clip");
  // The published model does not renormalise, and its converter has no key for it.
  config["norm_topk_prob"] = false;
  ModelConfig found = Read(Olmoe());
  ExpectSame(found, ParseHub(config));
  EXPECT_EQ(found.clip_qkv, 1.0);
  Content content = Olmoe();
  content.keys["expert_weights_norm"] = true;
  EXPECT_TRUE(Read(content).renormalize);
  content.keys["attention.clamp_kqv"] = 0.0f;
  EXPECT_FALSE(Read(content).clip_qkv.has_value());
}

Content Qwen3() {
  const json config = HubConfig("qwen3_moe_with_tokenizer");
  Content content = FromHub("qwen3moe", config);
  content.keys["expert_feed_forward_length"] = Count(config, "moe_intermediate_size");
  return content;
}

TEST(GgufConfig, Qwen3Moe) {
  json config = HubConfig("qwen3_moe_with_tokenizer");
  config["norm_topk_prob"] = true;
  config["mlp_only_layers"] = json::array();
  config["decoder_sparse_step"] = 1;
  ExpectSame(Read(Qwen3()), ParseHub(config));
  Content biased = Qwen3();
  biased.tensors["blk.0.attn_q.bias"] = {{8}, {}};
  EXPECT_TRUE(Read(biased).attention_bias);
}

Content Mixtral() {
  Content content = FromHub("llama", HubConfig("mixtral_swa"));
  content.keys["attention.sliding_window"] = 8u;
  content.keys["rope.dimension_count"] = 12u;
  return content;
}

TEST(GgufConfig, Mixtral) {
  const ModelConfig found = Read(Mixtral());
  ExpectSame(found, ParseHub(HubConfig("mixtral_swa")));
  EXPECT_TRUE(found.rope.interleaved);
  EXPECT_TRUE(found.tie_word_embeddings);
  EXPECT_EQ(found.layers.at(1).window, 8u);
  Content dense = Mixtral();
  dense.keys.erase("expert_count");
  ExpectError(ErrorCode::kUnsupported, {"m.gguf", "llama.expert_count", "dense"},
              [&] { Read(dense); });
}

TEST(GgufConfig, RopeFreqsDivideFrequencies) {
  Content content = Mixtral();
  content.tensors["rope_freqs.weight"] = {{6}, {1, 1, 2, 4, 8, 8}};
  const RopeConfig rope = Read(content).rope;
  EXPECT_EQ(rope.kind, RopeConfig::Kind::kLongrope);
  EXPECT_EQ(rope.short_factors, (std::vector<double>{1, 1, 2, 4, 8, 8}));
  EXPECT_EQ(rope.long_factors, rope.short_factors);
  EXPECT_EQ(rope.attention_factor, 1.0);
  content.tensors["rope_freqs.weight"] = {{5}, {1, 1, 2, 4, 8}};
  ExpectError(ErrorCode::kUnsupported, {"rope_freqs.weight", "[6]", "[5]"}, [&] { Read(content); });
  content.tensors["rope_freqs.weight"] = {{6}, {1, 1, 2, 0, 8, 8}};
  ExpectError(ErrorCode::kUnsupported, {"rope_freqs.weight", "factor is 0"},
              [&] { Read(content); });
}

TEST(GgufConfig, DeepseekV3) {
  json config = HubConfig("deepseek_v3");
  const ModelConfig found = Read(DeepseekFromHub(config));
  ModelConfig expected = ParseHub(config);
  EXPECT_EQ(expected.num_draft_layers, 1u);  // which the converter leaves out
  ExpectSame(found, expected);
  EXPECT_TRUE(found.rope.interleaved);
  EXPECT_EQ(found.num_draft_layers, 0u);
  EXPECT_EQ(found.rope.mscale_all_dim, 1.0);
  EXPECT_TRUE(found.router_correction_bias);
  EXPECT_EQ(found.num_expert_groups, 4u);

  Content with_draft = DeepseekFromHub(config);
  with_draft.keys["nextn_predict_layers"] = 1u;
  with_draft.keys["block_count"] = 4u;
  EXPECT_EQ(Read(with_draft).num_draft_layers, 1u);
  EXPECT_EQ(Read(with_draft).layers.size(), 3u);
}

TEST(GgufConfig, DeepseekV2Lite) {
  const json config = HubConfig("deepseek_v2_lite");
  const ModelConfig found = Read(DeepseekFromHub(config));
  ExpectSame(found, ParseHub(config));
  EXPECT_EQ(found.rope.mscale_all_dim, 0.707);
  EXPECT_EQ(found.latent->q_rank, 0u);

  // As files of before April 2025 have it: sizes of heads, a key head for each, no gating function.
  Content old = DeepseekFromHub(config);
  old.keys.erase("attention.key_length_mla");
  old.keys.erase("attention.value_length_mla");
  old.keys.erase("expert_gating_func");
  old.keys.erase("expert_group_count");
  old.keys.erase("expert_group_used_count");
  old.keys["attention.key_length"] = 24u;
  old.keys["attention.value_length"] = 16u;
  old.keys["attention.head_count_kv"] = 4u;
  ExpectSame(Read(old), ParseHub(config));
}

TEST(GgufConfig, DeepseekV2WithGroups) {
  json config = HubConfig("deepseek_v2_lite");
  config["topk_method"] = "group_limited_greedy";
  config["n_group"] = 4;
  config["topk_group"] = 2;
  config["routed_scaling_factor"] = 16.0;
  config["q_lora_rank"] = 24;
  ExpectSame(Read(DeepseekFromHub(config)), ParseHub(config));
}

// A file whose scores are not named is refused where softmax would be a guess.
TEST(GgufConfig, AMissingGatingFunctionIsNotGuessed) {
  Content content = DeepseekFromHub(HubConfig("deepseek_v3"));
  content.keys.erase("expert_gating_func");
  ExpectError(ErrorCode::kCorruptData, {"m.gguf", "deepseek2.expert_gating_func", "missing"},
              [&] { Read(content); });
  content.keys["expert_gating_func"] = 3u;
  ExpectError(ErrorCode::kUnsupported, {"deepseek2.expert_gating_func"}, [&] { Read(content); });
  content.keys["expert_gating_func"] = 2u;
  content.keys.erase("expert_weights_scale");
  ExpectError(ErrorCode::kCorruptData, {"deepseek2.expert_weights_scale", "missing"},
              [&] { Read(content); });
}

Content GptOss() {
  const json config = HubConfig("gpt_oss");
  Content content = FromHub("gpt-oss", config);
  content.keys["attention.sliding_window"] = Count(config, "sliding_window");
  content.keys["expert_feed_forward_length"] = Count(config, "intermediate_size");
  content.tensors["blk.0.attn_q.bias"] = {{8}, {}};
  return content;
}

TEST(GgufConfig, GptOss) {
  ModelConfig expected = ParseHub(HubConfig("gpt_oss"));
  EXPECT_TRUE(expected.experts_are_transposed);
  const ModelConfig found = Read(GptOss());
  ExpectSame(found, expected);
  EXPECT_FALSE(found.experts_are_transposed);

  Content pattern = GptOss();
  pattern.keys["attention.sliding_window_pattern"] = std::vector<int32_t>{0, 0, 1, 1};
  EXPECT_EQ(Read(pattern).layers.at(1).window, 0u);
  EXPECT_EQ(Read(pattern).layers.at(3).window, 8u);
  pattern.keys["attention.sliding_window_pattern"] = 4u;
  EXPECT_EQ(Read(pattern).layers.at(2).window, 8u);
  EXPECT_EQ(Read(pattern).layers.at(3).window, 0u);
  pattern.keys["attention.sliding_window_pattern"] = std::vector<int32_t>{0, 0, 1};
  ExpectError(ErrorCode::kCorruptData, {"sliding_window_pattern", "4 layers"},
              [&] { Read(pattern); });
}

TEST(GgufConfig, StopIdsAreThoseOfTextAndTurn) {
  Content content = Qwen3();
  content.general["tokenizer.ggml.eos_token_id"] = 5u;
  content.general["tokenizer.ggml.eot_token_id"] = 7u;
  EXPECT_EQ(Read(content).eos_ids, (std::vector<size_t>{5, 7}));
  content.general["tokenizer.ggml.eot_token_id"] = 5u;
  EXPECT_EQ(Read(content).eos_ids, std::vector<size_t>{5});
  content.general["tokenizer.ggml.eot_token_id"] = UINT32_MAX;
  EXPECT_EQ(Read(content).eos_ids, std::vector<size_t>{5});
  content.general["tokenizer.ggml.eot_token_id"] = 100000u;
  ExpectError(ErrorCode::kCorruptData, {"eot_token_id", "100000"}, [&] { Read(content); });
}

TEST(GgufConfig, LinearScalingInBothSpellings) {
  Content content = Qwen3();
  content.keys["rope.scaling.type"] = std::string("linear");
  content.keys["rope.scaling.factor"] = 4.0f;
  EXPECT_EQ(Read(content).rope.kind, RopeConfig::Kind::kLinear);
  EXPECT_EQ(Read(content).rope.factor, 4.0);
  content.keys.erase("rope.scaling.type");
  EXPECT_EQ(Read(content).rope.kind, RopeConfig::Kind::kLinear);
  content.keys.erase("rope.scaling.factor");
  content.keys["rope.scale_linear"] = 2.0f;
  EXPECT_EQ(Read(content).rope.factor, 2.0);
  content.keys["rope.scale_linear"] = 0.0f;
  EXPECT_EQ(Read(content).rope.kind, RopeConfig::Kind::kDefault);
}

TEST(GgufConfig, YarnOfOtherFamilies) {
  Content content = Qwen3();
  content.keys["rope.scaling.type"] = std::string("yarn");
  content.keys["rope.scaling.factor"] = 4.0f;
  content.keys["rope.scaling.original_context_length"] = 128u;
  const RopeConfig rope = Read(content).rope;
  EXPECT_EQ(rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_DOUBLE_EQ(rope.attention_factor, 0.1 * std::log(4.0) + 1.0);
  EXPECT_TRUE(rope.truncate);
  content.keys["rope.scaling.yarn_attn_factor"] = 1.5f;
  EXPECT_EQ(Read(content).rope.attention_factor, 1.5);
}

// Each change makes a good file one that is refused with all of the words.
TEST(GgufConfig, FaultyAndUnknownKeysAreNamed) {
  using Change = std::function<void(Content&)>;
  struct Case {
    ErrorCode code;
    std::vector<std::string_view> words;
    Change change;
  };
  const auto set = [](std::string key, Content::Value value) -> Change {
    return [key, value](Content& content) { content.keys[key] = value; };
  };
  const auto erase = [](std::string key) -> Change {
    return [key](Content& content) { content.keys.erase(key); };
  };
  constexpr auto kCorrupt = ErrorCode::kCorruptData;
  constexpr auto kUnsupported = ErrorCode::kUnsupported;
  std::vector<Case> cases;
  for (const char* key :
       {"block_count", "context_length", "embedding_length", "attention.head_count",
        "attention.layer_norm_rms_epsilon", "expert_count", "expert_used_count",
        "expert_feed_forward_length", "rope.freq_base"})
    cases.push_back({kCorrupt, {"qwen3moe.", key, "is missing"}, erase(key)});
  for (const char* key : {"logit_scale", "attention.scale", "expert_shared_feed_forward_length",
                          "use_parallel_residual", "attention.indexer.top_k",
                          "rope.dimension_sections", "final_logit_softcapping", "novelty"})
    cases.push_back({kUnsupported, {"unknown metadata keys", key}, set(key, 1u)});
  cases.push_back({kUnsupported, {"attention.causal"}, set("attention.causal", false)});
  cases.push_back({kUnsupported, {"expert_gating_func"}, set("expert_gating_func", 2u)});
  cases.push_back({kUnsupported, {"expert_group_count"}, set("expert_group_count", 4u)});
  cases.push_back({kUnsupported,
                   {"rope.scaling.type", "longrope"},
                   set("rope.scaling.type", std::string("longrope"))});
  cases.push_back({kUnsupported, {"rope.dimension_count"}, set("rope.dimension_count", 2u)});
  cases.push_back({kUnsupported, {"value_length"}, set("attention.value_length", 6u)});
  cases.push_back({kUnsupported, {"key_length", "7"}, [](Content& content) {
                     content.keys["attention.key_length"] = 7u;
                     content.keys["attention.value_length"] = 7u;
                   }});
  cases.push_back({kCorrupt, {"head_count_kv", "divide"}, set("attention.head_count_kv", 3u)});
  cases.push_back({kUnsupported,
                   {"head_count", "same for all layers"},
                   set("attention.head_count", std::vector<int32_t>{4, 8})});
  cases.push_back({kCorrupt, {"expert_used_count"}, set("expert_used_count", 60000u)});
  cases.push_back({kCorrupt, {"block_count", "string"}, set("block_count", std::string("two"))});
  cases.push_back({kCorrupt, {"vocab_size", "rows"}, set("vocab_size", 7u)});
  cases.push_back({kCorrupt, {"token_embd.weight", "missing"}, [](Content& content) {
                     content.tensors.erase("token_embd.weight");
                   }});
  cases.push_back({kUnsupported,
                   {"general.architecture", "\"grok\"", "olmoe", "gpt-oss"},
                   [](Content& content) { content.architecture = "grok"; }});
  cases.push_back({kUnsupported, {"general.type", "adapter"}, [](Content& content) {
                     content.general["general.type"] = std::string("adapter");
                   }});
  for (const Case& each : cases) {
    Content content = Qwen3();
    each.change(content);
    const std::string message = ExpectError(each.code, {"m.gguf"}, [&] { Read(content); });
    for (std::string_view word : each.words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " is missing in: " << message;
  }
  Content harmless = Qwen3();
  harmless.keys["rope.scaling.finetuned"] = true;
  harmless.keys["tensor_data_layout"] = std::string("Meta AI original pth");
  EXPECT_NO_THROW(Read(harmless));
}

TEST(GgufConfig, DeepseekContradictionsAreNamed) {
  const auto refused = [](std::string_view word, const std::string& key, Content::Value value) {
    Content content = DeepseekFromHub(HubConfig("deepseek_v3"));
    content.keys[key] = std::move(value);
    try {
      Read(content);
      ADD_FAILURE() << key << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("deepseek2." + key), std::string::npos) << error.message();
      EXPECT_NE(error.message().find(word), std::string::npos) << error.message();
    }
  };
  refused("latent row", "attention.key_length", 41u);
  refused("kv_lora_rank", "attention.value_length", 33u);
  refused("rotated", "attention.key_length_mla", 8u);
  refused("divided", "expert_group_count", 5u);
  refused("cannot give", "expert_group_used_count", 0u);
  refused("even", "rope.dimension_count", 7u);
  refused("log_multiplier", "rope.scaling.yarn_attn_factor", 1.5f);
  refused("whole of the stretch", "rope.scaling.yarn_ext_factor", 0.5f);
  refused("no other layers", "nextn_predict_layers", 3u);
}

// What gguf-py's table of names gives.
TEST(GgufTensorName, EqualsTheTableOfTheFormat) {
  struct Pair {
    std::string_view hub;
    std::optional<std::string> gguf;
  };
  const Pair pairs[] = {
      {"model.embed_tokens.weight", "token_embd.weight"},
      {"model.norm.weight", "output_norm.weight"},
      {"lm_head.weight", "output.weight"},
      {"model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight"},
      {"model.layers.13.self_attn.k_proj.bias", "blk.13.attn_k.bias"},
      {"model.layers.3.self_attn.v_proj.weight", "blk.3.attn_v.weight"},
      {"model.layers.3.self_attn.o_proj.bias", "blk.3.attn_output.bias"},
      {"model.layers.3.self_attn.q_norm.weight", "blk.3.attn_q_norm.weight"},
      {"model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"},
      {"model.layers.3.self_attn.sinks", "blk.3.attn_sinks.weight"},
      {"model.layers.3.self_attn.q_a_proj.weight", "blk.3.attn_q_a.weight"},
      {"model.layers.3.self_attn.q_a_layernorm.weight", "blk.3.attn_q_a_norm.weight"},
      {"model.layers.3.self_attn.q_b_proj.weight", "blk.3.attn_q_b.weight"},
      {"model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "blk.3.attn_kv_a_mqa.weight"},
      {"model.layers.3.self_attn.kv_a_layernorm.weight", "blk.3.attn_kv_a_norm.weight"},
      {"model.layers.3.self_attn.kv_b_proj.weight", "blk.3.attn_kv_b.weight"},
      {"model.layers.3.self_attn.k_b_proj.weight", "blk.3.attn_k_b.weight"},
      {"model.layers.3.self_attn.v_b_proj.weight", "blk.3.attn_v_b.weight"},
      {"model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"},
      {"model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"},
      {"model.layers.3.mlp.gate.weight", "blk.3.ffn_gate_inp.weight"},
      {"model.layers.3.mlp.router.bias", "blk.3.ffn_gate_inp.bias"},
      {"model.layers.3.block_sparse_moe.gate.weight", "blk.3.ffn_gate_inp.weight"},
      {"model.layers.3.mlp.gate.e_score_correction_bias", "blk.3.exp_probs_b.bias"},
      {"model.layers.3.mlp.gate_proj.weight", "blk.3.ffn_gate.weight"},
      {"model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"},
      {"model.layers.3.mlp.shared_experts.up_proj.weight", "blk.3.ffn_up_shexp.weight"},
      {"model.layers.3.mlp.experts.gate_proj", "blk.3.ffn_gate_exps.weight"},
      {"model.layers.3.mlp.experts.up_proj.weight", "blk.3.ffn_up_exps.weight"},
      {"model.layers.3.mlp.experts.down_proj_bias", "blk.3.ffn_down_exps.bias"},
      {"model.layers.3.mlp.experts.gate_proj.bias", "blk.3.ffn_gate_exps.bias"},
      {"model.layers.3.block_sparse_moe.experts.w3", "blk.3.ffn_up_exps.weight"},
      {"model.layers.3.block_sparse_moe.experts.11.w2.weight", "blk.3.ffn_down.11.weight"},
      {"model.layers.3.mlp.experts.0.up_proj.weight", "blk.3.ffn_up.0.weight"},
      {"model.layers.3.mlp.experts.gate_up_proj", std::nullopt},
      {"model.layers.3.self_attn.rotary_emb.inv_freq", std::nullopt},
      {"model.layers.3.self_attn.q_proj", std::nullopt},
      {"model.layers.3.mlp.experts.", std::nullopt},
      {"model.layers.x.mlp.gate.weight", std::nullopt},
      {"model.layers.3", std::nullopt},
      {"model.layers.", std::nullopt},
      {"", std::nullopt},
  };
  for (const Pair& pair : pairs) {
    for (const char* architecture : {"olmoe", "qwen3moe", "llama", "deepseek2"})
      EXPECT_EQ(GgufTensorName(architecture, pair.hub), pair.gguf) << pair.hub;
    EXPECT_EQ(GgufTensorName("grok", pair.hub), std::nullopt);
  }
  EXPECT_EQ(GgufTensorName("gpt-oss", "model.layers.3.post_attention_layernorm.weight"),
            "blk.3.post_attention_norm.weight");
  EXPECT_EQ(GgufTensorName("gpt-oss", "model.layers.3.input_layernorm.weight"),
            "blk.3.attn_norm.weight");
}

TEST(GgufTensorName, SomeTensorsAreNoWeights) {
  EXPECT_TRUE(GgufIgnoredReason("rope_freqs.weight"));
  EXPECT_TRUE(GgufIgnoredReason("blk.0.attn_rot_embd.weight"));
  EXPECT_FALSE(GgufIgnoredReason("blk.0.attn_q.weight"));
}

}  // namespace
}  // namespace switchyard
