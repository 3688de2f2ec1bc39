// Runner "ascend" and dispatcher "ascend_tp": every scheme that lists the runner against the f64
// oracles and, bit for bit, against runner aiter; the DeepEP formats; what the pipeline refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/convert/convert.h"
#include "moe/dispatchers/ascend_tp.h"
#include "moe/runners/ascend/core.h"
#include "quant/copy_rows.h"
#include "quant/ggml_quant.h"
#include "quant/weight_quant.h"
#include "switchyard/core/log.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/oracle/oracle.h"
#include "switchyard/moe/registry/activation.h"
#include "switchyard/moe/runners/ascend.h"
#include "testing/errors.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using quant::WeightQuant;
using testing::ExpectError;

constexpr size_t kLayer = 6;

// A scheme with weights for it.
struct SchemeCase {
  std::string scheme;
  WeightQuant weights;
  // What a code on a rounding boundary may cost against the faithful oracle.
  double bound;
};

std::vector<SchemeCase> Schemes() {
  WeightQuant f32;
  WeightQuant bf16;
  bf16.format.dtype = DType::kBF16;
  WeightQuant q8_0;
  q8_0.format.dtype = DType::kGgmlQ80;
  const WeightQuant mxfp4 = WeightQuant::MxFp4(MxScaleRule::kCeil, MxRounding::kHalfToEven);
  return {{"unquant", f32, 3e-6},
          {"unquant", bf16, 3e-6},
          {"w8a8_int8", WeightQuant::Int8Channel(), 3e-3},
          {"w8a8_int8_static", WeightQuant::Int8Channel(), 3e-3},
          {"w4a8_int", WeightQuant::Int4Channel(), 3e-3},
          {"w4a8_int", WeightQuant::Int4Group(32, DType::kF32), 3e-3},
          {"w4a4_int", WeightQuant::Int4Channel(), 3e-2},
          {"awq", WeightQuant::Uint4Group(32, DType::kF16), 3e-6},
          {"gptq", WeightQuant::Uint4Group(32, DType::kF16), 3e-6},
          {"wna16", WeightQuant::Int4Group(32, DType::kBF16), 3e-6},
          {"gguf", q8_0, 3e-6},
          {"mxfp8", WeightQuant::MxFp8(MxScaleRule::kOcpFloor), 1e-2},
          {"mxfp4_w4a8", mxfp4, 1e-2},
          {"mxfp4_w4a4", mxfp4, 3e-2}};
}

// Random weights of `experts` experts in any form.
class Weights {
 public:
  // Both sizes are rounded up to what the formats can hold.
  Weights(size_t experts, size_t least_hidden, size_t least_inner, const WeightQuant& w13,
          const WeightQuant& w2, bool is_gated, bool with_bias, std::mt19937_64& random)
      : Weights(experts, w13, w2, is_gated, with_bias, random, Fitting(least_hidden, w13),
                Fitting(least_inner, w2)) {}

  const ExpertWeights& get() const { return weights_; }
  size_t experts() const { return weights_.w1.data.size(); }
  size_t hidden() const { return weights_.hidden_size; }

 private:
  static size_t Fitting(size_t size, const WeightQuant& how) {
    return IsGgmlBlock(how.format.dtype) ? (size + 31) / 32 * 32 : size;
  }
  Weights(size_t experts, const WeightQuant& w13, const WeightQuant& w2, bool is_gated,
          bool with_bias, std::mt19937_64& random, size_t hidden, size_t inner)
      : w1_(Bank(experts, inner, hidden, w13, random)),
        w3_(Bank(is_gated ? experts : 0, inner, hidden, w13, random)),
        w2_(Bank(experts, hidden, inner, w2, random)) {
    weights_.hidden_size = hidden;
    weights_.intermediate_size = inner;
    weights_.w1 = Describe(w1_);
    weights_.w3 = Describe(w3_);
    weights_.w2 = Describe(w2_);
    if (!with_bias) return;
    for (ExpertBank* bank : {&weights_.w1, &weights_.w3, &weights_.w2}) {
      for (size_t e = 0; e < bank->data.size(); ++e) {
        biases_.push_back(testing::RandomFloats(random, bank->rows, 0.3f));
        bank->bias.push_back(biases_.back().data());
      }
    }
  }

  static quant::MatrixBank Bank(size_t experts, size_t rows, size_t cols, const WeightQuant& how,
                                std::mt19937_64& random) {
    std::vector<quant::QuantMatrix> matrices;
    for (size_t e = 0; e < experts; ++e) {
      const std::vector<float> w = testing::RandomFloats(random, rows * cols, 0.2f);
      if (IsGgmlBlock(how.format.dtype)) {
        matrices.push_back(quant::QuantMatrix::Make(how.format, rows, cols));
        const size_t bytes = BytesOf(how.format.dtype, cols);
        for (size_t n = 0; n < rows; ++n) {
          quant::EncodeGgmlRow(how.format.dtype, std::span(w).subspan(n * cols, cols),
                               std::span(matrices.back().data).subspan(n * bytes, bytes));
        }
        continue;
      }
      if (how.format.is_quantized() || how.format.has_zero || how.format.dtype == DType::kI8 ||
          DTypeBits(how.format.dtype) < 16) {
        matrices.push_back(quant::QuantizeMatrix(ConstRows(w.data(), rows, cols), how));
        continue;
      }
      matrices.push_back(quant::QuantMatrix::Make(how.format, rows, cols));
      kernels::ConvertFromF32(w.data(), w.size(), how.format.dtype, matrices.back().data.data());
    }
    return quant::MatrixBank(std::move(matrices));
  }
  static ExpertBank Describe(const quant::MatrixBank& bank) {
    const ExpertMatrices view = bank.View();
    ExpertBank described;
    described.format = view.format;
    described.rows = view.rows;
    described.cols = view.cols;
    described.stride = view.stride;
    described.scale_stride = view.scale_stride;
    described.data = {view.data.begin(), view.data.end()};
    described.scale = {view.scale.begin(), view.scale.end()};
    described.zero = {view.zero.begin(), view.zero.end()};
    described.tensor_scale = {view.tensor_scale.begin(), view.tensor_scale.end()};
    described.act.scale = 0.03f;  // of the static quantiser
    return described;
  }

  quant::MatrixBank w1_, w3_, w2_;
  std::vector<std::vector<float>> biases_;
  ExpertWeights weights_;
};

enum class Spread { kRandom, kAllToOne, kSomeSkipped, kAllSkipped };

