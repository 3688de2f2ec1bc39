// Every runner that a registered permute pair reaches, against the f64 oracle, on every instruction
// set: all data of contract 8.4 that one rank can have. A runner or pair that is added to the
// tables is tested here without a line of test code.
#include <gtest/gtest.h>

#include <cstring>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/moe_runner.h"
#include "testing/moe_case.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::moe {
namespace {

using testing::MoeCase;

struct Tokens {
  size_t count, top_k;
  std::vector<float> hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

enum class Spread { kRandom, kAllToOne, kSomeSkipped, kAllSkipped };

Tokens MakeTokens(size_t count, size_t top_k, const MoeCase& layer, Spread spread,
                  std::mt19937_64& random) {
  Tokens tokens{count, top_k, testing::RandomFloats(random, count * layer.hidden()), {}, {}};
  for (size_t t = 0; t < count; ++t) {
    std::vector<int32_t> order(layer.experts());
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int32_t>(e);
    if (spread != Spread::kAllToOne) std::shuffle(order.begin(), order.end(), random);
    for (size_t k = 0; k < top_k; ++k) {
      const bool skip =
          spread == Spread::kAllSkipped || (spread == Spread::kSomeSkipped && random() % 3 == 0);
      tokens.ids.push_back(skip ? -1 : order[k]);
      // A skipped slot's weight must not matter.
      tokens.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
    }
  }
  return tokens;
}

struct Result {
  std::vector<float> rows;
};

Result RunPair(const PrePermuteEntry& pair, const MoeCase& layer, const Tokens& tokens, DType act,
               size_t threads, const ExpertWeights& weights) {
  ThreadPool pool(threads);
  Arena arena;
  ExecContext context{pool, arena};
  MoeRunnerConfig config;
  config.num_experts = config.num_local_experts = layer.experts();
  config.hidden_size = layer.hidden();
  config.intermediate_size_per_partition = layer.intermediate();
  config.top_k = tokens.top_k;
  config.activation_dtype = act;
  const auto runner = MoeRunner::Create(BuiltinRegistry(), {std::string(pair.runner), "none", true},
                                        config, pair.format);
  const ConstRows hidden(tokens.hidden.data(), tokens.count, layer.hidden());
  const TopKOutput topk{tokens.count, tokens.top_k, tokens.weights, tokens.ids, {}};
  const StandardDispatchOutput dispatched(hidden, topk);
  MoeQuantInfo info;
  info.w1 = weights.w1.View();
  info.w3 = weights.w3.View();
  info.w2 = weights.w2.View();
  const Rows rows = As<StandardCombineInput>(runner->Run(context, dispatched, info)).hidden_states;
  Result result;
  for (size_t t = 0; t < rows.rows; ++t)
    result.rows.insert(result.rows.end(), rows.Row(t), rows.Row(t) + rows.cols);
  return result;
}

// Contract 8.3, relative L2 against the f64 oracle.
double Bound(DType act) { return act == DType::kBF16 ? 4e-3 * 3 : 1e-6 * 3; }

class RunnerConformance : public ::testing::Test {
 protected:
  // The pairs of format standard; other formats bring their own dispatch.
  std::vector<PrePermuteEntry> Pairs() const {
    std::vector<PrePermuteEntry> pairs;
    for (const PrePermuteEntry& entry : BuiltinRegistry().pre_permutes()) {
      if (entry.format == DispatchFormat::kStandard) pairs.push_back(entry);
    }
    return pairs;
  }
};

TEST_F(RunnerConformance, EveryPairGivesTheOraclesAnswer) {
  size_t cells = 0;
  testing::ForEachTarget([&] {
    auto random = testing::MakeRandom(41);
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const auto& [experts, hidden, inner] :
           {std::array<size_t, 3>{5, 24, 9}, {8, 64, 40}, {1, 7, 3}, {60, 33, 17}}) {
        MoeCase layer(experts, hidden, inner, dtype, random);
        const ExpertWeights weights = layer.Weights();
        for (size_t count : {0u, 1u, 7u, 64u, 129u}) {
          for (size_t top_k : {1u, 2u, 8u}) {
            if (top_k > experts) continue;
            for (Spread spread :
                 {Spread::kRandom, Spread::kAllToOne, Spread::kSomeSkipped, Spread::kAllSkipped}) {
              const Tokens tokens = MakeTokens(count, top_k, layer, spread, random);
              std::vector<std::vector<double>> expected, size;
              for (size_t t = 0; t < count; ++t) {
                for (bool absolute : {false, true}) {
                  (absolute ? size : expected)
                      .push_back(layer.Oracle(tokens.hidden.data() + t * hidden,
                                              tokens.ids.data() + t * top_k,
                                              tokens.weights.data() + t * top_k, top_k, absolute));
                }
              }
              for (const PrePermuteEntry& pair : Pairs()) {
                for (DType act : {DType::kF32, DType::kBF16}) {
                  if (act == DType::kBF16 && dtype != DType::kBF16) continue;
                  const Result result = RunPair(pair, layer, tokens, act, 2, weights);
                  ASSERT_EQ(result.rows.size(), count * hidden);
                  const double distance = testing::RelativeL2(
                      ConstRows(result.rows.data(), count, hidden), expected, size);
                  ASSERT_LE(distance, Bound(act))
                      << pair.runner << " " << DTypeName(dtype) << " " << experts << " experts, "
                      << count << " tokens, top " << top_k;
                  ++cells;
                }
              }
            }
          }
        }
      }
    }
  });
  std::printf("conformance: %zu cells, 0 differ\n", cells);
}

