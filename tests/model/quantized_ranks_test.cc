// Quantised models spread over ranks: the bits of one rank with every exchange, experts that move
// while the model runs, and cuts that blocks do not allow.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "switchyard/model/gguf.h"
#include "switchyard/model/model.h"
#include "testing/ep_ranks.h"
#include "testing/errors.h"
#include "testing/goldens.h"
#include "testing/model_logits.h"
#include "testing/quantized_model.h"

namespace switchyard {
namespace {

using testing::EpRank;
using testing::EpSetup;
using testing::LogitsOf;
using testing::ModelFolder;
using testing::QuantizedFormat;
using testing::QuantizedModel;
using testing::RunEp;

const std::vector<int32_t> kIds = {1, 5, 9, 2, 7, 11, 30, 3, 3, 18, 44, 6};

ModelOptions Options(const QuantizedFormat& format, const std::string& a2a, bool quantise = true) {
  ModelOptions options;
  options.moe.act_dtype = "f32";
  options.moe.activation_quant = quantise;
  options.moe.a2a = a2a;
  options.w4a4_new_packing = format.w4a4_new_packing;
  return options;
}

std::vector<float> OfOneRank(const ModelFolder& folder, const ModelOptions& options) {
  ThreadPool pool(1);
  return LogitsOf(*Model::Load(folder.Write(), options, pool), pool, kIds);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

EpSetup SetupOf(size_t ranks) {
  EpSetup setup;
  setup.ranks = ranks;
  setup.options.max_tokens_per_rank = 16;
  return setup;
}

void ExpectBitsOfOneRank(const std::shared_ptr<const ModelFiles>& files, ModelOptions options,
                         const std::vector<float>& expected, size_t ranks, const char* a2a) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks, " + a2a);
  options.moe.a2a = a2a;
  EXPECT_NO_THROW(RunEp(SetupOf(ranks), [&](EpRank& rank) {
    ModelOptions own = options;
    own.moe.ep = &rank.ep;
    const auto part = Model::Load(files, own, rank.pool);
    EXPECT_TRUE(SameBits(LogitsOf(*part, rank.pool, kIds), expected));
  }));
}

// Those whose experts differ most: a scale of activations that is the largest of all experts,
// groups of columns, zero points, a scale for all scales, two products in two schemes.
constexpr const char* kFormats[] = {"fp8_block_ragged_e8m0", "ct_fp8_static",  "w4afp8",
                                    "gptq_desc_act_of_some", "ct_w4a16_asym",  "ct_nvfp4",
                                    "quark_w4a4",            "modelslim_mixed"};

TEST(QuantizedRanks, EveryFormatGivesTheBitsOfOneRank) {  // bug-log 29
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    SCOPED_TRACE(format.name);
    const QuantizedModel model(format);
    const ModelOptions options = Options(format, "none");
    const std::vector<float> expected = OfOneRank(model.quantized, options);
    const auto files = model.quantized.Write();
    ExpectBitsOfOneRank(files, options, expected, 2, "deepep");
    if (std::ranges::find(kFormats, format.name) == std::end(kFormats)) continue;
    for (const char* a2a : {"none", "mori", "mooncake", "nixl"})
      ExpectBitsOfOneRank(files, options, expected, 4, a2a);
  }
}

TEST(QuantizedRanks, FuseEpTakesInt8AndRefusesTheRest) {
  for (const char* name : {"w8a8_int8", "ct_int8", "modelslim_w8a8_dynamic"}) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    const QuantizedModel model(format);
    const ModelOptions options = Options(format, "none");
    ExpectBitsOfOneRank(model.quantized.Write(), options, OfOneRank(model.quantized, options), 2,
                        "ascend_fuseep");
  }
  const QuantizedFormat format = testing::QuantizedFormatOf("fp8_block");
  const QuantizedModel model(format);
  const auto files = model.quantized.Write();
  testing::ExpectError(ErrorCode::kUnsupported, {"FuseEP", "F8_E4M3", "W8A8"}, [&] {
    RunEp(SetupOf(2), [&](EpRank& rank) {
      ModelOptions options = Options(format, "ascend_fuseep");
      options.moe.ep = &rank.ep;
      Model::Load(files, options, rank.pool);
    });
  });
}

// Recorded models in formats of banks: gpt-oss, and blocks of ggml.
TEST(QuantizedRanks, BanksOfExpertsGiveTheBitsOfOneRank) {
  const auto goldens = testing::GoldenDir();
  if (!goldens) GTEST_SKIP() << "the large golden set is absent";
  for (const char* name : {"quant/gpt_oss_mxfp4", "gguf/qwen3moe_q4_k", "gguf/olmoe_mxfp4"}) {
    SCOPED_TRACE(name);
    const std::filesystem::path folder = *goldens / name;
    const auto files = std::filesystem::exists(folder / "checkpoint")
                           ? ModelFiles::OpenFolder(folder / "checkpoint")
                           : OpenGgufFiles(folder / ("model-" + folder.filename().string() + ".gguf"));
    const ModelOptions options = Options({}, "none");
    ThreadPool pool(1);
    const auto alone = Model::Load(files, options, pool);
    const std::vector<float> expected = LogitsOf(*alone, pool, kIds);
    const size_t ranks = alone->config().num_experts % 2 == 0 ? 2 : 3;
    for (const char* a2a : {"none", "deepep"})
      ExpectBitsOfOneRank(files, options, expected, ranks, a2a);
  }
}