struct Tokens {
  size_t count, top_k;
  std::vector<float> hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  TopKOutput TopK() const { return {count, top_k, weights, ids, {}}; }
  ConstRows Hidden() const {
    return ConstRows(hidden.data(), count, count == 0 ? 1 : hidden.size() / count);
  }
};

Tokens MakeTokens(size_t count, size_t top_k, size_t experts, size_t width, Spread spread,
                  std::mt19937_64& random) {
  Tokens tokens{count, top_k, testing::RandomFloats(random, count * width), {}, {}};
  for (size_t t = 0; t < count; ++t) {
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    if (spread != Spread::kAllToOne) std::shuffle(order.begin(), order.end(), random);
    for (size_t k = 0; k < top_k; ++k) {
      const bool skip =
          spread == Spread::kAllSkipped || (spread == Spread::kSomeSkipped && random() % 3 == 0);
      tokens.ids.push_back(skip ? -1 : order[k]);
      tokens.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
    }
  }
  return tokens;
}

class AscendRunner : public ::testing::Test {
 protected:
  AscendRunner() : random_(testing::MakeRandom(64)), pool_(2), context_{pool_, arena_} {}

  MoeLayerConfig Config(const std::string& w13, const std::string& w2, size_t experts,
                        size_t top_k) const {
    MoeLayerConfig config;
    config.topk.num_experts = experts;
    config.topk.top_k = top_k;
    config.runner.layer_id = kLayer;
    config.scheme_w13 = w13;
    config.scheme_w2 = w2;
    return config;
  }

  std::vector<float> Run(const MoeLayerConfig& config, const std::string& runner,
                         const Weights& weights, const Tokens& tokens, size_t threads = 2) {
    MoeLayer layer(BuiltinRegistry(), config, {.runner = runner, .act_dtype = "f32"},
                   weights.get());
    ThreadPool pool(threads);
    ExecContext context{pool, arena_};
    ConstRows hidden = tokens.Hidden();
    hidden.cols = weights.hidden();
    const Rows out = layer.ForwardRouted(context, hidden, tokens.TopK());
    return {out.data, out.data + out.rows * out.cols};
  }

  // Relative L2 against an oracle.
  double Distance(const std::vector<float>& found, OracleKind kind, const MoeLayerConfig& config,
                  const Weights& weights, const Tokens& tokens) {
    MoeRunnerConfig runner = config.runner;
    runner.formula = ResolveActivation(BuiltinRegistry(), runner);
    const OracleRows expected =
        RunOracle(kind, Info(config, weights), runner,
                  {tokens.Hidden(), tokens.ids, tokens.weights, tokens.top_k});
    double error = 0, norm = 1e-30;
    EXPECT_EQ(found.size(), expected.values.size());
    for (size_t i = 0; i < found.size(); ++i) {
      error += (found[i] - expected.values[i]) * (found[i] - expected.values[i]);
      norm += expected.values[i] * expected.values[i];
    }
    return std::sqrt(error / norm);
  }

  MoeQuantInfo Info(const MoeLayerConfig& config, const Weights& weights) const {
    MoeQuantInfo info;
    info.w1 = weights.get().w1.View();
    info.w3 = weights.get().w3.View();
    info.w2 = weights.get().w2.View();
    info.a13 = weights.get().w1.act;
    info.a2 = weights.get().w2.act;
    info.a13.kind = BuiltinRegistry().FindScheme(config.scheme_w13).act_quant;
    info.a2.kind = BuiltinRegistry().FindScheme(config.scheme_w2).act_quant;
    return info;
  }

  std::mt19937_64 random_;
  ThreadPool pool_;
  Arena arena_;
  ExecContext context_;
};

TEST_F(AscendRunner, EverySchemeThatListsItHasACase) {
  for (const SchemeEntry& scheme : BuiltinRegistry().schemes()) {
    const bool lists =
        std::find(scheme.runners.begin(), scheme.runners.end(), "ascend") != scheme.runners.end();
    size_t cases = 0;
    for (const SchemeCase& one : Schemes()) cases += one.scheme == scheme.name;
    EXPECT_EQ(cases != 0, lists) << scheme.name;
  }
}

TEST_F(AscendRunner, EverySchemeAgainstTheOracles) {
  for (const SchemeCase& scheme : Schemes()) {
    for (const auto& [experts, hidden, inner] :
         {std::array<size_t, 3>{5, 64, 40}, {3, 37, 23}, {1, 32, 7}, {40, 24, 64}}) {
      const Weights weights(experts, hidden, inner, scheme.weights, scheme.weights, true, true,
                            random_);
      for (size_t count : {0u, 1u, 7u, 33u}) {
        for (size_t top_k : {1u, 3u}) {
          if (top_k > experts) continue;
          const MoeLayerConfig config = Config(scheme.scheme, scheme.scheme, experts, top_k);
          for (Spread spread :
               {Spread::kRandom, Spread::kAllToOne, Spread::kSomeSkipped, Spread::kAllSkipped}) {
            const Tokens tokens =
                MakeTokens(count, top_k, experts, weights.hidden(), spread, random_);
            const std::vector<float> found = Run(config, "ascend", weights, tokens);
            ASSERT_EQ(found.size(), count * weights.hidden());
            if (count == 0) continue;
            ASSERT_LE(Distance(found, OracleKind::kFaithful, config, weights, tokens), scheme.bound)
                << scheme.scheme << " " << experts << " experts, " << count << " tokens";
            // Two ways through the same kernels: nothing may differ.
            ASSERT_EQ(found, Run(config, "aiter", weights, tokens)) << scheme.scheme;
          }
        }
      }
    }
  }
}

TEST_F(AscendRunner, SchemesOfW13AndW2MayDiffer) {
  for (const SchemeCase& w13 : Schemes()) {
    for (const SchemeCase& w2 : Schemes()) {
      const MoeLayerConfig config = Config(w13.scheme, w2.scheme, 4, 2);
      const Weights weights(4, 64, 32, w13.weights, w2.weights, true, false, random_);
      const Tokens tokens = MakeTokens(9, 2, 4, 64, Spread::kSomeSkipped, random_);
      const bool w2_takes_mxfp8 = w2.scheme == "mxfp8" || w2.scheme == "mxfp4_w4a8";
      if (w13.scheme == "mxfp8" && !w2_takes_mxfp8) {
        ExpectError(ErrorCode::kUnsupported, {"layer 6", "MXFP8 (w13)", "aiter"},
                    [&] { Run(config, "ascend", weights, tokens); });
        continue;
      }
      ASSERT_EQ(Run(config, "ascend", weights, tokens), Run(config, "aiter", weights, tokens))
          << w13.scheme << " " << w2.scheme;
    }
  }
}

