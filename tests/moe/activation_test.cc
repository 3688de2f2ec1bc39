// From config fields to formulas, and activations that a program adds. Contract 1.6, 4.1.4.
#include "switchyard/moe/registry/activation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/moe_runner.h"
#include "testing/errors.h"
#include "testing/moe_case.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::ExpectError;

struct Settings {
  std::optional<float> alpha = {};
  std::optional<float> limit = {};
  std::optional<float> swiglu_limit = {};
  bool is_gated = true;
};

MoeRunnerConfig Config(std::string_view name, const Settings& settings = {}) {
  MoeRunnerConfig config;
  config.layer_id = 17;
  config.activation = name;
  config.is_gated = settings.is_gated;
  config.gemm1_alpha = settings.alpha;
  config.gemm1_clamp_limit = settings.limit;
  config.swiglu_limit = settings.swiglu_limit;
  return config;
}

TEST(ResolveActivation, SelectsTheFormulaThatTheContractNames) {
  constexpr float kNone = ActivationParams::kNoLimit;
  const struct {
    std::string_view name;
    Settings settings;
    std::string_view formula;
    ActivationParams params;
  } cases[] = {
      {"silu", {}, "silu", {}},
      {"silu", {.alpha = 1.702f, .limit = 7.0f}, "swiglu_oai", {1.702f, 7.0f, kNone}},
      {"silu", {.limit = 7.0f}, "swiglu_step", {1.0f, 7.0f, kNone}},
      {"silu", {.swiglu_limit = 10.0f}, "swiglu_limit", {1.0f, kNone, 10.0f}},
      {"silu", {.is_gated = false}, "silu_plain", {}},
      {"gelu", {}, "gelu", {}},
      {"gelu", {.is_gated = false}, "gelu_plain", {}},
      {"gelu_tanh", {}, "gelu_tanh", {}},
      {"gelu_tanh", {.is_gated = false}, "gelu_tanh_plain", {}},
      {"relu2", {.is_gated = false}, "relu2", {}},
      {"silu_rounded", {}, "silu_rounded", {}},
      {"situ", {}, "situ", {4.0f, kNone, kNone}},
      {"situ", {.alpha = 1.5f, .limit = 25.0f}, "situ", {1.5f, 25.0f, kNone}},
      {"npu_swiglu_oai", {}, "swiglu_oai", {1.0f, kNone, kNone}},
      {"npu_swiglu_oai", {.alpha = 2.0f}, "swiglu_oai", {2.0f, kNone, kNone}},
      {"npu_swiglu_oai", {.limit = 7.0f}, "swiglu_oai", {1.0f, 7.0f, kNone}},
      {"swiglu", {}, "swiglu_oai", {1.702f, 7.0f, kNone}},
      {"swiglu", {.alpha = 1.0f, .limit = 3.0f}, "swiglu_oai", {1.0f, 3.0f, kNone}},
      // By the formula's own name: what is set, and no rules.
      {"swiglu_step", {.limit = 3.0f}, "swiglu_step", {1.0f, 3.0f, kNone}},
  };
  for (const auto& c : cases) {
    const Activation found = ResolveActivation(BuiltinRegistry(), Config(c.name, c.settings));
    SCOPED_TRACE(c.name);
    EXPECT_EQ(found.entry.name, c.formula);
    EXPECT_EQ(found.entry.is_gated, c.settings.is_gated);
    EXPECT_EQ(found.params.alpha, c.params.alpha);
    EXPECT_EQ(found.params.clamp_limit, c.params.clamp_limit);
    EXPECT_EQ(found.params.swiglu_limit, c.params.swiglu_limit);
  }
}

