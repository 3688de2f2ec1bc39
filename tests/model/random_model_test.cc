// Random models in every scheme: they bind as checkpoints do, have sane values, and are profiled.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <set>
#include <string>

#include "model/stage_work.h"
#include "quant/expert_matmul.h"
#include "switchyard/core/profile.h"
#include "switchyard/model/model.h"
#include "switchyard/model/shapes.h"
#include "testing/errors.h"
#include "testing/model_logits.h"

namespace switchyard {
namespace {

using testing::ExpectError;

// A small model with whatever the large shapes have: the parts are named by a shape.
ModelConfig Shrunk(std::string_view name) {
  ModelConfig config = KnownShape(name, 0);
  size_t first_moe = 0;
  while (!config.layers[first_moe].is_moe) ++first_moe;
  config.layers = {config.layers[0], config.layers[first_moe]};
  config.vocab_size = 64;
  config.hidden_size = 256;
  config.num_heads = 4;
  config.num_kv_heads = std::min<size_t>(config.num_kv_heads, 4);
  if (config.latent) {
    config.num_kv_heads = 4;
    config.latent->kv_rank = 256;
    if (config.latent->q_rank != 0) config.latent->q_rank = 256;
  }
  config.num_experts = config.num_expert_groups > 1 ? 16 : 8;
  config.num_expert_groups = config.num_expert_groups > 1 ? 4 : 0;
  config.top_k_groups = config.num_expert_groups > 1 ? 2 : 0;
  config.top_k = 2;
  config.moe_intermediate_size = 256;
  if (config.dense_intermediate_size != 0) config.dense_intermediate_size = 512;
  if (config.shared_intermediate_size != 0) config.shared_intermediate_size = 256;
  return config;
}

class RandomModel : public ::testing::Test {
 protected:
  std::unique_ptr<Model> Make(const ModelConfig& config, std::string_view scheme) {
    return Model::Random(config, scheme, {}, pool_);
  }
  ThreadPool pool_{2};
};

// Root of the mean square of some rows.
double Deviation(const moe::ExpertBank& bank) {
  std::vector<float> row(bank.cols);
  double squares = 0;
  const size_t rows = 32;
  for (size_t n = 0; n < rows; ++n) {
    quant::DecodeMatrixRow(bank.View(), n % bank.data.size(), n, row.data());
    for (float value : row) squares += double{value} * value;
  }
  return std::sqrt(squares / static_cast<double>(rows * bank.cols));
}

TEST_F(RandomModel, RunsInEveryScheme) {
  const ModelConfig config = KnownShape("tiny-qwen3moe", 0);
  const std::vector<std::string_view> schemes = RandomSchemes();
  EXPECT_GE(schemes.size(), 11u + 22u);
  EXPECT_EQ(std::set(schemes.begin(), schemes.end()).size(), schemes.size());
  for (std::string_view scheme : schemes) {
    SCOPED_TRACE(scheme);
    const std::unique_ptr<Model> model = Make(config, scheme);
    for (float logit : testing::LogitsOf(*model, pool_)) ASSERT_TRUE(std::isfinite(logit));
    for (const moe::ExpertBank* bank : {&model->experts(0).w1, &model->experts(1).w2}) {
      EXPECT_GT(Deviation(*bank), 0.012);
      EXPECT_LT(Deviation(*bank), 0.03);
    }
    EXPECT_TRUE(model->bad_tensors().empty());
    EXPECT_GT(model->active_bytes_per_token(), 0u);
    EXPECT_GE(model->weight_bytes(), model->active_bytes_per_token() / 2);
  }
}

TEST_F(RandomModel, StoresWhatASchemeStores) {
  const ModelConfig config = KnownShape("tiny-qwen3moe", 0);
  const auto experts = [&](std::string_view scheme) {
    return Make(config, scheme)->experts(0).w1.format;
  };
  EXPECT_EQ(experts("fp8_block").dtype, DType::kF8E4M3);
  EXPECT_EQ(experts("fp8_block").scale_rows, 128u);
  EXPECT_EQ(experts("w8a8_int8").dtype, DType::kI8);
  EXPECT_EQ(experts("w8a8_int8").scale_cols, 256u);
  EXPECT_EQ(experts("w4a16_g32").scale_cols, 32u);
  EXPECT_EQ(experts("w4a16_g128").scale_cols, 128u);
  EXPECT_TRUE(experts("awq").has_zero);
  EXPECT_TRUE(experts("gptq").has_zero);
  EXPECT_EQ(experts("mxfp4").scale_dtype, DType::kF8E8M0);
  EXPECT_TRUE(experts("nvfp4").has_tensor_scale);
  EXPECT_EQ(experts("q4_k").dtype, DType::kGgmlQ4K);
  EXPECT_EQ(experts("mxfp4_gguf").dtype, DType::kGgmlMxFp4);
  // Attention is quantised, routers and the head are not, in a folder; in GGUF the head is.
  const std::unique_ptr<Model> folder = Make(config, "awq");
  for (const StoredMatrix& matrix : folder->matrices()) {
    const bool is_plain = matrix.module == "model.embed_tokens" || matrix.module == "lm_head" ||
                          matrix.module.ends_with("mlp.gate");
    EXPECT_EQ(matrix.is_quantized, !is_plain) << matrix.module;
  }
  const std::unique_ptr<Model> gguf = Make(config, "q6_k");
  for (const StoredMatrix& matrix : gguf->matrices())
    EXPECT_EQ(matrix.is_quantized, !matrix.module.ends_with("mlp.gate")) << matrix.module;
}

TEST_F(RandomModel, RoutesToAllExperts) {
  struct Observer : ForwardObserver {
    void OnRouting(size_t, const moe::TopKOutput& topk) override {
      seen.insert(topk.ids.begin(), topk.ids.end());
    }
    std::set<int32_t> seen;
  };
  for (const char* scheme : {"bf16", "w4a16_g32", "nvfp4", "q4_k", "iq1_m"}) {
    const std::unique_ptr<Model> model = Make(KnownShape("tiny-qwen3moe", 1), scheme);
    Observer observer;
    testing::LogitsOf(*model, pool_, {1, 5, 9, 2, 7, 100, 200, 300, 400, 500, 600, 700}, nullptr,
                      &observer);
    EXPECT_GE(observer.seen.size(), 6u) << scheme;
  }
}

TEST_F(RandomModel, EveryShapeRunsInEveryKindOfScheme) {
  for (std::string_view shape : KnownShapes()) {
    for (const char* scheme :
         {"bf16", "fp8_block", "w8a8_int8", "awq", "mxfp4", "nvfp4", "q8_0", "q4_k"}) {
      SCOPED_TRACE(std::string(shape) + ":" + scheme);
      // 64 values of a head make 256 inputs.
      const std::unique_ptr<Model> model = Make(Shrunk(shape), scheme);
      for (float logit : testing::LogitsOf(*model, pool_)) ASSERT_TRUE(std::isfinite(logit));
    }
  }
}

TEST_F(RandomModel, GptOssHasItsOwnBanksInMxfp4Alone) {
  const std::unique_ptr<Model> own = Make(Shrunk("gpt-oss-20b"), "mxfp4");
  EXPECT_FALSE(own->experts(0).w1.bias.empty());
  for (const StoredMatrix& matrix : own->matrices())
    EXPECT_EQ(matrix.is_quantized, matrix.module.find("experts") != std::string::npos)
        << matrix.module;
  EXPECT_TRUE(Make(Shrunk("gpt-oss-20b"), "fp8_block")->experts(0).w1.bias.empty());
  EXPECT_FALSE(Make(Shrunk("gpt-oss-20b"), "q8_0")->experts(0).w1.bias.empty());
}

TEST_F(RandomModel, WhatASchemeCannotStoreIsRefused) {
  ModelConfig config = KnownShape("tiny-qwen3moe", 0);
  ExpectError(ErrorCode::kNotFound, {"q4_kk", "did you mean \"q4_k\"", "bf16", "iq1_m", "nvfp4"},
              [&] { Make(config, "q4_kk"); });
  config.moe_intermediate_size = 288;
  ExpectError(ErrorCode::kUnsupported,
              {"experts.down_proj", "288 inputs", "256", "q4_k", "q8_0, iq4_nl"},
              [&] { Make(config, "q4_k"); });
  ExpectError(ErrorCode::kUnsupported, {"mlp.experts.0.down_proj", "288 inputs", "128"},
              [&] { Make(config, "w4a16_g128"); });
  EXPECT_NE(Make(config, "w4a16_g32"), nullptr);
  config.moe_intermediate_size = size_t{1} << 40;
  ExpectError(ErrorCode::kResourceExhausted, {"bytes"}, [&] { Make(config, "q8_0"); });
}

TEST_F(RandomModel, DenseLayersThatDoNotFillGroupsArePlain) {
  ModelConfig config = Shrunk("glm-4.5-air");
  config.dense_intermediate_size = 320;
  const std::unique_ptr<Model> model = Make(config, "awq");
  for (const StoredMatrix& matrix : model->matrices()) {
    const bool is_other = matrix.module.find(".layers.0.mlp") != std::string::npos ||
                          matrix.module.ends_with("gate") ||
                          matrix.module.find("layers") == std::string::npos;
    EXPECT_EQ(matrix.is_quantized, !is_other) << matrix.module;
  }
}

TEST_F(RandomModel, ProfileCountsEveryStage) {
  for (const char* shape : {"tiny-qwen3moe", "deepseek-v3", "glm-4.5-air"}) {
    SCOPED_TRACE(shape);
    const std::unique_ptr<Model> model = Make(Shrunk(shape), "q8_0");
    const bool has_dense = Shrunk(shape).shared_intermediate_size != 0;
    Profile profile;
    const auto start = std::chrono::steady_clock::now();
    profile.Begin();
    const std::vector<float> profiled = testing::LogitsOf(*model, pool_, {1, 5, 9, 2, 7}, &profile);
    profile.End();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LE(profile.seconds(), seconds);
    EXPECT_EQ(profiled, testing::LogitsOf(*model, pool_)) << "watching changes nothing";
    for (Stage stage : {Stage::kEmbedding, Stage::kNorm, Stage::kQkv, Stage::kRope,
                        Stage::kAttention, Stage::kOutput, Stage::kRouter, Stage::kMoePrepare,
                        Stage::kGateUp, Stage::kDown, Stage::kCombine, Stage::kHead})
      EXPECT_GT(profile.row(stage).calls, 0u) << StageName(stage);
    EXPECT_EQ(profile.row(Stage::kDense).calls > 0, has_dense);
    // One block of every matrix of the head, read once.
    const auto head = static_cast<double>(64 * 256);
    if (std::string_view(shape) != "tiny-qwen3moe") {
      EXPECT_EQ(profile.row(Stage::kHead).bytes, head / 32 * 34);
      EXPECT_EQ(profile.row(Stage::kHead).ops[static_cast<size_t>(Arithmetic::kInt8)],
                2 * 5 * head);
    }
    double ops = 0;
    for (Stage stage : {Stage::kQkv, Stage::kOutput, Stage::kRouter, Stage::kGateUp, Stage::kDown,
                        Stage::kDense}) {
      for (double kind : profile.row(stage).ops) ops += kind;
    }
    EXPECT_DOUBLE_EQ(ops, 2.0 * 5 * static_cast<double>(model->active_params()));
  }
}

TEST_F(RandomModel, AttentionWorkCountsKeysOfTheWindow) {
  ModelConfig config = KnownShape("tiny-qwen3moe", 0);  // 4 heads of 64 on 2 key heads
  config.layers[1].window = 3;
  const std::vector<int32_t> ids = {1, 2};
  const SequenceChunk chunk{ids, 4, 6, {}, LogitsWanted::kLast};
  const std::vector<KvLayerView> layers(2, KvLayerView{nullptr, 64 * kKvBlockSize, 0});
  const KvView cache{DType::kF32, layers};
  const QueryHeads heads{0, 2, 2};
  const StageWork all = AttentionWork(config, {&chunk, 1}, cache, 0, heads);
  EXPECT_EQ(all.bytes, 64.0 * 6);
  EXPECT_EQ(all.ops, 2.0 * 4 * (64 + 64) * (5 + 6));
  const StageWork window = AttentionWork(config, {&chunk, 1}, cache, 1, heads);
  EXPECT_EQ(window.bytes, 64.0 * 4);
  EXPECT_EQ(window.ops, 2.0 * 4 * (64 + 64) * (3 + 3));
}

}  // namespace
}  // namespace switchyard