TEST_F(AscendRunner, BitsDoNotDependOnBatchOrThreads) {
  for (const SchemeCase& scheme : Schemes()) {
    const Weights weights(6, 72, 40, scheme.weights, scheme.weights, true, true, random_);
    const MoeLayerConfig config = Config(scheme.scheme, scheme.scheme, 6, 3);
    const size_t width = weights.hidden();
    const Tokens all = MakeTokens(17, 3, 6, width, Spread::kSomeSkipped, random_);
    const std::vector<float> whole = Run(config, "ascend", weights, all, 1);
    for (size_t threads : {2u, 3u})
      ASSERT_EQ(Run(config, "ascend", weights, all, threads), whole) << scheme.scheme;
    for (size_t t = 0; t < all.count; ++t) {
      const auto part = [&](const auto& values, size_t cols) {
        const auto first = values.begin() + static_cast<std::ptrdiff_t>(t * cols);
        return std::vector(first, first + static_cast<std::ptrdiff_t>(cols));
      };
      const Tokens one{1, 3, part(all.hidden, width), part(all.ids, 3), part(all.weights, 3)};
      ASSERT_EQ(Run(config, "ascend", weights, one, 2), part(whole, width))
          << scheme.scheme << " token " << t;
    }
  }
}

// --- activations

TEST_F(AscendRunner, EveryActivationOfUnquantisedLayers) {
  struct Variant {
    std::string activation;
    std::optional<float> alpha, limit, swiglu_limit;
    bool gated = true;
  };
  const std::vector<Variant> variants = {
      {"silu", {}, {}, {}},       {"silu", 1.702f, 1.0f, {}},     {"silu", {}, 0.5f, {}},
      {"silu", {}, {}, 0.5f},     {"npu_swiglu_oai", {}, {}, {}}, {"swiglu", {}, {}, {}},
      {"situ", {}, {}, {}},       {"situ", 2.0f, 1.0f, {}},       {"gelu", {}, {}, {}},
      {"gelu_tanh", {}, {}, {}},  {"silu", {}, {}, {}, false},    {"relu2", {}, {}, {}, false},
      {"gelu", {}, {}, {}, false}};
  WeightQuant f32;
  const WeightQuant int4 = WeightQuant::Int4Channel();
  for (const Variant& variant : variants) {
    for (const bool quantised : {false, true}) {
      const WeightQuant& how = quantised ? int4 : f32;
      const std::string scheme = quantised ? "w4a4_int" : "unquant";
      const Weights weights(4, 32, 20, how, how, variant.gated, true, random_);
      MoeLayerConfig config = Config(scheme, scheme, 4, 2);
      config.runner.activation = variant.activation;
      config.runner.is_gated = variant.gated;
      config.runner.gemm1_alpha = variant.alpha;
      config.runner.gemm1_clamp_limit = variant.limit;
      config.runner.swiglu_limit = variant.swiglu_limit;
      const Tokens tokens = MakeTokens(12, 2, 4, 32, Spread::kRandom, random_);
      const std::vector<float> found = Run(config, "ascend", weights, tokens);
      EXPECT_LE(Distance(found, OracleKind::kFaithful, config, weights, tokens),
                quantised ? 3e-2 : 3e-6)
          << variant.activation;
      EXPECT_EQ(found, Run(config, "aiter", weights, tokens)) << variant.activation;
    }
  }
}

MoeRunnerConfig Activated(const std::string& activation, std::optional<float> alpha = {},
                          std::optional<float> limit = {}, std::optional<float> swiglu = {},
                          bool gated = true) {
  MoeRunnerConfig config;
  config.layer_id = kLayer;
  config.hidden_size = 64;
  config.intermediate_size_per_partition = 32;
  config.activation = activation;
  config.gemm1_alpha = alpha;
  config.gemm1_clamp_limit = limit;
  config.swiglu_limit = swiglu;
  config.is_gated = gated;
  config.formula = ResolveActivation(BuiltinRegistry(), config);
  return config;
}

// By scheme, the kernel of a prefix of 64 columns.
ExpertKernel Kernel(const std::string& scheme) {
  for (const SchemeCase& one : Schemes()) {
    if (one.scheme != scheme) continue;
    ExpertKernel kernel;
    kernel.format = quant::QuantMatrix::Make(one.weights.format, 64, 64).format;
    kernel.act.kind = BuiltinRegistry().FindScheme(scheme).act_quant;
    return kernel;
  }
  ADD_FAILURE() << scheme;
  return {};
}

AscendActivation Select(const MoeRunnerConfig& config, const std::string& w13,
                        const std::string& w2, DispatchFormat format) {
  return SelectAscendActivation(config, Kernel(w13), Kernel(w2), format);
}

