// Speed of choosing on one thread: experts for tokens (softmax, sigmoid, top-k, groups), the other
// formats of that choice, and the next token from logits. One token as in decoding, and 4096 as in
// a prompt. Bytes are those of the logits (ids and weights for the formats), which are read once:
// the share of the read bandwidth says how far choosing is from costing no more than to read them.
// What it costs beside a layer's products, moe_bench says.
#include <benchmark/benchmark.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "limits_counters.h"
#include "quant/expert_rows.h"
#include "switchyard/core/arena.h"
#include "switchyard/engine/sampler.h"
#include "switchyard/moe/routing/select_experts.h"
#include "switchyard/moe/routing/topk_formats.h"

namespace switchyard {
namespace {

using moe::TopKConfig;
using moe::TopKOutput;

constexpr size_t kMaxTokens = 4096;
constexpr size_t kVocabulary = 151936;

std::vector<float> RandomLogits(size_t count) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Router {
  std::string name;
  TopKConfig config;
};

std::vector<Router> Routers() {
  static const std::vector<float> bias = RandomLogits(256);
  TopKConfig softmax;
  softmax.num_experts = 128;
  softmax.top_k = 8;
  TopKConfig chosen = softmax;
  chosen.policy = moe::RoutingPolicy::kTopKThenSoftmax;
  chosen.num_experts = 32;
  chosen.top_k = 4;
  TopKConfig sigmoid = softmax;
  sigmoid.scoring_func = moe::ScoringFunc::kSigmoid;
  TopKConfig grouped = softmax;
  grouped.num_experts = 256;
  grouped.correction_bias = bias;
  grouped.use_grouped_topk = true;
  grouped.num_expert_group = 8;
  grouped.topk_group = 4;
  return {{"softmax/8_of_128", softmax},
          {"topk_softmax/4_of_32", chosen},
          {"sigmoid/8_of_128", sigmoid},
          {"sigmoid_groups/8_of_256", grouped}};
}

class Tokens {
 public:
  Tokens(const TopKConfig& config, size_t count)
      : config_(config),
        logits_(RandomLogits(count * config.num_experts)),
        rows_(logits_.data(), count, config.num_experts) {
    moe::ValidateTopK(config);
  }
  TopKOutput Route() { return moe::SelectExperts(context_, config_, rows_, rows_.rows); }
  bool IsRight() {
    const TopKOutput found = Route();
    const size_t last = rows_.rows - 1;
    std::vector<int32_t> ids(config_.top_k);
    std::vector<double> weights(config_.top_k);
    moe::SelectExpertsReference(config_, rows_.Row(last), ids.data(), weights.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      if (found.Ids(last)[i] != ids[i]) return false;
      if (!(std::abs(found.Weights(last)[i] - weights[i]) < 1e-4)) return false;
    }
    return true;
  }
  ExecContext& context() { return context_; }
  Arena& arena() { return arena_; }
  double bytes() const { return static_cast<double>(logits_.size() * sizeof(float)); }

 private:
  TopKConfig config_;
  std::vector<float> logits_;
  ConstRows rows_;
  Arena arena_;
  ExecContext context_{bench::Pool(1), arena_};
};

void ReportTokens(benchmark::State& state) {
  state.counters["tokens/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * state.range(0)), benchmark::Counter::kIsRate);
}

void RunRouter(benchmark::State& state, const TopKConfig& config) {
  Tokens tokens(config, static_cast<size_t>(state.range(0)));
  if (!tokens.IsRight()) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    tokens.arena().Reset();
    benchmark::DoNotOptimize(tokens.Route().ids.data());
  }
  bench::ReportBytes(state, tokens.bytes(), 1);
  ReportTokens(state);
}

// What follows a choice, of softmax/8_of_128: ids and weights are read, as many words written.
template <typename Body>
void RunAfterRouting(benchmark::State& state, const Body& body) {
  Tokens tokens(Routers()[0].config, static_cast<size_t>(state.range(0)));
  const TopKOutput topk = tokens.Route();
  const Arena::Mark mark = tokens.arena().Now();
  if (!body(tokens.context(), topk)) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) {
    tokens.arena().RewindTo(mark);
    benchmark::DoNotOptimize(body(tokens.context(), topk));
  }
  bench::ReportBytes(state, static_cast<double>(topk.ids.size() * 3 * sizeof(int32_t)), 1);
  ReportTokens(state);
}

bool Pack(ExecContext& context, const TopKOutput& topk) {
  return moe::PackTopK(context, topk).words[0] >> 16 == topk.ids[0];
}
bool Ragged(ExecContext& context, const TopKOutput& topk) {
  return moe::BuildRaggedTopK(context, topk, 128).gather.size() == topk.ids.size();
}
bool Group(ExecContext& context, const TopKOutput& topk) {
  const quant::GroupedItems items = quant::GroupByExpert(context.arena, topk.ids.size(), 128,
                                                         [&](size_t i) { return topk.ids[i]; });
  return items.item.size() == topk.ids.size();
}

// The next token of one sequence. Bytes are those of the logits.
void RunSampler(benchmark::State& state, const SamplingOptions& options) {
  // Of a model that has some words in mind: 50 share nearly all of the probability.
  std::vector<float> logits = RandomLogits(kVocabulary);
  for (size_t i = 0; i < kVocabulary; i += kVocabulary / 50) logits[i] += 12.0f;
  std::vector<int32_t> history(1024);
  std::iota(history.begin(), history.end(), 0);
  Sampler sampler(options);
  const int32_t first = sampler.Sample(logits, history);
  if (first < 0 || static_cast<size_t>(first) >= kVocabulary) {
    state.SkipWithError("the result is wrong");
    return;
  }
  for (auto _ : state) benchmark::DoNotOptimize(sampler.Sample(logits, history));
  bench::ReportBytes(state, kVocabulary * sizeof(float), 1);
  ReportTokens(state);
}

void Register(const std::string& name, const std::function<void(benchmark::State&)>& run,
              std::initializer_list<int64_t> tokens) {
  auto* registered = benchmark::RegisterBenchmark(name.c_str(), run);
  registered->ArgName("tokens")->Unit(benchmark::kMicrosecond);
  for (int64_t count : tokens) registered->Arg(count);
}

void RegisterAll() {
  const std::initializer_list<int64_t> counts = {1, kMaxTokens};
  for (const Router& router : Routers()) {
    Register(
        "SelectExperts/" + router.name,
        [=](benchmark::State& state) { RunRouter(state, router.config); }, counts);
  }
  Register(
      "PackTopK/8_of_128", [](benchmark::State& state) { RunAfterRouting(state, Pack); }, counts);
  Register(
      "BuildRaggedTopK/8_of_128", [](benchmark::State& state) { RunAfterRouting(state, Ragged); },
      counts);
  Register(
      "GroupByExpert/8_of_128", [](benchmark::State& state) { RunAfterRouting(state, Group); },
      counts);
  const std::pair<const char*, SamplingOptions> samplers[] = {
      {"greedy", {}},
      {"top_k_40", {.temperature = 0.8, .top_k = 40}},
      {"temperature", {.temperature = 0.8}},
      {"top_p", {.temperature = 0.8, .top_p = 0.95}},
      {"penalties", {.repeat_penalty = 1.1}}};
  for (const auto& [name, options] : samplers) {
    Register(std::string("Sample/") + name + "/" + std::to_string(kVocabulary),
             [options = options](benchmark::State& state) { RunSampler(state, options); }, {1});
  }
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  return switchyard::bench::RunTables(argc, argv, switchyard::RegisterAll);
}
