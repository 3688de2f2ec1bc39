// FuseEP on ranks that are threads: the bits of runner "aiter" on one rank, whatever the ranks, the
// mode and the tokens; the oracle's bounds; and what happens when a rank fails.
#include "switchyard/moe/fuseep/fused_moe.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>

#include "moe/fuseep/fuse_ranks.h"
#include "switchyard/parallel/run_ranks.h"
#include "testing/errors.h"
#include "testing/moe_truth.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using std::chrono::milliseconds;
using testing::ExpectError;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::Spread;
using namespace fuse_ranks;

// The checked builds are ten times slower.
#ifdef SY_ENABLE_DCHECK
constexpr size_t kSteps = 100;
#else
constexpr size_t kSteps = 1000;
#endif

constexpr int kModes[] = {kDispatchGmmCombineDecode, kDispatchFfnCombine};

// Calls body(rank, layer) on every rank, with the layer on a buffer of its own.
void RunLayer(size_t num_ranks, const TestLayer& layer, const FusedMoeOptions& options,
              const std::function<void(Rank&, FusedMoe&)>& body) {
  RunRanks(num_ranks, [&](ProcessGroup& world) {
    Rank rank(world);
    FusedMoe moe(*rank.group, layer.ConfigOf(num_ranks), options);
    body(rank, moe);
  });
}

struct Scheme {
  const char* name;
  size_t variant;  // of unquant: f32, bf16, f16
  DType act;
  DType wire;
};
constexpr Scheme kSchemes[] = {
    {"unquant", 0, DType::kF32, DType::kF32},   {"unquant", 1, DType::kF32, DType::kF32},
    {"unquant", 1, DType::kBF16, DType::kBF16}, {"unquant", 2, DType::kF32, DType::kF32},
    {"w8a8_int8", 0, DType::kF32, DType::kI8},  {"w8a8_int8", 1, DType::kBF16, DType::kI8}};

TEST(FusedMoe, HasTheBitsOfOneRank) {
  std::mt19937_64 random = testing::MakeRandom(71);
  const size_t sizes[] = {7, 0, 64, 1, kLimit};
  for (const Scheme& scheme : kSchemes) {
    for (size_t top_k : {1u, 2u, 8u}) {
      MoeCaseOptions options = CaseOptions(scheme.name, scheme.variant);
      options.bias = top_k == 2;
      const TestLayer layer(options, top_k, scheme.act, random);
      for (size_t num_ranks : {1u, 2u, 3u, 4u, 8u}) {
        std::vector<Batch> batches;
        for (Spread spread : {Spread::kRandom, Spread::kSomeSkipped, Spread::kNoneToFirst,
                              Spread::kAllToOne, Spread::kAllSkipped}) {
          std::vector<size_t> counts;
          for (size_t rank = 0; rank < num_ranks; ++rank)
            counts.push_back(sizes[(rank + batches.size()) % std::size(sizes)]);
          batches.push_back(MakeBatch(layer, counts, spread, random));
        }
        batches.push_back(
            MakeBatch(layer, std::vector<size_t>(num_ranks, 0), Spread::kRandom, random));
        RunRanks(num_ranks, [&](ProcessGroup& world) {
          Rank rank(world);
          for (int mode : kModes) {
            FusedMoe moe(*rank.group, layer.ConfigOf(num_ranks), Options(mode));
            EXPECT_EQ(moe.wire_dtype(), scheme.wire);
            for (size_t i = 0; i < batches.size(); ++i)
              rank.ExpectBits(moe, layer, batches[i],
                              fmt::format("{} {}, top_k {}, mode {}, batch {}", scheme.name,
                                          scheme.variant, top_k, mode, i));
          }
        });
      }
    }
  }
}

TEST(FusedMoe, KeepsTheOraclesBounds) {
  std::mt19937_64 random = testing::MakeRandom(72);
  for (const char* scheme : {"unquant", "w8a8_int8"}) {
    const TestLayer layer(CaseOptions(scheme), 4, DType::kF32, random);
    std::vector<testing::MoeTruth> truths;
    for (size_t count : {11u, 5u, 0u, 17u}) {
      truths.emplace_back(layer.layer(), layer.info(), layer.config(),
                          Tokens(count, 4, Spread::kSomeSkipped, random));
    }
    for (int mode : kModes) {
      RunLayer(4, layer, Options(mode), [&](Rank& rank, FusedMoe& moe) {
        const testing::MoeTruth& truth = truths[rank.group->rank()];
        if (truth.tokens().count == 0) {
          rank.Run(moe, layer, truth.tokens());
          return;
        }
        const testing::Verdict verdict = truth.Judge(rank.Run(moe, layer, truth.tokens()));
        EXPECT_TRUE(verdict.ok) << scheme << ": " << verdict.why;
      });
    }
  }
}