TEST_F(AscendRunner, SelectionOfTheContract) {
  using enum DispatchFormat;
  const MoeRunnerConfig silu = Activated("silu");
  // (1) Fused gemm1: no activation object, and touching it fails.
  for (const char* scheme : {"mxfp8", "mxfp4_w4a8"}) {
    const AscendActivation fused = Select(silu, scheme, scheme, kAscendTp);
    EXPECT_TRUE(fused.fused_gemm1);
    ExpectError(ErrorCode::kInternal, {"component"}, [&] { fused.object(); });
  }
  EXPECT_FALSE(Select(silu, "mxfp4_w4a8", "unquant", kAscendTp).fused_gemm1);
  // (2)
  const MoeRunnerConfig limited = Activated("silu", {}, {}, 7.0f);
  for (DispatchFormat format : {kAscendTp, kDeepepNormal}) {
    const AscendActivation mx = Select(limited, "mxfp4_w4a8", "mxfp4_w4a8", format);
    EXPECT_EQ(mx.object().options().name, "SwigluMxfp8Quant");
    EXPECT_TRUE(mx.object().options().counts_only);
  }
  // (3) DeepEP: grouped, quantised for W8A8 and W4A8.
  for (DispatchFormat format : {kDeepepNormal, kDeepepLl}) {
    const AscendActivation int8 = Select(silu, "w8a8_int8", "w8a8_int8", format);
    EXPECT_TRUE(int8.object().is_grouped());
    EXPECT_EQ(int8.object().output_kind(), ActQuantKind::kInt8Token);
    const AscendActivation oai =
        Select(Activated("silu", 1.702f, 7.0f), "w4a8_int", "w4a8_int", format);
    EXPECT_EQ(oai.object().options().formula.entry.name, "swiglu_oai");
    EXPECT_EQ(oai.object().output_kind(), ActQuantKind::kInt8Token);
    EXPECT_EQ(Select(Activated("situ"), "w8a8_int8", "w8a8_int8", format).object().output_kind(),
              ActQuantKind::kInt8Token);
    EXPECT_EQ(Select(Activated("situ", 4.0f, 2.0f), "mxfp4_w4a8", "mxfp4_w4a8", format)
                  .object()
                  .output_kind(),
              ActQuantKind::kMxFp8);
    EXPECT_EQ(Select(Activated("situ"), "mxfp4_w4a8", "mxfp4_w4a8", format).object().output_kind(),
              ActQuantKind::kNone)
        << "the fused variant needs the linear limit";
    EXPECT_EQ(Select(silu, "unquant", "unquant", format).object().output_kind(),
              ActQuantKind::kNone);
  }
  // (4) W4A4 and plain rows: no scale crosses, gemm2 quantises again.
  for (const char* scheme : {"unquant", "w4a4_int", "mxfp4_w4a4", "awq", "w8a8_int8_static"}) {
    const AscendActivation plain = Select(silu, scheme, scheme, kAscendTp);
    EXPECT_FALSE(plain.object().is_grouped()) << scheme;
    EXPECT_EQ(plain.object().output_kind(), ActQuantKind::kNone) << scheme;
  }
  for (const char* scheme : {"w8a8_int8", "w4a8_int"}) {
    EXPECT_EQ(Select(silu, scheme, scheme, kAscendTp).object().output_kind(),
              ActQuantKind::kInt8Token);
  }
  // The kernel of w2 decides.
  EXPECT_EQ(Select(silu, "w8a8_int8", "w4a4_int", kAscendTp).object().output_kind(),
            ActQuantKind::kNone);
  EXPECT_EQ(Select(silu, "w4a4_int", "w8a8_int8", kAscendTp).object().output_kind(),
            ActQuantKind::kInt8Token);
}

TEST_F(AscendRunner, RefusesWhatTheVendorWouldGetWrong) {
  using enum DispatchFormat;
  const auto refused = [](const MoeRunnerConfig& config, const std::string& w13,
                          const std::string& w2, DispatchFormat format,
                          std::initializer_list<std::string_view> words) {
    const std::string message =
        ExpectError(ErrorCode::kUnsupported, words, [&] { Select(config, w13, w2, format); });
    EXPECT_NE(message.find("layer 6"), std::string::npos) << message;
    EXPECT_NE(message.find("--moe-runner aiter"), std::string::npos) << message;
    EXPECT_NE(message.find(config.activation), std::string::npos) << message;
  };
  const MoeRunnerConfig silu = Activated("silu");
  const MoeRunnerConfig limited = Activated("silu", {}, {}, 7.0f);
  for (const char* scheme : {"w8a8_int8", "w4a8_int"}) {
    for (const MoeRunnerConfig& config :
         {Activated("gelu"), Activated("gelu_tanh"), Activated("situ"),
          Activated("silu", 1.702f, 7.0f), Activated("silu", {}, 7.0f), limited,
          Activated("silu", {}, {}, {}, false)})
      refused(config, scheme, scheme, kAscendTp, {"SwigluQuant", "ascend_tp"});
    for (const MoeRunnerConfig& config : {Activated("gelu"), Activated("silu", {}, 7.0f), limited})
      refused(config, scheme, scheme, kDeepepNormal, {"SwigluDeepEPKernel", "deepep_normal"});
  }
  refused(limited, "mxfp8", "mxfp8", kAscendTp, {"MXFP8", "cannot clamp"});
  refused(Activated("gelu"), "mxfp8", "mxfp8", kAscendTp, {"fused with Swiglu"});
  refused(Activated("situ"), "mxfp8", "mxfp8", kDeepepLl, {"fused with Swiglu"});
  refused(silu, "mxfp8", "w8a8_int8", kAscendTp, {"MXFP8 (w13)", "W8A8 (w2)"});
  refused(Activated("gelu"), "mxfp4_w4a8", "mxfp4_w4a8", kAscendTp, {"unless", "situ"});
  EXPECT_NO_THROW(Select(Activated("situ"), "mxfp4_w4a8", "mxfp4_w4a8", kAscendTp));
}

// With kernels attached it is the constructor that refuses.
TEST_F(AscendRunner, RefusesAtConstruction) {
  const WeightQuant int8 = WeightQuant::Int8Channel();
  const Weights weights(4, 64, 32, int8, int8, true, false, random_);
  MoeLayerConfig config = Config("w8a8_int8", "w8a8_int8", 4, 2);
  config.runner.activation = "gelu";
  const auto build = [&] {
    MoeLayer(BuiltinRegistry(), config, {.runner = "ascend"}, weights.get());
  };
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "W8A8", "gelu", "aiter"}, build);
  config.runner.activation = "silu";
  EXPECT_NO_THROW(build());
  config.runner.no_combine = true;
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "no_combine"}, build);
  config.runner.no_combine = false;
  config.runner.apply_router_weight_on_input = true;
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "apply_router_weight_on_input"}, build);
  config.runner.apply_router_weight_on_input = false;
  config.hidden_pad = 8;
  MoeLayer padded(BuiltinRegistry(), config, {.runner = "ascend"}, weights.get());
  const Tokens tokens = MakeTokens(2, 2, 4, 64, Spread::kRandom, random_);
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "padded"},
              [&] { padded.ForwardRouted(context_, tokens.Hidden(), tokens.TopK()); });
  config.hidden_pad = 0;
  config.expert_mask = {1, 1, 1, 1, 0};
  MoeLayer masked(BuiltinRegistry(), config, {.runner = "ascend"}, weights.get());
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "ascend_tp", "4 of 5"},
              [&] { masked.ForwardRouted(context_, tokens.Hidden(), tokens.TopK()); });
}

TEST_F(AscendRunner, RoutedScalingFactorGoesIntoTheWeights) {
  const Weights weights(4, 32, 16, {}, {}, true, false, random_);
  MoeLayerConfig config = Config("unquant", "unquant", 4, 2);
  config.runner.routed_scaling_factor = 2.5;
  const Tokens tokens = MakeTokens(6, 2, 4, 32, Spread::kRandom, random_);
  const std::vector<float> found = Run(config, "ascend", weights, tokens);
  EXPECT_LE(Distance(found, OracleKind::kDense, config, weights, tokens), 3e-6);
}

