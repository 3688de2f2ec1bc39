// Random layers and batches, each at every place that takes it, against the oracles: what the axes
// of conformance_test.cc vary one by one, here all at once.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/activation.h"
#include "testing/moe_places.h"
#include "testing/moe_truth.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::GateUpStorage;
using testing::MoeCase;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::MoeTruth;
using testing::Place;
using testing::PlacedLayer;
using testing::Spread;
using testing::Wire;

#ifdef SY_ENABLE_DCHECK
constexpr size_t kLayers = 40;
#else
constexpr size_t kLayers = 200;
#endif

class RandomLayers : public ::testing::Test {
 protected:
  size_t Draw(size_t low, size_t high) { return low + random_() % (high - low + 1); }
  bool OneIn(size_t n) { return random_() % n == 0; }
  const SchemeEntry& AnyScheme() {
    return registry_.schemes()[Draw(0, registry_.schemes().size() - 1)];
  }

  // A config that selects a formula: a registered name, or a contract name with numbers.
  MoeRunnerConfig AnyActivation() {
    MoeRunnerConfig config;
    const auto& entries = registry_.activations();
    for (;;) {
      config = {};
      config.is_gated = !OneIn(4);
      config.activation = OneIn(3) ? "silu" : entries[Draw(0, entries.size() - 1)].name;
      if (OneIn(3)) config.gemm1_clamp_limit = 0.9f;
      if (OneIn(4)) config.gemm1_alpha = 1.3f;
      if (OneIn(4)) config.swiglu_limit = 0.8f;
      try {
        if (ResolveActivation(registry_, config).entry.name != "silu_rounded") return config;
      } catch (const Error& error) {
        EXPECT_NE(error.code(), ErrorCode::kInternal) << error.message();
      }
    }
  }

  MoeCaseOptions AnyOptions() {
    MoeCaseOptions options;
    options.scheme_w13 = AnyScheme().name;
    options.scheme_w2 = OneIn(4) ? std::string(AnyScheme().name) : options.scheme_w13;
    options.variant = Draw(0, 9);
    options.experts = Draw(1, 20);
    options.hidden = OneIn(8) ? Draw(1, 3) : Draw(4, 150);
    options.intermediate = OneIn(8) ? Draw(1, 3) : Draw(4, 100);
    testing::FitSizes(options);
    options.bias = OneIn(2);
    options.storage = static_cast<GateUpStorage>(Draw(0, 2));
    options.replicas = OneIn(4) ? Draw(1, options.experts) : 0;
    options.runner = OneIn(2) ? MoeRunnerConfig{} : AnyActivation();
    options.runner.gate_up_interleaved = options.storage == GateUpStorage::kInterleaved;
    return options;
  }

  // Of contract 2.7: no expert is chosen twice, copies stand for their originals.
  MoeTokens AnyTokens(const MoeCaseOptions& options) {
    const size_t top_k = Draw(1, std::min<size_t>(options.experts, 8));
    const Spread spread = static_cast<Spread>(Draw(0, 4));
    const bool fits = spread != Spread::kNoneToFirst || top_k < options.experts;
    MoeTokens tokens =
        testing::RandomTokens(OneIn(8) ? 0 : Draw(1, 40), top_k, options.experts, options.hidden,
                              fits ? spread : Spread::kRandom, random_);
    for (int32_t& id : tokens.ids) {
      if (id >= 0 && static_cast<size_t>(id) < options.replicas && OneIn(2))
        id += static_cast<int32_t>(options.experts);
    }
    return tokens;
  }

  // Counts that sum up to the number of tokens.
  std::vector<MoeTokens> Divide(const MoeTokens& tokens, size_t ranks) {
    std::vector<MoeTokens> sources;
    size_t first = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t left = tokens.count - first;
      const size_t count = rank + 1 == ranks ? left : Draw(0, left);
      sources.push_back(tokens.Slice(first, count));
      first += count;
    }
    return sources;
  }

  const Registry& registry_ = BuiltinRegistry();
  std::mt19937_64 random_ = testing::MakeRandom(71);
  ThreadPool pool_{2};
  Arena arena_;
  ExecContext context_{pool_, arena_};
};