// What the layer may be besides gated silu.
TEST(FusedMoe, ObeysTheConfig) {
  std::mt19937_64 random = testing::MakeRandom(73);
  const auto expect_bits = [&](const char* what, size_t top_k,
                               const std::function<void(MoeCaseOptions&)>& change) {
    for (const char* scheme : {"unquant", "w8a8_int8"}) {
      MoeCaseOptions options = CaseOptions(scheme);
      change(options);
      const TestLayer layer(options, top_k, DType::kF32, random);
      const Batch batch = MakeBatch(layer, {9, 3, 0}, Spread::kSomeSkipped, random);
      RunLayer(3, layer, Options(),
               [&](Rank& rank, FusedMoe& moe) { rank.ExpectBits(moe, layer, batch, what); });
    }
  };
  expect_bits("alpha and limit", 2, [](MoeCaseOptions& options) {
    options.runner.activation = "npu_swiglu_oai";
    options.runner.gemm1_alpha = 1.702f;
    options.runner.gemm1_clamp_limit = 1.5f;
  });
  expect_bits("clamped silu", 2, [](auto& options) { options.runner.swiglu_limit = 0.7f; });
  expect_bits("gelu", 2, [](auto& options) { options.runner.activation = "gelu"; });
  expect_bits("not gated", 2, [](MoeCaseOptions& options) {
    options.runner.is_gated = false;
    options.runner.activation = "relu2";
  });
  expect_bits("factor", 2, [](auto& options) { options.runner.routed_scaling_factor = 2.5; });
  expect_bits("weights on the input", 1,
              [](auto& options) { options.runner.apply_router_weight_on_input = true; });
  expect_bits("gate and up in turn", 2, [](auto& options) {
    options.storage = testing::GateUpStorage::kInterleaved;
    options.bias = true;
  });
}

// int8 weights whose activations stay plain (--no-activation-quant), and two different schemes.
TEST(FusedMoe, TakesEachProductAsItIs) {
  std::mt19937_64 random = testing::MakeRandom(74);
  MoeCaseOptions mixed = CaseOptions("w8a8_int8");
  mixed.scheme_w2 = "unquant";
  const TestLayer layer(mixed, 2, DType::kF32, random);
  const Batch batch = MakeBatch(layer, {9, 3}, Spread::kRandom, random);
  RunLayer(2, layer, Options(),
           [&](Rank& rank, FusedMoe& moe) { rank.ExpectBits(moe, layer, batch, "mixed"); });

  TestLayer plain(CaseOptions("w8a8_int8"), 2, DType::kF32, random);
  plain.config().w13_kernel->act = plain.config().w2_kernel->act = {};
  const MoeTokens tokens = Tokens(6, 2, Spread::kRandom, random);
  const testing::MoeTruth truth(plain.layer(), plain.layer().Info(false), plain.config(), tokens);
  RunLayer(2, plain, Options(), [&](Rank& rank, FusedMoe& moe) {
    EXPECT_EQ(moe.wire_dtype(), DType::kF32);
    MoeQuantInfo info = plain.InfoOf(*rank.group);
    info.a13 = info.a2 = {};
    ExecContext context{rank.pool, rank.arena};
    const Rows rows = moe.Run(context, tokens.Hidden(), tokens.TopK(), info);
    const testing::Verdict verdict =
        truth.Judge(std::vector<float>(rows.data, rows.data + rows.rows * rows.cols));
    EXPECT_TRUE(verdict.ok) << verdict.why;
  });
}

TEST(FusedMoe, ThreadsDoNotMatter) {
  std::mt19937_64 random = testing::MakeRandom(75);
  const TestLayer layer(CaseOptions("w8a8_int8"), 8, DType::kF32, random);
  const Batch batch = MakeBatch(layer, {64, 33}, Spread::kRandom, random);
  RunRanks(2, [&](ProcessGroup& world) {
    Rank rank(world, 3);
    for (int mode : kModes) {
      FusedMoe moe(*rank.group, layer.ConfigOf(2), Options(mode));
      rank.ExpectBits(moe, layer, batch, "three threads");
    }
  });
}