// Weight-only arithmetic where activations would be quantised.
TEST_F(AscendRunner, WithoutActivationQuantisation) {
  for (const SchemeCase& scheme : Schemes()) {
    const Weights weights(4, 64, 32, scheme.weights, scheme.weights, true, false, random_);
    const MoeLayerConfig config = Config(scheme.scheme, scheme.scheme, 4, 2);
    const Tokens tokens = MakeTokens(9, 2, 4, 64, Spread::kRandom, random_);
    MoeLayer layer(BuiltinRegistry(), config,
                   {.runner = "ascend", .act_dtype = "f32", .activation_quant = false},
                   weights.get());
    const Rows out = layer.ForwardRouted(context_, tokens.Hidden(), tokens.TopK());
    const std::vector<float> found(out.data, out.data + 9 * 64);
    EXPECT_LE(Distance(found, OracleKind::kDense, config, weights, tokens), 3e-6) << scheme.scheme;
  }
}

// --- DeepEP formats on one rank

class AscendDeepep : public AscendRunner {
 protected:
  // What a dispatcher of either format would do on one rank; rows that are not defined hold NaN.
  struct Answer {
    std::vector<float> rows;
    CombineInput combine;
  };

  std::vector<float> Finalize(ConstRows rows, std::span<const int32_t> row_idx,
                              const Tokens& tokens) {
    ascend::FinalizeRoutingArgs args;
    args.expanded_rows = rows;
    args.expanded_row_idx = row_idx;
    args.num_tokens = tokens.count;
    args.top_k = tokens.top_k;
    args.scales = tokens.weights;
    const Rows out = ascend::FinalizeRouting(kLayer).Run(context_, args);
    return {out.data, out.data + out.rows * out.cols};
  }

  ascend::InitRoutingResult Route(const Tokens& tokens, size_t experts) {
    ascend::InitRoutingArgs args;
    args.x = tokens.Hidden();
    args.expert_ids = tokens.ids;
    args.top_k = tokens.top_k;
    args.expert_num = experts;
    return ascend::InitRoutingV2(kLayer).Run(context_, args);
  }

  std::unique_ptr<MoeRunner> Runner(const MoeLayerConfig& config, const Weights& weights,
                                    DispatchFormat format) {
    MoeRunnerConfig runner = config.runner;
    runner.num_local_experts = runner.num_experts = weights.experts();
    runner.hidden_size = weights.hidden();
    runner.intermediate_size_per_partition = weights.get().intermediate_size;
    runner.top_k = config.topk.top_k;
    return CreateMoeRunner(BuiltinRegistry(), {"ascend", "none", false}, runner,
                           Info(config, weights), format);
  }

  // x with `spare` rows of NaN behind.
  QuantRows WithSpareRows(const QuantRows& x, size_t spare, ActQuant wire) {
    const Rows rows = context_.arena.AllocateRows(x.rows + spare, x.cols);
    for (size_t i = 0; i < rows.rows; ++i) {
      for (size_t k = 0; k < x.cols; ++k)
        rows.Row(i)[k] = i < x.rows ? x.F32().Row(i)[k] : std::nanf("");
    }
    return quant::QuantizeRows(context_, rows, wire);
  }

  std::vector<float> Normal(const MoeLayerConfig& config, const Weights& weights,
                            const Tokens& tokens, ActQuant wire) {
    const ascend::InitRoutingResult routed = Route(tokens, weights.experts());
    std::vector<int32_t> counts(routed.expert_tokens.begin(), routed.expert_tokens.end());
    DeepepNormalDispatchOutput output(kExpandedRows);
    output.hidden_states = WithSpareRows(routed.expanded_x, 3, wire);
    output.topk_ids = tokens.ids;
    output.topk_weights = tokens.weights;
    output.top_k = tokens.top_k;
    output.num_recv_tokens_per_expert = counts;
    const auto runner = Runner(config, weights, DispatchFormat::kDeepepNormal);
    const auto& answer =
        As<DeepepNormalCombineInput>(runner->Run(context_, output, Info(config, weights)));
    EXPECT_EQ(answer.topk_ids.data(), tokens.ids.data());
    EXPECT_EQ(answer.topk_weights.data(), tokens.weights.data());
    EXPECT_EQ(answer.hidden_states.rows, output.hidden_states.rows);
    return Finalize(answer.hidden_states, routed.expanded_row_idx, tokens);
  }

  std::vector<float> LowLatency(const MoeLayerConfig& config, const Weights& weights,
                                const Tokens& tokens, ActQuant wire) {
    const ascend::InitRoutingResult routed = Route(tokens, weights.experts());
    const size_t capacity = tokens.count + 2;
    const size_t experts = weights.experts();
    std::vector<int32_t> masked_m;
    std::vector<size_t> place(routed.expanded_x.rows);
    size_t row = 0;
    for (size_t e = 0; e < experts; ++e) {
      masked_m.push_back(static_cast<int32_t>(routed.expert_tokens[e]));
      for (size_t i = 0; i < static_cast<size_t>(masked_m[e]); ++i) place[row++] = e * capacity + i;
    }
    const Rows rows = context_.arena.AllocateRows(experts * capacity, weights.hidden());
    std::fill_n(rows.data, rows.rows * rows.cols, std::nanf(""));
    for (size_t i = 0; i < place.size(); ++i)
      std::copy_n(routed.expanded_x.F32().Row(i), rows.cols, rows.Row(place[i]));
    std::vector<int32_t> row_idx;
    for (int32_t packed : routed.expanded_row_idx)
      row_idx.push_back(packed < 0 ? -1 : static_cast<int32_t>(place[static_cast<size_t>(packed)]));
    DeepepLlDispatchOutput output;
    output.hidden_states = quant::QuantizeRows(context_, rows, wire);
    output.masked_m = masked_m;
    output.capacity = capacity;
    output.expected_m = 1;
    output.topk_ids = tokens.ids;
    output.topk_weights = tokens.weights;
    output.top_k = tokens.top_k;
    const auto runner = Runner(config, weights, DispatchFormat::kDeepepLl);
    const auto& answer =
        As<DeepepLlCombineInput>(runner->Run(context_, output, Info(config, weights)));
    EXPECT_EQ(answer.hidden_states.rows, experts * capacity);
    EXPECT_EQ(answer.topk_ids.data(), tokens.ids.data());
    return Finalize(answer.hidden_states, row_idx, tokens);
  }
};