TEST(QuantizedRanks, ExpertsThatMoveKeepTheirBits) {
  for (const char* name : kFormats) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    const QuantizedModel model(format);
    const std::vector<float> expected = OfOneRank(model.quantized, Options(format, "none"));
    const auto files = model.quantized.Write();
    EXPECT_NO_THROW(RunEp(SetupOf(2), [&](EpRank& rank) {
      ModelOptions options = Options(format, "deepep");
      options.moe.ep = &rank.ep;
      options.num_redundant_experts = 2;
      options.rebalance.emplace().num_iterations = 2;
      const auto part = Model::Load(files, options, rank.pool);
      const std::vector<int32_t> before(part->ExpertMap(0).begin(), part->ExpertMap(0).end());
      for (int pass = 0; pass < 5; ++pass)
        EXPECT_TRUE(SameBits(LogitsOf(*part, rank.pool, kIds), expected)) << "pass " << pass;
      const std::vector<int32_t> after(part->ExpertMap(0).begin(), part->ExpertMap(0).end());
      EXPECT_NE(before, after) << "nothing has moved";
    }));
  }
}

// Parts of experts: sums of parts, which differ from the whole by rounding alone; or a refusal that
// names the sizes.
TEST(QuantizedRanks, PartsOfExpertsAreThoseThatBlocksAllow) {  // bug-log 23, 29
  const std::vector<std::string> cut_at_32 = {
      "fp8_tensor_static", "w8a8_fp8", "mxfp8",      "awq",        "gptq",
      "ct_w4a16",          "ct_nvfp4", "quark_w4a4", "modelslim_w4a8"};
  for (const std::string& name : cut_at_32) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    const QuantizedModel model(format);
    const std::vector<float> expected = OfOneRank(model.quantized, Options(format, "none", false));
    const auto files = model.quantized.Write();
    EpSetup setup = SetupOf(2);
    setup.moe_tp = 2;
    EXPECT_NO_THROW(RunEp(setup, [&](EpRank& rank) {
      ModelOptions options = Options(format, "none", false);
      options.moe.ep = &rank.ep;
      const auto part = Model::Load(files, options, rank.pool);
      const std::vector<float> found = LogitsOf(*part, rank.pool, kIds);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-3);
    }));
  }
  const auto refused = [](const std::string& name, size_t parts,
                          std::initializer_list<std::string> words) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    const QuantizedModel model(format);
    const auto files = model.quantized.Write();
    EpSetup setup = SetupOf(parts);
    setup.moe_tp = parts;
    std::string message;
    try {
      RunEp(setup, [&](EpRank& rank) {
        ModelOptions options = Options(format, "none");
        options.moe.ep = &rank.ep;
        Model::Load(files, options, rank.pool);
      });
    } catch (const Error& error) {
      message = error.message();
    }
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  };
  refused("fp8_block_small_f32", 2, {"row 20", "blocks of 32x16"});   // 40 in blocks of 32
  refused("mxfp8", 4, {"column 16", "blocks of 1x32"});
  refused("gptq", 4, {"column 16", "blocks of 1x32"});
  refused("gptq_desc_act", 2, {"columns 0 to 32", "desc_act"});
}

// What one rank refuses two refuse, wherever the broken expert is.
TEST(QuantizedRanks, BrokenExpertsAreRefusedOnAllRanks) {
  for (const char* name : {"ct_fp8_static", "gptq", "mxfp8", "w4afp8"}) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    for (size_t expert : {0u, 3u}) {
      QuantizedModel model(format);
      const std::string prefix = "model.layers.0.mlp.experts." + std::to_string(expert) + ".down_proj.";
      std::string broken;
      for (auto& [tensor, stored] : model.quantized.tensors) {
        if (!tensor.starts_with(prefix) || tensor.find("scale") == std::string::npos) continue;
        std::ranges::fill(stored.bytes, std::byte{255});  // NaN in all types
        broken = tensor;
      }
      const auto files = model.quantized.Write();
      std::atomic<int> refusals = 0;
      RunEp(SetupOf(2), [&](EpRank& rank) {
        ModelOptions options = Options(format, "none");
        options.moe.ep = &rank.ep;
        try {
          Model::Load(files, options, rank.pool);
        } catch (const Error& error) {
          EXPECT_NE(error.message().find("down_proj"), std::string::npos) << error.message();
          ++refusals;
        }
      });
      EXPECT_EQ(refusals, 2) << broken;
    }
  }
}

}  // namespace
}  // namespace switchyard