// Many more rows than are computed at a time, and more experts than there are blocks.
TEST(FusedMoe, LargeBatch) {
  std::mt19937_64 random = testing::MakeRandom(76);
  MoeCaseOptions small = CaseOptions("w8a8_int8");
  small.hidden = 32;
  small.intermediate = 16;
  const TestLayer layer(small, 8, DType::kF32, random);
  FusedMoeOptions options = Options();
  options.num_max_dispatch_tokens_per_rank = 700;
  Batch batch;
  for (size_t count : {700u, 650u}) {
    batch.sources.push_back(testing::RandomTokens(count, 8, kExperts, 32, Spread::kRandom, random));
    batch.expected.push_back(layer.OnOneRank(batch.sources.back()));
  }
  for (size_t num_ranks : {1u, 2u}) {
    for (int mode : kModes) {
      options.mode = mode;
      RunLayer(num_ranks, layer, options,
               [&](Rank& rank, FusedMoe& moe) { rank.ExpectBits(moe, layer, batch, "large"); });
    }
  }
}

TEST(FusedMoe, LayersShareABuffer) {
  std::mt19937_64 random = testing::MakeRandom(77);
  const TestLayer layers[] = {{CaseOptions("w8a8_int8"), 2, DType::kF32, random},
                              {CaseOptions("unquant", 0), 2, DType::kF32, random},
                              {CaseOptions("unquant", 1), 2, DType::kBF16, random}};
  std::vector<Batch> batches;
  for (size_t i = 0; i < 12; ++i)
    batches.push_back(MakeBatch(layers[i % 3], {i, 20 - i, 3}, Spread::kRandom, random));
  RunRanks(3, [&](ProcessGroup& world) {
    Rank rank(world);
    const auto buffer = std::make_shared<FusedMoeBuffer>(
        *rank.group,
        FusedMoeShape{.hidden_size = kHidden, .top_k = 2, .num_local_experts = kExperts / 3},
        Options());
    std::vector<std::unique_ptr<FusedMoe>> moes;
    for (const TestLayer& layer : layers)
      moes.push_back(std::make_unique<FusedMoe>(buffer, layer.ConfigOf(3), Options()));
    for (size_t i = 0; i < batches.size(); ++i)
      rank.ExpectBits(*moes[i % 3], layers[i % 3], batches[i], "shared");
  });
}

TEST(FusedMoe, ManyRandomSteps) {
  RunRanks(4, [](ProcessGroup& world) { fuse_ranks::RunRandomSteps(world, kSteps); });
}

TEST(FusedMoe, TooManyTokensFailOnAllRanks) {
  std::mt19937_64 random = testing::MakeRandom(79);
  const TestLayer layer(CaseOptions("w8a8_int8"), 2, DType::kF32, random);
  const Batch good = MakeBatch(layer, {5, 6, 7}, Spread::kRandom, random);
  const MoeTokens many = Tokens(kLimit + 1, 2, Spread::kRandom, random);
  for (int mode : kModes) {
    RunLayer(3, layer, Options(mode), [&](Rank& rank, FusedMoe& moe) {
      const size_t me = rank.group->rank();
      rank.ExpectBits(moe, layer, good, "before");
      if (me == 1) {
        ExpectError(ErrorCode::kInvalidArgument,
                    {"layer 3", "71 tokens", "num-max-dispatch-tokens-per-rank", "70"},
                    [&] { rank.Run(moe, layer, many); });
      } else {
        ExpectError(ErrorCode::kUnavailable, {"layer 3", "rank 1 of group \"fuse_ep\" failed"},
                    [&] { rank.Run(moe, layer, good.sources[me]); });
      }
      rank.ExpectBits(moe, layer, good, "after");
    });
  }
}