TEST_F(AscendDeepep, BothFormatsGiveTheBitsOfAscendTp) {
  for (const SchemeCase& scheme : Schemes()) {
    const Weights weights(5, 64, 40, scheme.weights, scheme.weights, true, true, random_);
    const MoeLayerConfig config = Config(scheme.scheme, scheme.scheme, 5, 2);
    for (const auto& [count, spread] : {std::pair{std::size_t{11}, Spread::kSomeSkipped},
                                        {std::size_t{7}, Spread::kAllToOne},
                                        {std::size_t{3}, Spread::kAllSkipped}}) {
      const Tokens tokens = MakeTokens(count, 2, 5, 64, spread, random_);
      const std::vector<float> expected = Run(config, "ascend", weights, tokens);
      // As plain rows, and as the codes that gemm1 would make of them.
      for (const ActQuant& wire : {ActQuant{}, Info(config, weights).a13}) {
        ASSERT_EQ(Normal(config, weights, tokens, wire), expected) << scheme.scheme;
        ASSERT_EQ(LowLatency(config, weights, tokens, wire), expected) << scheme.scheme;
      }
    }
  }
}

// OAI and SiTU exist behind DeepEP for int8, though not behind ascend_tp.
TEST_F(AscendDeepep, Int8ActivationsOfTheDeepepKernel) {
  const WeightQuant int8 = WeightQuant::Int8Channel();
  const Weights weights(4, 64, 32, int8, int8, true, false, random_);
  const Tokens tokens = MakeTokens(9, 2, 4, 64, Spread::kSomeSkipped, random_);
  for (const bool situ : {false, true}) {
    MoeLayerConfig config = Config("w8a8_int8", "w8a8_int8", 4, 2);
    config.runner.activation = situ ? "situ" : "silu";
    config.runner.gemm1_alpha = 1.702f;
    config.runner.gemm1_clamp_limit = 1.0f;
    const std::vector<float> found = Normal(config, weights, tokens, {});
    EXPECT_LE(Distance(found, OracleKind::kFaithful, config, weights, tokens), 3e-3);
    EXPECT_EQ(found, LowLatency(config, weights, tokens, {}));
  }
}

TEST_F(AscendDeepep, BadDispatchesAreRefused) {
  const Weights weights(3, 32, 16, {}, {}, true, false, random_);
  const MoeLayerConfig config = Config("unquant", "unquant", 3, 2);
  const MoeQuantInfo info = Info(config, weights);
  const std::vector<float> x(9 * 32);
  DeepepNormalDispatchOutput tokens(kTokenRows);
  tokens.hidden_states = QuantRows::Plain(ConstRows(x.data(), 9, 32));
  const auto normal = Runner(config, weights, DispatchFormat::kDeepepNormal);
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "ascend", "expanded", "token rows"},
              [&] { normal->Run(context_, tokens, info); });
  DeepepNormalDispatchOutput expanded(kExpandedRows);
  expanded.hidden_states = tokens.hidden_states;
  const std::vector<int32_t> too_many = {4, 4, 4};
  expanded.num_recv_tokens_per_expert = too_many;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 6", "need 12 rows", "there are 9"},
              [&] { normal->Run(context_, expanded, info); });
  DeepepLlDispatchOutput slab;
  slab.hidden_states = tokens.hidden_states;
  slab.capacity = 3;
  std::vector<int32_t> masked_m = {1, 4, 0};
  slab.masked_m = masked_m;
  const auto low_latency = Runner(config, weights, DispatchFormat::kDeepepLl);
  ExpectError(ErrorCode::kInvalidArgument, {"layer 6", "expert 1 is 4", "capacity 3"},
              [&] { low_latency->Run(context_, slab, info); });
  masked_m[1] = 3;
  slab.capacity = 4;
  ExpectError(ErrorCode::kInvalidArgument, {"9 rows", "12"},
              [&] { low_latency->Run(context_, slab, info); });
  // A wire that the weights do not take.
  slab.capacity = 3;
  slab.hidden_states =
      quant::QuantizeRows(context_, ConstRows(x.data(), 9, 32), {.kind = ActQuantKind::kFp8Group});
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "fp8_group", "F32"},
              [&] { low_latency->Run(context_, slab, info); });
  ExpectError(ErrorCode::kNotFound, {"standard", "ascend"},
              [&] { Runner(config, weights, DispatchFormat::kStandard); });
}

// --- dispatcher

class AscendTp : public AscendRunner {
 protected:
  MoeRunnerConfig Small() const {
    MoeRunnerConfig config;
    config.layer_id = kLayer;
    config.num_experts = config.num_local_experts = 4;
    return config;
  }
};

TEST_F(AscendTp, StagesAndPromises) {
  const auto dispatcher = BuiltinRegistry().FindDispatcher("ascend_tp").make({Small(), "ascend"});
  const Tokens tokens = MakeTokens(3, 2, 4, 8, Spread::kRandom, random_);
  const AscendTpCombineInput answer(context_.arena.AllocateRows(6, 8));
  ExpectError(ErrorCode::kFailedPrecondition, {"layer 6", "combine_a without"},
              [&] { dispatcher->Combine(context_, answer); });
  const auto& output =
      As<AscendTpDispatchOutput>(dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK()));
  EXPECT_EQ(output.hidden_states.rows, 6u);
  EXPECT_EQ(output.promises, kExpandedRows);
  EXPECT_EQ(output.group_list_type, GroupListType::kCounts);
  EXPECT_EQ(output.num_tokens, 3u);
  EXPECT_EQ(output.topk_weights.data(), tokens.weights.data()) << "kept f32";
  ExpectError(ErrorCode::kFailedPrecondition, {"layer 6", "outstanding"},
              [&] { dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK()); });
  ExpectError(ErrorCode::kInvalidArgument, {"6 rows must come back", "found 5"}, [&] {
    dispatcher->Combine(context_, AscendTpCombineInput(context_.arena.AllocateRows(5, 8)));
  });
  AscendTpCombineInput weighted = answer;
  weighted.promises.weights_applied_by = WeightsAppliedBy::kRunner;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 6", "weights applied by the runner"},
              [&] { dispatcher->Combine(context_, weighted); });
  EXPECT_EQ(dispatcher->Combine(context_, answer).rows, 3u);
  ExpectError(ErrorCode::kFailedPrecondition, {"combine_a without"},
              [&] { dispatcher->Combine(context_, answer); });
  dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK());
  dispatcher->Abort();
  EXPECT_NO_THROW(dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK()));
}