TEST_F(RandomLayers, AgreeWithTheOraclesEverywhere) {
  const std::vector<Wire> wires = testing::AllWires();
  size_t cells = 0, refused = 0, on_boundary = 0, requantised = 0;
  for (size_t i = 0; i < kLayers; ++i) {
    const MoeCaseOptions options = AnyOptions();
    std::unique_ptr<MoeCase> layer;
    try {
      layer = std::make_unique<MoeCase>(options, random_);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
      continue;  // gate and up cannot share this format's blocks
    }
    const MoeTokens tokens = AnyTokens(options);
    const PlacedLayer placed{layer.get(), layer->Info(!OneIn(4)), layer->Config(tokens.top_k)};
    const Wire& wire = wires[OneIn(2) ? 0 : Draw(0, wires.size() - 1)];
    const SchemeEntry& w13 = registry_.FindScheme(options.scheme_w13);
    const SchemeEntry& w2 = registry_.FindScheme(options.scheme_w2);
    const bool over_batch = placed.info.a13.kind == ActQuantKind::kFp8Tensor ||
                            placed.info.a2.kind == ActQuantKind::kFp8Tensor;
    std::map<std::string, std::unique_ptr<MoeTruth>> truths;
    for (const Place& place : testing::AllPlaces(registry_)) {
      if (!testing::Lists(w13, place.runner) || !testing::Lists(w2, place.runner)) continue;
      size_t ranks = over_batch || place.realisation.kind == testing::Realisation::Kind::kRegistered
                         ? 1
                         : Draw(1, 3);
      if (layer->experts() % ranks != 0) ranks = 1;
      const std::string what = fmt::format(
          "layer {}: {}, {} ranks, wire {}, schemes {} and {}, E {} + {}, H {}, I {}, "
          "T {}, K {}, activation {}",
          i, place.name(), ranks, wire.name, options.scheme_w13, options.scheme_w2, options.experts,
          options.replicas, options.hidden, options.intermediate, tokens.count, tokens.top_k,
          placed.config.formula.entry.name);
      ArenaScope scope(arena_);
      std::vector<float> rows;
      try {
        rows = RunPlace(context_, registry_, place, placed, Divide(tokens, ranks),
                        {.wire = wire, .spare = Draw(0, 4), .expert_output = OneIn(2)});
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kUnsupported) << what << ": " << error.message();
        // Rows that come as they are to a runner that computes everything are never refused.
        const bool plain = wire.how.kind == ActQuantKind::kNone;
        EXPECT_FALSE(plain && (place.runner == "aiter" || place.runner == "reference"))
            << what << ": " << error.message();
        ++refused;
        continue;
      }
      auto arrival = ArrivalOf(context_, place, placed, tokens, wire);
      std::unique_ptr<MoeTruth>& truth = truths[arrival.name];
      if (truth == nullptr)
        truth = std::make_unique<MoeTruth>(*layer, arrival.info, placed.config, arrival.tokens);
      const auto verdict = truth->Judge(rows, false);
      EXPECT_TRUE(verdict.ok) << what << ": " << verdict.why;
      ++cells;
      on_boundary += verdict.codes_on_boundary;
      requantised += truth->num_requantised();
    }
  }
  std::printf(
      "random layers: %zu cells, %zu refused; %zu of %zu requantised values on a boundary\n", cells,
      refused, on_boundary, requantised);
  EXPECT_GT(cells, 2 * kLayers);
  EXPECT_LE(static_cast<double>(on_boundary), 1e-3 * static_cast<double>(requantised));
}

}  // namespace
}  // namespace switchyard::moe