TEST(FusedMoe, RefusesWhatContradictsItself) {
  std::mt19937_64 random = testing::MakeRandom(80);
  const TestLayer layer(CaseOptions("w8a8_int8"), 2, DType::kF32, random);
  const Batch good = MakeBatch(layer, {5}, Spread::kRandom, random);
  const MoeTokens& tokens = good.sources[0];
  RunLayer(1, layer, Options(), [&](Rank& rank, FusedMoe& moe) {
    const auto expect_refusal = [&](std::initializer_list<std::string_view> words, ConstRows hidden,
                                    const TopKOutput& topk, const MoeQuantInfo& info) {
      ExecContext context{rank.pool, rank.arena};
      ExpectError(ErrorCode::kInvalidArgument, words,
                  [&] { moe.Run(context, hidden, topk, info); });
      rank.ExpectBits(moe, layer, good, "after a refusal");
    };
    const MoeQuantInfo info = layer.InfoOf(*rank.group);
    TopKOutput topk = tokens.TopK();
    expect_refusal({"layer 3", "4 rows", "5 tokens"}, tokens.Hidden().Slice(0, 4), topk, info);
    expect_refusal({"layer 3", "95 columns", "96"}, ConstRows(tokens.hidden.data(), 5, 95), topk,
                   info);
    topk.top_k = 1;
    topk.num_tokens = 10;
    const std::vector<float> ten(10 * kHidden);
    expect_refusal({"layer 3", "top_k 1", "2"}, ConstRows(ten.data(), 10, kHidden), topk, info);
    expect_refusal({"layer 3", "23 experts", "24"}, tokens.Hidden(), tokens.TopK(),
                   layer.layer().InfoOfExperts(0, 23));
    MoeQuantInfo other = info;
    other.a13.kind = ActQuantKind::kNone;
    expect_refusal({"layer 3", "activations none", "int8_token"}, tokens.Hidden(), tokens.TopK(),
                   other);
  });
}

// A rank that does not come: the others say for whom they waited, and all go on together.
TEST(FusedMoe, LateRank) {
  std::mt19937_64 random = testing::MakeRandom(81);
  const TestLayer layer(CaseOptions("unquant"), 2, DType::kF32, random);
  const Batch batch = MakeBatch(layer, {5, 6, 7}, Spread::kRandom, random);
  FusedMoeOptions impatient = Options();
  impatient.timeout = milliseconds(500);
  RunRanks(3, [&](ProcessGroup& world) {
    Rank rank(world);
    const size_t me = rank.group->rank();
    const auto buffer = std::make_shared<FusedMoeBuffer>(
        *rank.group, FusedMoeShapeOf(layer.ConfigOf(3)), Options());
    FusedMoe moe(buffer, layer.ConfigOf(3), Options());
    FusedMoe hasty(buffer, layer.ConfigOf(3), impatient);
    const auto expect_late = [&](std::string_view stage) {
      if (me == 2) return;
      // Both that came wait, and the first whose time is over ends it for the other.
      const std::string message = ExpectError(ErrorCode::kUnavailable, {"layer 3"},
                                              [&] { rank.Run(hasty, layer, batch.sources[me]); });
      if (message.find("failed in this step") != std::string::npos) return;
      for (std::string_view word : {stage, std::string_view("rank 2"), std::string_view("500 ms")})
        EXPECT_NE(message.find(word), std::string::npos) << message;
    };
    const auto meet = [&] { rank.group->Barrier(Deadline::After(milliseconds(60000), "test")); };
    rank.ExpectBits(moe, layer, batch, "before");
    expect_late("stage dispatch");
    meet();
    // The step of the others has failed; so does this rank's part of it.
    if (me == 2) {
      ExpectError(ErrorCode::kUnavailable, {"layer 3", "failed in this step"},
                  [&] { rank.Run(moe, layer, batch.sources[me]); });
    }
    rank.ExpectBits(moe, layer, batch, "after");
    meet();
    // Twice: the second step cannot begin.
    expect_late("stage dispatch");
    expect_late("stage begin");
    meet();
    if (me == 2) {
      ExpectError(ErrorCode::kUnavailable, {"failed in this step"},
                  [&] { rank.Run(moe, layer, batch.sources[me]); });
    }
    rank.ExpectBits(moe, layer, batch, "after both");
  });
}

TEST(FusedMoe, ABrokenGroupEndsTheWait) {
  std::mt19937_64 random = testing::MakeRandom(82);
  const TestLayer layer(CaseOptions("unquant"), 2, DType::kF32, random);
  const Batch batch = MakeBatch(layer, {5, 6}, Spread::kRandom, random);
  RunLayer(2, layer, Options(), [&](Rank& rank, FusedMoe& moe) {
    if (rank.group->rank() == 1) return rank.group->Abort("the dice fell off the table");
    ExpectError(ErrorCode::kUnavailable, {"the dice fell off the table"},
                [&] { rank.Run(moe, layer, batch.sources[0]); });
  });
}