TEST_F(AscendTp, IdsOutOfRangeAreNamedAndTheLayerStaysUsable) {
  const Weights weights(4, 32, 16, {}, {}, true, false, random_);
  MoeLayer layer(BuiltinRegistry(), Config("unquant", "unquant", 4, 2), {.runner = "ascend"},
                 weights.get());
  Tokens tokens = MakeTokens(3, 2, 4, 32, Spread::kRandom, random_);
  for (int32_t id : {4, -2}) {
    const int32_t good = tokens.ids[3];
    tokens.ids[3] = id;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 6", "token 1", std::to_string(id), "-1 to 3"},
                [&] { layer.ForwardRouted(context_, tokens.Hidden(), tokens.TopK()); });
    tokens.ids[3] = good;
    EXPECT_NO_THROW(layer.ForwardRouted(context_, tokens.Hidden(), tokens.TopK()));
  }
}

TEST_F(AscendTp, QuantisesAsItIsTold) {
  const auto dispatcher = BuiltinRegistry().FindDispatcher("ascend_tp").make({Small(), "ascend"});
  const Tokens tokens = MakeTokens(3, 2, 4, 64, Spread::kRandom, random_);
  for (ActQuantKind kind : {ActQuantKind::kNone, ActQuantKind::kInt8Token, ActQuantKind::kMxFp8}) {
    EXPECT_TRUE(dispatcher->CanSend(kind));
    dispatcher->SetQuantConfig({.output = {.kind = kind}});
    const auto& output =
        As<AscendTpDispatchOutput>(dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK()));
    EXPECT_EQ(output.hidden_states.kind, kind);
    dispatcher->Abort();
  }
  for (ActQuantKind kind : {ActQuantKind::kMxFp4, ActQuantKind::kFp8Group, ActQuantKind::kInt4Token,
                            ActQuantKind::kInt8Static}) {
    EXPECT_FALSE(dispatcher->CanSend(kind));
    ExpectError(ErrorCode::kUnsupported, {"layer 6", "ascend_tp", ActQuantKindName(kind)},
                [&] { dispatcher->SetQuantConfig({.output = {.kind = kind}}); });
  }
}

// GGUF over two ranks: each has half of every matrix's outputs. Activation and result are gathered,
// nothing is summed; the result is that of one rank.
TEST_F(AscendTp, GgufOnTwoRanks) {
  constexpr size_t kHidden = 24, kInner = 16, kExperts = 3;
  const Weights whole(kExperts, kHidden, kInner, {}, {}, true, false, random_);
  const MoeLayerConfig config = Config("unquant", "unquant", kExperts, 2);
  const Tokens tokens = MakeTokens(7, 2, kExperts, kHidden, Spread::kSomeSkipped, random_);
  const std::vector<float> expected = Run(config, "ascend", whole, tokens);

  const auto half = [](ExpertMatrices w, size_t rank, std::vector<const std::byte*>& pointers) {
    w.rows /= 2;
    for (const std::byte* data : w.data)
      pointers.push_back(data + rank * w.rows * w.stride * sizeof(float));
    w.data = pointers;
    return w;
  };
  // The ranks run one after the other, stage by stage: what a gather of the first call needs is
  // left by the calls before it.
  std::vector<std::vector<std::vector<float>>> stages(2);  // by stage, by rank
  const auto run = [&](size_t rank, size_t known_stages) {
    std::vector<const std::byte*> pointers[3];
    MoeQuantInfo info;
    info.w1 = half(whole.get().w1.View(), rank, pointers[0]);
    info.w3 = half(whole.get().w3.View(), rank, pointers[1]);
    info.w2 = half(whole.get().w2.View(), rank, pointers[2]);
    size_t stage = 0;
    const ascend::GatherColumns gather = [&](ExecContext& context, ConstRows columns) {
      std::vector<std::vector<float>>& shares = stages[stage];
      shares.resize(2);
      std::vector<float>& mine = shares[rank];
      mine.clear();
      for (size_t i = 0; i < columns.rows; ++i)
        mine.insert(mine.end(), columns.Row(i), columns.Row(i) + columns.cols);
      const Rows joined = context.arena.AllocateRows(columns.rows, 2 * columns.cols);
      for (size_t i = 0; i < columns.rows; ++i) {
        for (size_t r : {0u, 1u}) {
          const bool known = stage < known_stages || r == rank;
          for (size_t k = 0; k < columns.cols; ++k)
            joined.Row(i)[r * columns.cols + k] = known ? shares[r][i * columns.cols + k] : 0.0f;
        }
      }
      ++stage;
      return joined;
    };
    MoeRunnerConfig small = Small();
    small.num_experts = small.num_local_experts = kExperts;
    small.hidden_size = kHidden;
    small.intermediate_size_per_partition = kInner;
    small.formula = ResolveActivation(BuiltinRegistry(), small);
    const auto dispatcher = dispatchers::MakeAscendTp(small, gather);
    DispatcherQuantConfig gguf;
    gguf.gguf = true;
    dispatcher->SetQuantConfig(gguf);
    dispatcher->SetQuantConfig(gguf);  // not wrapped twice
    const auto& output =
        As<AscendTpDispatchOutput>(dispatcher->Dispatch(context_, tokens.Hidden(), tokens.TopK()));
    AscendRunnerInput input;
    input.hidden_states = output.hidden_states;
    input.expert_tokens = output.expert_tokens;
    RunningState state;
    const auto& result = static_cast<const AscendRunnerOutput&>(
        runners::AscendRunnerCore(small, gather).Run(context_, input, info, state));
    const Rows rows =
        dispatcher->Combine(context_, AscendTpCombineInput(result.hidden_states, kExpandedRows));
    EXPECT_EQ(stage, 2u);
    return std::vector<float>(rows.data, rows.data + rows.rows * rows.cols);
  };
  for (size_t known_stages : {0u, 1u}) {
    run(0, known_stages);
    run(1, known_stages);
  }
  EXPECT_EQ(run(0, 2), expected);
  EXPECT_EQ(run(1, 2), expected);
}

// --- vendor operands and the older calls