TEST_F(RunnerConformance, BitsDoNotDependOnBatchOrThreads) {
  testing::ForEachTarget([&] {
    auto random = testing::MakeRandom(42);
    MoeCase layer(12, 72, 40, DType::kBF16, random);
    const ExpertWeights weights = layer.Weights();
    const Tokens all = MakeTokens(33, 3, layer, Spread::kSomeSkipped, random);
    for (const PrePermuteEntry& pair : Pairs()) {
      for (DType act : {DType::kF32, DType::kBF16}) {
        const Result whole = RunPair(pair, layer, all, act, 1, weights);
        for (size_t threads : {2u, 3u}) {
          EXPECT_EQ(RunPair(pair, layer, all, act, threads, weights).rows, whole.rows)
              << pair.runner << ", " << threads << " threads";
        }
        for (size_t t = 0; t < all.count; ++t) {
          Tokens one{1, 3, {}, {}, {}};
          one.hidden.assign(all.hidden.begin() + static_cast<std::ptrdiff_t>(t * 72),
                            all.hidden.begin() + static_cast<std::ptrdiff_t>(t * 72 + 72));
          one.ids.assign(all.ids.begin() + static_cast<std::ptrdiff_t>(t * 3),
                         all.ids.begin() + static_cast<std::ptrdiff_t>(t * 3 + 3));
          one.weights.assign(all.weights.begin() + static_cast<std::ptrdiff_t>(t * 3),
                             all.weights.begin() + static_cast<std::ptrdiff_t>(t * 3 + 3));
          const Result alone = RunPair(pair, layer, one, act, 1, weights);
          ASSERT_EQ(std::memcmp(alone.rows.data(), whole.rows.data() + t * 72, 72 * sizeof(float)),
                    0)
              << pair.runner << " token " << t;
        }
      }
    }
  });
}

// Bug-log 18, 34: an expert whose raw output is far beyond f16's range keeps it.
TEST_F(RunnerConformance, LargeIntermediateValuesStayFinite) {
  auto random = testing::MakeRandom(43);
  MoeCase layer(2, 32, 16, DType::kBF16, random);
  auto* w2 = reinterpret_cast<BF16*>(layer.w2().data());
  for (size_t i = 0; i < 2 * 32 * 16; ++i) w2[i] = ToBF16(1e6f);
  const ExpertWeights weights = layer.Weights();
  for (size_t count : {1u, 63u, 64u, 65u}) {
    Tokens tokens = MakeTokens(count, 1, layer, Spread::kRandom, random);
    for (float& weight : tokens.weights) weight = 1e-3f;
    std::vector<std::vector<double>> expected;
    for (size_t t = 0; t < count; ++t) {
      expected.push_back(layer.Oracle(tokens.hidden.data() + t * 32, tokens.ids.data() + t,
                                      tokens.weights.data() + t, 1));
    }
    for (const PrePermuteEntry& pair : Pairs()) {
      for (DType act : {DType::kF32, DType::kBF16}) {
        const Result result = RunPair(pair, layer, tokens, act, 2, weights);
        for (float value : result.rows) ASSERT_TRUE(std::isfinite(value));
        // All columns of W2 are equal, so outputs are differences of large numbers: only f32 can
        // hold their ratio.
        if (act == DType::kF32) {
          EXPECT_LE(
              testing::RelativeL2(ConstRows(result.rows.data(), count, 32), expected, expected),
              1e-2);
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::moe