TEST(FusedMoe, NoAllocationOnceWarm) {
  std::mt19937_64 random = testing::MakeRandom(83);
  const TestLayer layer(CaseOptions("w8a8_int8"), 2, DType::kF32, random);
  const Batch batch = MakeBatch(layer, {30}, Spread::kRandom, random);
  RunLayer(1, layer, Options(), [&](Rank& rank, FusedMoe& moe) {
    size_t before = 0;
    for (int pass = 0; pass < 4; ++pass) {
      if (pass == 2) before = rank.arena.num_system_allocations();
      rank.arena.Reset();
      ExecContext context{rank.pool, rank.arena};
      moe.Run(context, batch.sources[0].Hidden(), batch.sources[0].TopK(),
              layer.InfoOf(*rank.group));
    }
    EXPECT_EQ(rank.arena.num_system_allocations(), before);
  });
}

// --- Building ----------------------------------------------------------------------------------

void ExpectNoLayer(ErrorCode code, std::initializer_list<std::string_view> words,
                   const RankOptions& ranks, const MoeRunnerConfig& config,
                   const FusedMoeOptions& options) {
  RunRanks(ranks, [&](ProcessGroup& world) {
    ExpectError(code, words, [&] { FusedMoe(world, config, options); });
  });
}

TEST(FusedMoe, BufferTooSmall) {
  std::mt19937_64 random = testing::MakeRandom(84);
  const TestLayer layer(CaseOptions("unquant"), 2, DType::kF32, random);
  FusedMoeOptions options = Options();
  options.buffer_mb = 3;
  options.num_max_dispatch_tokens_per_rank = 8192;
  // (2 sources + 2 routes home) * 8192 rows * 384 bytes are 12 MB.
  ExpectNoLayer(ErrorCode::kResourceExhausted,
                {"moe-fused-buffer-mb is 3", "13 MB are needed", "8192 tokens",
                 "num-max-dispatch-tokens-per-rank"},
                {.num_ranks = 2}, layer.ConfigOf(2), options);
  options.buffer_mb = 13;
  RunLayer(2, layer, options, [&](Rank&, FusedMoe& moe) {
    EXPECT_LE(moe.buffer().bytes(), size_t{13} << 20);
    EXPECT_GT(moe.buffer().bytes(), size_t{12} << 20);
  });
}

TEST(FusedMoe, BytesOfABuffer) {
  // 128 tokens of H 7168 on 4 ranks, k 8: rows of 4 sources, scales, counts, routes; rows home.
  const FusedMoeShape shape{
      .hidden_size = 7168, .top_k = 8, .num_local_experts = 64, .row_bytes = 7168};
  const size_t source = 128 * 7168 + 128 * 4 + 64 * 4 + 128 * 8 * 8;
  EXPECT_EQ(FusedMoeBytes(shape, 128, 4),
            4 * source + 128 * 8 * size_t{7168} * 4 + 4 * (16 + 2) * 64);
  FusedMoeShape f32 = shape;
  f32.row_bytes = 0;
  EXPECT_EQ(FusedMoeBytes(f32, 128, 4), FusedMoeBytes(shape, 128, 4) + 4 * 128 * 3 * size_t{7168});
  FusedMoeShape huge = shape;
  huge.hidden_size = SIZE_MAX / 8;
  ExpectError(ErrorCode::kResourceExhausted, {"addressed"}, [&] { FusedMoeBytes(huge, 128, 4); });
  ExpectError(ErrorCode::kInvalidArgument, {"num-max-dispatch-tokens-per-rank", "found 0"},
              [&] { FusedMoeBytes(shape, 0, 4); });
  FusedMoeShape none = shape;
  none.top_k = 0;
  ExpectError(ErrorCode::kInvalidArgument, {"top_k"}, [&] { FusedMoeBytes(none, 128, 4); });
}

// Own setting, DEEPEP_HCCL_BUFFSIZE, HCCL_BUFFSIZE, 200.
TEST(FusedMoe, WhereTheBufferSizeComesFrom) {
  const auto expect = [](size_t buffer_mb, size_t mb, std::string_view source) {
    FusedMoeOptions options;
    options.buffer_mb = buffer_mb;
    const FusedBufferLimit limit = ResolveFusedBuffer(options);
    EXPECT_EQ(limit.mb, mb);
    EXPECT_EQ(limit.source, source);
  };
  const char* const names[] = {"SWITCHYARD_MOE_FUSED_BUFFER_MB", "DEEPEP_HCCL_BUFFSIZE",
                               "HCCL_BUFFSIZE"};
  for (const char* name : names) unsetenv(name);
  expect(0, 200, "default");
  setenv(names[2], "300", 1);
  expect(0, 300, names[2]);
  setenv(names[1], "400", 1);
  expect(0, 400, names[1]);
  setenv(names[0], "500", 1);
  expect(0, 500, names[0]);
  expect(7, 7, "moe-fused-buffer-mb");
  setenv(names[0], "much", 1);
  ExpectError(ErrorCode::kInvalidArgument, {names[0], "much"},
              [] { ResolveFusedBuffer(FusedMoeOptions{}); });
  for (const char* name : names) unsetenv(name);
  Settings settings;
  settings.Set("moe-fused-buffer-mb", "12", "--moe-fused-buffer-mb");
  EXPECT_EQ(ResolveFusedBuffer({}, settings).mb, 12u);
  EXPECT_EQ(ResolveFusedBuffer({}, settings).source, "--moe-fused-buffer-mb");
  EXPECT_EQ(settings.GetCount("fuseep-mode"), 2u);
}