TEST(ResolveActivation, RefusesWhatNoFormulaComputes) {
  const auto expect = [](ErrorCode code, std::initializer_list<std::string_view> words,
                         const MoeRunnerConfig& config) {
    const std::string message =
        ExpectError(code, words, [&] { ResolveActivation(BuiltinRegistry(), config); });
    EXPECT_NE(message.find("layer 17"), std::string::npos) << message;
    EXPECT_NE(message.find("\"" + config.activation + "\""), std::string::npos) << message;
  };
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  expect(kUnsupported, {"gemm1_clamp_limit 7", "swiglu_limit 10", "contradict"},
         Config("silu", {.limit = 7.0f, .swiglu_limit = 10.0f}));
  expect(kUnsupported, {"gemm1_clamp_limit", "swiglu_limit"},
         Config("silu", {.alpha = 1.0f, .limit = 7.0f, .swiglu_limit = 10.0f}));
  expect(kUnsupported, {"gemm1_alpha", "swiglu_limit"},
         Config("silu", {.alpha = 1.0f, .swiglu_limit = 10.0f}));
  expect(kUnsupported, {"gemm1_alpha is set without gemm1_clamp_limit"},
         Config("silu", {.alpha = 1.702f}));
  expect(kUnsupported, {"swiglu_limit is 10"}, Config("situ", {.swiglu_limit = 10.0f}));
  expect(kUnsupported, {"swiglu_limit is 10"}, Config("swiglu", {.swiglu_limit = 10.0f}));
  expect(kUnsupported, {"gemm1_clamp_limit is 7"}, Config("gelu", {.limit = 7.0f}));
  expect(kUnsupported, {"gemm1_alpha is 2"}, Config("silu_rounded", {.alpha = 2.0f}));
  expect(kUnsupported, {"gemm1_clamp_limit is 7", "without a gate"},
         Config("silu", {.limit = 7.0f, .is_gated = false}));
  expect(kUnsupported, {"is_gated is true"}, Config("relu2"));
  expect(kUnsupported, {"is_gated is false"}, Config("situ", {.is_gated = false}));
  expect(kUnsupported, {"is_gated is false"}, Config("swiglu_step", {.is_gated = false}));
  MoeRunnerConfig beta = Config("swiglu");
  beta.gemm1_beta = 1.0f;
  EXPECT_NO_THROW(ResolveActivation(BuiltinRegistry(), beta));
  beta.gemm1_beta = 0.5f;
  expect(kUnsupported, {"gemm1_beta is 0.5"}, beta);
  for (float bad : {0.0f, -7.0f, std::nanf(""), ActivationParams::kNoLimit}) {
    expect(kInvalid, {"gemm1_clamp_limit", "above 0"}, Config("silu", {.limit = bad}));
    expect(kInvalid, {"swiglu_limit", "above 0"}, Config("silu", {.swiglu_limit = bad}));
    expect(kInvalid, {"gemm1_alpha", "above 0"}, Config("situ", {.alpha = bad}));
  }
  expect(kInvalid, {"gemm1_alpha is nan"}, Config("swiglu", {.alpha = std::nanf("")}));
  expect(ErrorCode::kNotFound, {"did you mean \"gelu_tanh\"", "npu_swiglu_oai", "swiglu_step"},
         Config("gelu_tan"));
  expect(ErrorCode::kNotFound, {"known: silu"}, Config(""));
}

// x^2 + u + alpha: nothing that the library has.
constexpr ActivationEntry kMine{"mine", "a formula of a test", true,
                                [](const float* gate, const float* up, size_t n,
                                   const ActivationParams& params, float* out) noexcept {
                                  for (size_t i = 0; i < n; ++i)
                                    out[i] = gate[i] * gate[i] + up[i] + params.alpha;
                                },
                                [](double gate, double up, const ActivationParams& params) {
                                  return gate * gate + up + double{params.alpha};
                                }};

TEST(ActivationRegistry, TakesEntriesFromOutside) {
  Registry registry;
  RegisterBuiltins(registry);
  const size_t builtins = registry.activations().size();
  registry.Add(kMine);
  EXPECT_EQ(registry.activations().size(), builtins + 1);
  EXPECT_EQ(registry.FindActivation("mine").f32, kMine.f32);
  const Activation found =
      ResolveActivation(registry, Config("mine", {.alpha = 3.0f, .swiglu_limit = 2.0f}));
  EXPECT_EQ(found.params.alpha, 3.0f);
  EXPECT_EQ(found.params.swiglu_limit, 2.0f);
  ExpectError(ErrorCode::kNotFound, {"did you mean \"mine\""},
              [&] { ResolveActivation(registry, Config("mime")); });
}