TEST_F(AscendRunner, ExpertsForwardFromVendorOperands) {
  // W8A8 as the vendor stores it: w13 [E, H, 2I], w2 [E, I, H], scales [E, N].
  constexpr size_t kExperts = 3, kHidden = 20, kInner = 12;
  const WeightQuant int8 = WeightQuant::Int8Channel();
  const Weights weights(kExperts, kHidden, kInner, int8, int8, true, false, random_);
  const MoeLayerConfig config = Config("w8a8_int8", "w8a8_int8", kExperts, 2);
  std::vector<int8_t> w13, w2;
  std::vector<float> s13, s2;
  const ExpertWeights& banks = weights.get();
  for (size_t e = 0; e < kExperts; ++e) {
    const auto code = [&](const ExpertBank& bank, size_t n, size_t k) {
      return static_cast<int8_t>(bank.data[e][n * bank.cols + k]);
    };
    for (size_t k = 0; k < kHidden; ++k) {
      for (const ExpertBank* bank : {&banks.w1, &banks.w3}) {
        for (size_t n = 0; n < kInner; ++n) w13.push_back(code(*bank, n, k));
      }
    }
    for (size_t k = 0; k < kInner; ++k) {
      for (size_t n = 0; n < kHidden; ++n) w2.push_back(code(banks.w2, n, k));
    }
    const auto scales = [&](const ExpertBank& bank, std::vector<float>& out) {
      const auto* values = reinterpret_cast<const float*>(bank.scale[e]);
      out.insert(out.end(), values, values + bank.rows);
    };
    scales(banks.w1, s13);
    scales(banks.w3, s13);
    scales(banks.w2, s2);
  }
  const auto view = [](const auto& values, DType dtype, const Shape& shape) {
    return TensorView{reinterpret_cast<const std::byte*>(values.data()), dtype, shape};
  };
  AscendExpertWeights::Prefix p13, p2;
  p13.mode = p2.mode = ascend::GroupedMatmulMode::kW8A8;
  p13.act.kind = p2.act.kind = ActQuantKind::kInt8Token;
  p13.operands.weight = view(w13, DType::kI8, Shape{kExperts, kHidden, 2 * kInner});
  p13.operands.weight_scale = view(s13, DType::kF32, Shape{kExperts, 2 * kInner});
  p2.operands.weight = view(w2, DType::kI8, Shape{kExperts, kInner, kHidden});
  p2.operands.weight_scale = view(s2, DType::kF32, Shape{kExperts, kHidden});
  const AscendExpertWeights vendor(p13, p2, true, kLayer);
  const AscendQuantInfo from_vendor = vendor.QuantInfo();
  const AscendQuantInfo canonical = MakeAscendQuantInfo(Info(config, weights));

  const std::vector<int64_t> counts = {2, 0, 3};
  const std::vector<float> x = testing::RandomFloats(random_, 5 * kHidden);
  MoeRunnerConfig runner = Activated("silu");
  runner.hidden_size = kHidden;
  runner.intermediate_size_per_partition = kInner;
  const AscendActivation activation =
      SelectAscendActivation(runner, {from_vendor.w1.format, from_vendor.a13},
                             {from_vendor.w2.format, from_vendor.a2}, DispatchFormat::kAscendTp);
  ExpertsForwardArgs args;
  args.hidden_states = QuantRows::Plain(ConstRows(x.data(), 5, kHidden));
  args.group_list = {counts, GroupListType::kCounts};
  args.activation = &activation.object();
  args.quant_info = &from_vendor;
  args.layer_id = kLayer;
  const Rows a = ExpertsForward(context_, args);
  args.quant_info = &canonical;
  const Rows b = ApplyWithoutRoutingWeights(context_, args);
  ASSERT_EQ(a.rows, 5u);
  EXPECT_EQ(std::memcmp(a.data, b.data, 5 * kHidden * sizeof(float)), 0);

  p2.act.kind = ActQuantKind::kNone;
  ExpectError(ErrorCode::kInvalidArgument, {"layer 6", "w2", "W8A8", "none", "W4A16"},
              [&] { AscendExpertWeights(p13, p2, true, kLayer); });
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST_F(AscendRunner, FusedMoeNpuEqualsTheModularPath) {
  constexpr size_t kExperts = 4, kHidden = 24, kInner = 10;
  const Weights weights(kExperts, kHidden, kInner, {}, {}, true, false, random_);
  // Stacked as the call wants them: gate rows, then up rows.
  std::vector<std::vector<float>> stacked;
  std::vector<const std::byte*> pointers;
  const ExpertWeights& banks = weights.get();
  for (size_t e = 0; e < kExperts; ++e) {
    std::vector<float> rows;
    for (const ExpertBank* bank : {&banks.w1, &banks.w3}) {
      const auto* values = reinterpret_cast<const float*>(bank->data[e]);
      rows.insert(rows.end(), values, values + kInner * kHidden);
    }
    stacked.push_back(rows);
  }
  for (const auto& rows : stacked)
    pointers.push_back(reinterpret_cast<const std::byte*>(rows.data()));
  ExpertMatrices w1 = banks.w1.View();
  w1.rows = 2 * kInner;
  w1.data = pointers;
  const ExpertMatrices w2 = banks.w2.View();

  size_t warnings = 0;
  SetLogSink(
      [&](LogLevel, std::string_view message, std::initializer_list<LogField>) {
        warnings += message.find("fused_moe_npu") != std::string_view::npos;
      },
      LogLevel::kWarning);
  for (const char* activation : {"silu", "gelu_tanh"}) {
    MoeLayerConfig config = Config("unquant", "unquant", kExperts, 3);
    config.runner.activation = activation;
    for (size_t count : {0u, 1u, 9u}) {
      const Tokens tokens = MakeTokens(count, 3, kExperts, kHidden, Spread::kSomeSkipped, random_);
      MoeRunnerConfig call;
      call.activation = activation;
      call.layer_id = kLayer;
      ConstRows x = tokens.Hidden();
      x.cols = kHidden;
      const Rows out = fused_moe_npu(context_, x, w1, w2, tokens.TopK(), call);
      const std::vector<float> found(out.data, out.data + out.rows * out.cols);
      EXPECT_EQ(found, Run(config, "ascend", weights, tokens)) << activation;
    }
  }
  SetLogSink({}, LogLevel::kError);
  EXPECT_EQ(warnings, 1u) << "it warns once";

  const Tokens tokens = MakeTokens(2, 3, kExperts, kHidden, Spread::kRandom, random_);
  MoeRunnerConfig clamped;
  clamped.layer_id = kLayer;
  clamped.swiglu_limit = 7.0f;
  ExpectError(ErrorCode::kUnsupported, {"layer 6", "fused_moe_npu", "swiglu_limit"},
              [&] { fused_moe_npu(context_, tokens.Hidden(), w1, w2, tokens.TopK(), clamped); });
  ExpectError(ErrorCode::kInvalidArgument, {"layer 0", "w1 [4, 24, 10]"},
              [&] { fused_moe_npu(context_, tokens.Hidden(), w2, w2, tokens.TopK(), {}); });
}
#pragma GCC diagnostic pop

}  // namespace
}  // namespace switchyard::moe