TEST(FusedMoe, RunsInsideANode) {
  std::mt19937_64 random = testing::MakeRandom(85);
  const TestLayer layer(CaseOptions("unquant"), 2, DType::kF32, random);
  ExpectNoLayer(ErrorCode::kUnsupported, {"FuseEP runs inside a node", "2 of the 4 ranks"},
                {.num_ranks = 4, .node_size = 2}, layer.ConfigOf(4), Options());
}

TEST(FusedMoe, RefusesWhatItCannotCompute) {
  std::mt19937_64 random = testing::MakeRandom(86);
  const RankOptions two{.num_ranks = 2};
  for (const char* scheme : {"fp8_channel", "w4a8_int", "mxfp8", "awq"}) {
    const TestLayer layer(CaseOptions(scheme), 2, DType::kF32, random);
    ExpectNoLayer(ErrorCode::kUnsupported, {"layer 3", "FuseEP", "w13 is", "W8A8"}, two,
                  layer.ConfigOf(2), Options());
  }
  const TestLayer layer(CaseOptions("unquant"), 2, DType::kF32, random);
  const auto expect_refusal = [&](ErrorCode code, std::initializer_list<std::string_view> words,
                                  const std::function<void(MoeRunnerConfig&)>& spoil) {
    MoeRunnerConfig config = layer.ConfigOf(2);
    spoil(config);
    ExpectNoLayer(code, words, two, config, Options());
  };
  expect_refusal(ErrorCode::kUnsupported, {"layer 3", "no_combine"},
                 [](auto& config) { config.no_combine = true; });
  expect_refusal(ErrorCode::kUnsupported, {"layer 3", "top_k 1, found 2"},
                 [](auto& config) { config.apply_router_weight_on_input = true; });
  expect_refusal(ErrorCode::kInvalidArgument, {"layer 3", "w13_kernel"},
                 [](auto& config) { config.w13_kernel.reset(); });
  expect_refusal(ErrorCode::kInvalidArgument, {"layer 3", "formula"},
                 [](auto& config) { config.formula = {}; });
  FusedMoeOptions third = Options(3);
  ExpectNoLayer(ErrorCode::kInvalidArgument, {"layer 3", "fuseep-mode", "found 3"}, two,
                layer.ConfigOf(2), third);
}

// What ranks or layers do not agree on is an error of all, and nobody hangs.
TEST(FusedMoe, RanksMustAgree) {
  std::mt19937_64 random = testing::MakeRandom(87);
  const TestLayer layer(CaseOptions("unquant", 1), 2, DType::kF32, random);
  RunRanks(3, [&](ProcessGroup& world) {
    FusedMoeOptions options = Options();
    if (world.rank() == 2) options.num_max_dispatch_tokens_per_rank = 5;
    ExpectError(ErrorCode::kInvalidArgument,
                {"num-max-dispatch-tokens-per-rank", "70 on rank 0", "5 on rank 2"},
                [&] { FusedMoe(world, layer.ConfigOf(3), options); });
    const auto buffer = std::make_shared<FusedMoeBuffer>(
        world, FusedMoeShape{.hidden_size = kHidden, .top_k = 2, .num_local_experts = 8},
        Options());
    MoeRunnerConfig config = layer.ConfigOf(3);
    if (world.rank() == 1) config.activation_dtype = DType::kBF16;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 3", "the type of rows", "on rank 1"},
                [&] { FusedMoe(buffer, config, Options()); });
    config = layer.ConfigOf(3);
    config.top_k = 4;
    ExpectError(ErrorCode::kInvalidArgument, {"layer 3", "top_k 4"},
                [&] { FusedMoe(buffer, config, Options()); });
    EXPECT_NO_THROW(FusedMoe(buffer, layer.ConfigOf(3), Options()));
  });
}

}  // namespace
}  // namespace switchyard::moe