TEST(ActivationRegistry, RefusesTakenNamesAndEmptyEntries) {
  Registry registry;
  RegisterBuiltins(registry);
  const auto named = [](std::string_view name) {
    ActivationEntry entry = kMine;
    entry.name = name;
    return entry;
  };
  for (std::string_view taken : {"silu", "swiglu_oai", "swiglu", "npu_swiglu_oai"}) {
    ExpectError(ErrorCode::kInvalidArgument, {"activation", taken, "registered twice"},
                [&] { registry.Add(named(taken)); });
  }
  ActivationEntry empty = named("empty");
  empty.f32 = nullptr;
  ExpectError(ErrorCode::kInvalidArgument, {"empty", "f32 form"}, [&] { registry.Add(empty); });
  empty = named("empty");
  empty.scalar = nullptr;
  ExpectError(ErrorCode::kInvalidArgument, {"empty", "scalar form"}, [&] { registry.Add(empty); });
  ExpectError(ErrorCode::kNotFound, {"activation \"empty\""},
              [&] { registry.FindActivation("empty"); });
}

// Runners use what the registry has: one from outside, and each gated formula through its scalar
// form (reference) and its rows (aiter).
TEST(ActivationRegistry, RunnersComputeWithEveryGatedEntry) {
  Registry registry;
  RegisterBuiltins(registry);
  registry.Add(kMine);
  auto random = testing::MakeRandom(44);
  const testing::MoeCase layer(3, 24, 17, DType::kF32, random);
  const std::vector<float> hidden = testing::RandomFloats(random, 5 * 24);
  const std::vector<int32_t> ids = {0, 1, 2, 0, 1, -1, 2, 1, 0, 2};
  const std::vector<float> scores(10, 0.5f);
  const auto run = [&](const ActivationEntry& entry, std::string runner, DType act) {
    MoeRunnerConfig config = Config(entry.name);
    if (entry.name == "situ") config = Config(entry.name, {.alpha = 1.5f, .limit = 0.5f});
    if (entry.name.starts_with("swiglu")) {
      config = Config(entry.name, {.alpha = 1.5f, .limit = 0.5f, .swiglu_limit = 0.5f});
    }
    config.num_experts = config.num_local_experts = 3;
    config.hidden_size = 24;
    config.intermediate_size_per_partition = 17;
    config.top_k = 2;
    config.activation_dtype = act;
    const auto moe = MoeRunner::Create(registry, {std::move(runner), "none", true}, config,
                                       DispatchFormat::kStandard);
    ThreadPool pool(1);
    Arena arena;
    ExecContext context{pool, arena};
    const StandardDispatchOutput dispatched(ConstRows(hidden.data(), 5, 24),
                                            TopKOutput{5, 2, scores, ids, {}});
    const Rows rows =
        As<StandardCombineInput>(moe->Run(context, dispatched, layer.Info())).hidden_states;
    std::vector<float> out;
    for (size_t t = 0; t < rows.rows; ++t) out.insert(out.end(), rows.Row(t), rows.Row(t) + 24);
    return out;
  };
  for (const ActivationEntry& entry : registry.activations()) {
    if (!entry.is_gated) continue;
    SCOPED_TRACE(entry.name);
    const std::vector<float> expected = run(entry, "reference", DType::kF32);
    const std::vector<float> rows = run(entry, "aiter", DType::kF32);
    ASSERT_EQ(rows.size(), expected.size());
    const double bound = entry.name == "silu_rounded" ? 0x1p-8 : 1e-5;
    for (size_t i = 0; i < rows.size(); ++i)
      ASSERT_NEAR(rows[i], expected[i], bound * (1 + std::abs(expected[i])));
  }
}

}  // namespace
}  // namespace switchyard::moe
