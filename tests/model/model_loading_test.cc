// Whole folders: both layouts of experts, tied heads, and everything that must be refused by name.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "switchyard/core/cpu.h"
#include "switchyard/core/log.h"
#include "switchyard/model/model.h"
#include "testing/errors.h"
#include "testing/goldens.h"
#include "testing/model_folder.h"
#include "testing/model_logits.h"

namespace switchyard {
namespace {

using testing::ExpectError;
using testing::ModelFolder;

class ModelLoading : public ::testing::Test {
 protected:
  static std::filesystem::path Golden(const std::string& name) {
    return testing::LocalGoldenDir() / name / "checkpoint";
  }

  std::unique_ptr<Model> Load(const ModelFolder& folder) {
    ModelOptions options;
    options.moe.act_dtype = "f32";
    return Model::Load(folder.Write(), options, pool_);
  }

  std::vector<float> Logits(Model& model) { return testing::LogitsOf(model, pool_); }

  // The experts of every layer as two banks, in the layout of transformers 5.
  static void StackExperts(ModelFolder& folder, const std::string& block, const std::string& gate,
                           const std::string& up, const std::string& down, size_t layers,
                           size_t experts) {
    for (size_t layer = 0; layer < layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      ModelFolder::Tensor gate_up;
      ModelFolder::Tensor downs;
      for (size_t e = 0; e < experts; ++e) {
        const std::string expert = prefix + block + ".experts." + std::to_string(e) + ".";
        for (const std::string& part : {gate, up}) {
          const ModelFolder::Tensor& tensor = folder.tensors.at(expert + part + ".weight");
          gate_up.dtype = tensor.dtype;
          gate_up.shape = {experts, 2 * tensor.shape[0], tensor.shape[1]};
          gate_up.bytes.insert(gate_up.bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
          folder.tensors.erase(expert + part + ".weight");
        }
        const ModelFolder::Tensor& tensor = folder.tensors.at(expert + down + ".weight");
        downs.dtype = tensor.dtype;
        downs.shape = {experts, tensor.shape[0], tensor.shape[1]};
        downs.bytes.insert(downs.bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
        folder.tensors.erase(expert + down + ".weight");
      }
      folder.tensors[prefix + "mlp.experts.gate_up_proj"] = std::move(gate_up);
      folder.tensors[prefix + "mlp.experts.down_proj"] = std::move(downs);
      if (block != "mlp")
        folder.Rename(prefix + block + ".gate.weight", prefix + "mlp.gate.weight");
    }
  }

  ThreadPool pool_{2};
};

TEST_F(ModelLoading, StackedAndSeparateExpertsGiveTheSameBits) {  // bug-log 46
  ModelFolder separate(Golden("olmoe_clip"));
  const std::vector<float> expected = Logits(*Load(separate));
  ModelFolder stacked(Golden("olmoe_clip"));
  StackExperts(stacked, "mlp", "gate_proj", "up_proj", "down_proj", 2, 8);
  EXPECT_EQ(Logits(*Load(stacked)), expected);

  ModelFolder mixtral(Golden("mixtral_swa"));
  const std::vector<float> mixtral_expected = Logits(*Load(mixtral));
  ModelFolder mixtral_stacked(Golden("mixtral_swa"));
  StackExperts(mixtral_stacked, "block_sparse_moe", "w1", "w3", "w2", 2, 5);
  EXPECT_EQ(Logits(*Load(mixtral_stacked)), mixtral_expected);
}

TEST_F(ModelLoading, MissingAndUnusedTensorsAreListedTogether) {
  ModelFolder folder(Golden("olmoe_clip"));
  folder.tensors.erase("model.layers.1.mlp.experts.3.up_proj.weight");
  folder.Rename("model.layers.0.self_attn.q_norm.weight",
                "model.layers.0.self_attn.query_norm.weight");
  ExpectError(
      ErrorCode::kCorruptData,
      {"model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.self_attn.q_norm.weight",
       "model.layers.0.self_attn.query_norm.weight"},
      [&] { Load(folder); });
}

TEST_F(ModelLoading, WrongShapesAndTypesAreNamed) {
  ModelFolder folder(Golden("olmoe_clip"));
  folder.tensors.at("model.layers.0.mlp.experts.1.up_proj.weight").shape = {48, 32};
  ExpectError(ErrorCode::kCorruptData,
              {"model.layers.0.mlp.experts.1.up_proj.weight", "[32, 48]", "[48, 32]"},
              [&] { Load(folder); });

  ModelFolder mixed(Golden("olmoe_clip"));
  mixed.tensors.at("model.layers.0.mlp.experts.1.up_proj.weight").dtype = DType::kF16;
  ExpectError(ErrorCode::kUnsupported, {"model.layers.0.mlp.experts.1", "F16", "BF16"},
              [&] { Load(mixed); });

  ModelFolder norm(Golden("olmoe_clip"));  // bug-log 61: a norm of the other size
  norm.tensors.at("model.layers.0.self_attn.q_norm.weight").shape = {12};
  norm.tensors.at("model.layers.0.self_attn.q_norm.weight").bytes.resize(24);
  ExpectError(ErrorCode::kCorruptData, {"q_norm", "[48]", "[12]"}, [&] { Load(norm); });
}

TEST_F(ModelLoading, TiedAndUntiedHeads) {  // bug-log 44, 45
  ModelFolder tied(Golden("mixtral_swa"));
  const std::vector<float> expected = Logits(*Load(tied));

  std::vector<std::string> warnings;
  SetLogSink([&](LogLevel, std::string_view message, auto) { warnings.emplace_back(message); },
             LogLevel::kWarning);
  ModelFolder with_head(Golden("mixtral_swa"));
  with_head.tensors["lm_head.weight"] = with_head.tensors.at("model.embed_tokens.weight");
  std::fill(with_head.tensors["lm_head.weight"].bytes.begin(),
            with_head.tensors["lm_head.weight"].bytes.end(), std::byte{0});
  EXPECT_EQ(Logits(*Load(with_head)), expected) << "the config decides: the embedding is used";
  SetLogSink({}, LogLevel::kWarning);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("lm_head.weight"), std::string::npos);

  ModelFolder untied(Golden("mixtral_swa"));
  untied.config["tie_word_embeddings"] = false;
  ExpectError(ErrorCode::kCorruptData, {"lm_head.weight"}, [&] { Load(untied); });
}

TEST_F(ModelLoading, OldRotaryBuffersAreKnown) {
  ModelFolder folder(Golden("mixtral_swa"));
  folder.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
      DType::kF32, {6}, std::vector<std::byte>(24)};
  EXPECT_NO_THROW(Load(folder));
}

TEST_F(ModelLoading, NanWeightsAreNamedAndStillLoad) {
  ModelFolder folder(Golden("olmoe_clip"));
  auto& bytes = folder.tensors.at("model.layers.1.mlp.experts.2.down_proj.weight").bytes;
  const uint16_t nan = 0x7fc0;
  const uint16_t inf = 0xff80;
  std::memcpy(bytes.data() + 10, &nan, 2);
  std::memcpy(bytes.data() + 20, &inf, 2);
  std::vector<std::string> warnings;
  SetLogSink([&](LogLevel, std::string_view message, auto) { warnings.emplace_back(message); },
             LogLevel::kWarning);
  const std::unique_ptr<Model> model = Load(folder);
  SetLogSink({}, LogLevel::kWarning);
  ASSERT_EQ(model->bad_tensors().size(), 1u);
  EXPECT_EQ(warnings, model->bad_tensors());
  EXPECT_NE(warnings[0].find("model.layers.1.mlp.experts.2.down_proj.weight: 1 NaN and 1 infinite "
                             "values, the first at element 5"),
            std::string::npos)
      << warnings[0];
}

TEST_F(ModelLoading, ConfigFieldsAreUsedKnownOrRefused) {
  const auto with = [](const std::string& golden, const std::string& field,
                       nlohmann::ordered_json value) {
    auto folder = std::make_unique<ModelFolder>(Golden(golden));
    folder->config[field] = std::move(value);
    return folder;
  };
  ExpectError(ErrorCode::kUnsupported, {"config.json", "attention_sink_size", "4"},
              [&] { Load(*with("olmoe_clip", "attention_sink_size", 4)); });
  ExpectError(ErrorCode::kUnsupported, {"model_type", "gpt_neo", "qwen3_moe", "mixtral", "olmoe"},
              [&] { Load(*with("olmoe_clip", "model_type", "gpt_neo")); });
  ExpectError(ErrorCode::kUnsupported, {"BertForMaskedLM", "OlmoeForCausalLM"},
              [&] { Load(*with("olmoe_clip", "architectures", {"BertForMaskedLM"})); });
  for (const nlohmann::ordered_json& top_k : {nlohmann::ordered_json(0), nlohmann::ordered_json(9),
                                              nlohmann::ordered_json(2147483648u)}) {
    ExpectError(ErrorCode::kCorruptData, {"num_experts_per_tok", "8", top_k.dump()},  // bug-log 11
                [&] { Load(*with("olmoe_clip", "num_experts_per_tok", top_k)); });
  }
  ExpectError(ErrorCode::kUnsupported, {"hidden_act", "gelu"},
              [&] { Load(*with("olmoe_clip", "hidden_act", "gelu")); });
  ExpectError(ErrorCode::kUnsupported, {"quant_method", "exl2", "known are", "fp8", "awq"}, [&] {
    Load(*with("olmoe_clip", "quantization_config", {{"quant_method", "exl2"}}));
  });
  ExpectError(ErrorCode::kUnsupported, {"num_key_value_heads", "3"},
              [&] { Load(*with("olmoe_clip", "num_key_value_heads", 3)); });
  ExpectError(ErrorCode::kCorruptData, {"hidden_size"},
              [&] { Load(*with("olmoe_clip", "hidden_size", 0)); });
  ExpectError(ErrorCode::kCorruptData, {"rms_norm_eps"},
              [&] { Load(*with("olmoe_clip", "rms_norm_eps", "small")); });
  ExpectError(
      ErrorCode::kUnsupported, {"rope_scaling", "telechat3-yarn", "longrope"},  // bug-log 63
      [&] {
        Load(*with("olmoe_clip", "rope_scaling", {{"rope_type", "telechat3-yarn"}, {"factor", 2}}));
      });
  ExpectError(ErrorCode::kUnsupported, {"rope_scaling.beta_medium"}, [&] {
    Load(*with("olmoe_clip", "rope_scaling",
               {{"rope_type", "linear"}, {"factor", 2}, {"beta_medium", 1}}));
  });
}

// Bug-log 67: what `sliding_window` means is the architecture's own affair.
TEST_F(ModelLoading, SlidingWindowsFollowTheReference) {
  ModelFolder qwen(Golden("qwen3_moe_with_tokenizer"));
  qwen.config["sliding_window"] = 16;
  EXPECT_EQ(Load(qwen)->config().layers[0].window, 0u) << "use_sliding_window is absent";
  qwen.config["use_sliding_window"] = false;
  EXPECT_EQ(Load(qwen)->config().layers[1].window, 0u);
  qwen.config["use_sliding_window"] = true;
  qwen.config["max_window_layers"] = 1;
  EXPECT_EQ(Load(qwen)->config().layers[0].window, 16u);
  EXPECT_EQ(Load(qwen)->config().layers[1].window, 16u);
  ModelFolder mixtral(Golden("mixtral_swa"));
  EXPECT_EQ(Load(mixtral)->config().layers[1].window, 8u);
  mixtral.config["sliding_window"] = nullptr;
  EXPECT_EQ(Load(mixtral)->config().layers[1].window, 0u);
}

TEST_F(ModelLoading, AFolderWithoutConfigOrWeightsIsExplained) {
  ModelFolder folder(Golden("olmoe_clip"));
  const auto files = folder.Write();
  std::filesystem::remove(folder.path() / "model.safetensors");
  ExpectError(ErrorCode::kNotFound, {"model.safetensors"},
              [&] { Model::Load(ModelFiles::OpenFolder(folder.path()), {}, pool_); });
  std::filesystem::remove(folder.path() / "config.json");
  ExpectError(ErrorCode::kNotFound, {"config.json"},
              [&] { Model::Load(ModelFiles::OpenFolder(folder.path()), {}, pool_); });
  ExpectError(ErrorCode::kNotFound, {"no-such-folder"},
              [&] { ModelFiles::OpenFolder(folder.path() / "no-such-folder"); });
}

TEST_F(ModelLoading, RandomModelsRunInEveryType) {
  for (const char* scheme : {"f32", "f16", "bf16"}) {
    ModelConfig config;
    config.vocab_size = 50;
    config.hidden_size = 32;
    config.num_heads = config.num_kv_heads = 2;
    config.head_dim = 16;
    config.max_positions = 64;
    config.rope.rotary_dim = 16;
    config.rope.max_positions = 64;
    config.moe_intermediate_size = 24;
    config.num_experts = 4;
    config.top_k = 2;
    config.layers.resize(2);
    const std::unique_ptr<Model> model = Model::Random(config, scheme, {}, pool_);
    const DType dtype = model->weight_dtype();
    EXPECT_STRCASEEQ(std::string(DTypeName(dtype)).c_str(), scheme);
    for (float logit : Logits(*model)) ASSERT_TRUE(std::isfinite(logit));
    EXPECT_GT(model->active_bytes_per_token(), 0u);
    EXPECT_FALSE(model->Explain().empty());
    // Latent attention, a dense layer, shared experts; transposed experts with biases and sinks.
    ModelConfig deepseek = config;
    deepseek.head_dim = 24;
    deepseek.latent = LatentAttention{.q_rank = 12, .kv_rank = 20, .nope_dim = 8, .value_dim = 10};
    deepseek.dense_intermediate_size = 40;
    deepseek.shared_intermediate_size = 24;
    deepseek.layers[0].is_moe = false;
    ModelOptions bf16;
    bf16.moe.act_dtype = dtype == DType::kBF16 ? "bf16" : "f32";
    const std::unique_ptr<Model> latent = Model::Random(deepseek, scheme, bf16, pool_);
    for (float logit : Logits(*latent)) ASSERT_TRUE(std::isfinite(logit));
    EXPECT_EQ(latent->Explain()[0].part, "attention");
    const bool has_pairs = dtype == DType::kBF16 && HasNativeBF16();
    EXPECT_EQ(latent->Explain()[0].kernel,
              has_pairs ? "MultiplyPanel, bf16" : "MultiplyPanel, f32");
    ModelConfig gpt_oss = config;
    gpt_oss.attention_sinks = gpt_oss.attention_bias = gpt_oss.router_bias = true;
    gpt_oss.expert_bias = gpt_oss.experts_are_transposed = true;
    ModelOptions as_it_lies;
    as_it_lies.repack = false;
    const std::unique_ptr<Model> transposed = Model::Random(gpt_oss, scheme, as_it_lies, pool_);
    for (float logit : Logits(*transposed)) ASSERT_TRUE(std::isfinite(logit));
    EXPECT_EQ(transposed->copied_bytes(), 2 * 4 * 3 * 32 * 24 * DTypeBytes(dtype));
    EXPECT_EQ(model->copied_bytes(), 0u);
  }
}

TEST_F(ModelLoading, DeepseekConfigsThatCannotBeAreRefused) {
  const auto load = [&](const std::string& golden, const std::string& field,
                        const nlohmann::ordered_json& value) {
    ModelFolder folder(Golden(golden));
    folder.config[field] = value;
    return Load(folder);
  };
  ExpectError(ErrorCode::kUnsupported, {"topk_method", "noaux_tc", "greedy"},
              [&] { load("deepseek_v2_lite", "topk_method", "noaux_tc"); });
  ExpectError(ErrorCode::kUnsupported, {"norm_topk_prob"},
              [&] { load("deepseek_v2_lite", "norm_topk_prob", true); });
  ExpectError(ErrorCode::kUnsupported, {"scoring_func", "softmax"},
              [&] { load("deepseek_v3", "scoring_func", "softmax"); });
  ExpectError(ErrorCode::kUnsupported, {"n_group", "16 experts"},
              [&] { load("deepseek_v3", "n_group", 5); });
  ExpectError(ErrorCode::kUnsupported, {"topk_group"},
              [&] { load("deepseek_v3", "topk_group", 5); });
  for (const nlohmann::ordered_json& top_k :
       {nlohmann::ordered_json(17), nlohmann::ordered_json(nullptr)}) {
    ExpectError(ErrorCode::kCorruptData, {"num_experts_per_tok", "16"},
                [&] { load("deepseek_v3", "num_experts_per_tok", top_k); });
  }
  for (const char* field : {"n_group", "topk_group", "routed_scaling_factor"}) {
    ExpectError(ErrorCode::kCorruptData, {"config.json", field},
                [&] { load("deepseek_v3", field, nullptr); });
  }
  ExpectError(ErrorCode::kCorruptData, {"config.json", "routed_scaling_factor"},
              [&] { load("deepseek_v3", "routed_scaling_factor", 0); });
  ExpectError(ErrorCode::kCorruptData, {"n_routed_experts", "65534"},  // and not gigabytes of names
              [&] { load("deepseek_v3", "n_routed_experts", 16777216); });
  ExpectError(ErrorCode::kCorruptData, {"config.json", "swiglu_limit"},
              [&] { load("gpt_oss", "swiglu_limit", 0); });
  ExpectError(ErrorCode::kCorruptData, {"sliding_window"},
              [&] { load("gpt_oss", "sliding_window", nullptr); });
  ExpectError(ErrorCode::kUnsupported, {"qk_rope_head_dim", "7"},
              [&] { load("deepseek_v3", "qk_rope_head_dim", 7); });
  ExpectError(ErrorCode::kCorruptData, {"kv_lora_rank"},
              [&] { load("deepseek_v3", "kv_lora_rank", nullptr); });
  // The tensors are of another shape then.
  ExpectError(ErrorCode::kCorruptData, {"kv_b_proj.weight", "[152, 32]", "[128, 32]"},
              [&] { load("deepseek_v3", "v_head_dim", 22); });
}

// Layers for multi-token prediction lie behind the others; what nobody announces is left over.
TEST_F(ModelLoading, DraftLayersAreLeftOutIfTheConfigKnowsThem) {
  const auto with_draft = [](size_t announced) {
    auto folder = std::make_unique<ModelFolder>(Golden("deepseek_v3"));
    folder->tensors["model.layers.3.eh_proj.weight"] = {
        DType::kF32, {64, 128}, std::vector<std::byte>(size_t{64} * 128 * 4)};
    folder->config["num_nextn_predict_layers"] = announced;
    return folder;
  };
  ModelFolder plain(Golden("deepseek_v3"));
  EXPECT_EQ(Logits(*Load(*with_draft(1))), Logits(*Load(plain)));
  ExpectError(ErrorCode::kCorruptData, {"model.layers.3.eh_proj.weight"},
              [&] { Load(*with_draft(0)); });
}

TEST_F(ModelLoading, GptOssSaysWhatItsLayersSee) {
  ModelFolder folder(Golden("gpt_oss"));
  const auto windows = [&] {
    std::vector<size_t> found;
    const std::unique_ptr<Model> model = Load(folder);
    for (const LayerConfig& layer : model->config().layers) found.push_back(layer.window);
    return found;
  };
  EXPECT_EQ(windows(), (std::vector<size_t>{8, 0, 8, 0}));
  folder.config.erase("layer_types");
  EXPECT_EQ(windows(), (std::vector<size_t>{8, 0, 8, 0})) << "every other layer, from the first";
  folder.config["layer_types"] = {"full_attention"};
  ExpectError(ErrorCode::kUnsupported, {"layer_types", "4 layers"}, [&] { Load(folder); });
  folder.config["layer_types"] = {"full_attention", "linear", "full_attention", "full_attention"};
  ExpectError(ErrorCode::kUnsupported, {"layer_types", "sliding_attention"}, [&] { Load(folder); });
  folder.config.erase("layer_types");
  folder.config["experts_per_token"] = 2;
  ExpectError(ErrorCode::kUnsupported, {"experts_per_token"}, [&] { Load(folder); });
  folder.config["experts_per_token"] = 4;
  folder.tensors.erase("model.layers.1.self_attn.sinks");
  ExpectError(ErrorCode::kCorruptData, {"model.layers.1.self_attn.sinks"}, [&] { Load(folder); });
}

}  // namespace
}  // namespace switchyard
