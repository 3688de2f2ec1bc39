// The matrix of contract 8.4, as far as one process has it: every realisation of every dispatch
// format, every runner with permutes for it, every scheme that lists the runner, all data axes, on
// every instruction set. All cells come from the registries, so that what is added to a table is
// tested here without a line of test code.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/activation.h"
#include "switchyard/moe/registry/moe_runner.h"
#include "testing/moe_places.h"
#include "testing/moe_truth.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::moe {
namespace {

using testing::AllWires;
using testing::Arrival;
using testing::DispatchOptions;
using testing::GateUpStorage;
using testing::Lists;
using testing::MoeCase;
using testing::MoeCaseOptions;
using testing::MoeTokens;
using testing::MoeTruth;
using testing::Place;
using testing::PlacedLayer;
using testing::Realisation;
using testing::SimulatedDispatch;
using testing::Spread;
using testing::Verdict;
using testing::Wire;

// The checked builds run a part of the matrix: they are ten times slower.
#ifdef SY_ENABLE_DCHECK
constexpr bool kReduced = true;
#else
constexpr bool kReduced = false;
#endif

// Who may refuse an axis with kUnsupported.
enum class Refusal {
  kNobody,
  kOthers,          // runners other than aiter and reference, which compute everything
  kBehindExchange,  // everybody who does not finish the sum: all formats but standard
  kBehindWeighing   // everybody behind a combine that weighs
};

// A layer and a batch, with what is to come out.
struct Data : PlacedLayer {
  std::string name;
  Refusal refusal = Refusal::kNobody;
  std::unique_ptr<MoeCase> owned;
  MoeTokens tokens;
  std::map<std::string, std::unique_ptr<MoeTruth>> truths;  // by what arrives
  // The first result of each runner and each arrival, on the present instruction set.
  std::map<std::string, std::vector<float>> first_results;
};

class Conformance : public ::testing::Test {
 protected:
  std::vector<float> Run(const Data& data, const Place& place, const DispatchOptions& options,
                         std::vector<MoeTokens> sources) {
    ArenaScope scope(arena_);
    ExecContext context{*pool_, arena_};
    return RunPlace(context, registry_, place, data, std::move(sources), options);
  }
  std::vector<float> Run(const Data& data, const Place& place,
                         const DispatchOptions& options = {}) {
    return Run(data, place, options, {data.tokens});
  }

  // Whether a cell was refused; only kUnsupported is a refusal.
  bool Refused(const std::function<void()>& cell) {
    try {
      cell();
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
      ++refusals_[Reason(error.message())];
      return true;
    }
  }

  // Without the numbers, so that refusals of one kind are counted together.
  static std::string Reason(const std::string& message) {
    std::string reason;
    for (char c : message) {
      const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
      if (!digit || reason.empty() || reason.back() != '#') reason += digit ? '#' : c;
    }
    return reason.substr(0, 160);
  }

  // The truth for rows that arrive over a wire.
  MoeTruth& TruthOf(Data& data, const Place& place, const Wire& wire) {
    ExecContext context{*pool_, arena_};
    Arrival arrival = ArrivalOf(context, place, data, data.tokens, wire);
    std::unique_ptr<MoeTruth>& truth = data.truths[arrival.name];
    if (truth == nullptr)
      truth = std::make_unique<MoeTruth>(*data.layer, arrival.info, data.config,
                                         std::move(arrival.tokens));
    return *truth;
  }

  // Runs one cell and judges it. False if it was refused.
  bool Cell(Data& data, const Place& place, const DispatchOptions& options) {
    std::vector<float> rows;
    if (Refused([&] { rows = Run(data, place, options); })) return false;
    MoeTruth& truth = TruthOf(data, place, options.wire);
    ++cells_;
    num_requantised_ += truth.num_requantised();
    const Verdict verdict = truth.Judge(rows, options.wire.how.kind == ActQuantKind::kNone);
    codes_on_boundary_ += verdict.codes_on_boundary;
    if (!verdict.ok) {
      ++differ_;
      ADD_FAILURE() << place.name() << ", wire " << options.wire.name << ", " << data.name << ": "
                    << verdict.why;
      return true;
    }
    // All ways through one runner quantise alike: only the order of the sums differs.
    std::vector<float>& first =
        data.first_results[fmt::format("{} {}", place.runner, static_cast<const void*>(&truth))];
    if (first.empty()) first = rows;
    const std::vector<double> expected(first.begin(), first.end());
    const double distance =
        testing::RelativeL2(ConstRows(rows.data(), truth.faithful().rows, truth.faithful().cols),
                            expected, truth.faithful().size);
    if (!(distance <= 1e-6)) {
      ++differ_;
      ADD_FAILURE() << place.name() << ", wire " << options.wire.name << ", " << data.name
                    << ": another way through the same runner is " << distance << " away";
    }
    return true;
  }

  void Report() {
    std::printf("conformance: %zu cells, %zu differ; %zu of %zu requantised values on a boundary\n",
                cells_, differ_, codes_on_boundary_, num_requantised_);
    for (const auto& [reason, count] : refusals_)
      std::printf("  refused %zu: %s\n", count, reason.c_str());
    EXPECT_GT(cells_, 0u);
    // Contract 8.3: at most one step on 0.1 % of the values.
    EXPECT_LE(static_cast<double>(codes_on_boundary_),
              1e-3 * static_cast<double>(num_requantised_));
  }

  Data MakeData(std::string name, const MoeCaseOptions& layer, MoeTokens tokens) {
    Data data;
    data.name = std::move(name);
    data.owned = std::make_unique<MoeCase>(layer, random_);
    data.layer = data.owned.get();
    data.tokens = std::move(tokens);
    data.info = data.layer->Info();
    data.config = data.layer->Config(data.tokens.top_k);
    return data;
  }

  const Registry& registry_ = BuiltinRegistry();
  std::mt19937_64 random_ = testing::MakeRandom(41);
  std::unique_ptr<ThreadPool> pool_ = std::make_unique<ThreadPool>(2);
  Arena arena_;
  size_t cells_ = 0, differ_ = 0, codes_on_boundary_ = 0, num_requantised_ = 0;
  std::map<std::string, size_t> refusals_;
};

// Every scheme x every way to its runners x every wire.
TEST_F(Conformance, EverySchemeBehindEveryFormatAndWire) {
  std::vector<Data> layers;
  for (const SchemeEntry& scheme : registry_.schemes()) {
    MoeCaseOptions options{.scheme_w13 = std::string(scheme.name),
                           .scheme_w2 = std::string(scheme.name),
                           .experts = 10,
                           .hidden = 96,
                           .intermediate = 64};
    const size_t formats = testing::FormatsOf(scheme, 64, 96).size();
    ASSERT_GT(formats, 0u) << "no maker of tests/testing/moe_case.cc fits scheme " << scheme.name;
    for (options.variant = 0; options.variant < (kReduced ? 1 : formats); ++options.variant) {
      layers.push_back(
          MakeData(fmt::format("scheme {}, format {}", scheme.name, options.variant), options,
                   testing::RandomTokens(7, 2, 10, 96, Spread::kSomeSkipped, random_)));
    }
  }
  // A runner may not take a realisation at all, but then under no scheme; and it takes one of each
  // format that it has permutes for.
  std::map<std::string, std::array<size_t, 2>> taken;
  std::map<std::string, bool> pairs;
  testing::ForEachTarget([&] {
    for (Data& data : layers) {
      data.first_results.clear();
      const SchemeEntry& scheme = registry_.FindScheme(data.layer->options().scheme_w13);
      for (const Place& place : testing::AllPlaces(registry_)) {
        if (!Lists(scheme, place.runner)) continue;
        for (const Wire& wire : AllWires()) {
          if (data.layer->options().variant > 0 && wire.name != "f32") continue;
          const bool ran = Cell(data, place, {.wire = wire});
          if (wire.name != "f32") continue;
          ++taken[place.name()][ran ? 1 : 0];
          pairs[fmt::format("{} behind {}", place.runner,
                            DispatchFormatName(place.realisation.format))] |= ran;
        }
      }
    }
  });
  for (const auto& [name, counts] : taken)
    EXPECT_TRUE(counts[0] == 0 || counts[1] == 0)
        << name << ": refused for " << counts[0] << " schemes and formats, not for " << counts[1];
  for (const auto& [name, ran] : pairs) EXPECT_TRUE(ran) << name << " takes no realisation";
  Report();
}

// One value of one axis of contract 8.4.
struct Axis {
  std::string name;
  MoeCaseOptions layer = {.experts = 12, .hidden = 64, .intermediate = 32};
  size_t count = 7;
  size_t top_k = 2;
  Spread spread = Spread::kSomeSkipped;
  Refusal refusal = Refusal::kNobody;
  // Scheme of w13 and w2; empty = rotating, the same for both.
  std::string scheme_w13 = {}, scheme_w2 = {};
  bool activation_quant = true;
  DType act_dtype = DType::kF32;
  void (*edit)(MoeTokens&) = nullptr;
};

// Rows of NaN without experts, and weights of NaN in them: what padding may hold.
void AddPadding(MoeTokens& tokens) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  tokens.count += 3;
  tokens.hidden.resize(tokens.count * tokens.cols, nan);
  tokens.ids.resize(tokens.count * tokens.top_k, -1);
  tokens.weights.resize(tokens.count * tokens.top_k, nan);
}

// The last column is the last expert, for every token, with weight 1. Contract 2.7.
void AddSharedExpert(MoeTokens& tokens) {
  for (size_t slot = 0; slot < tokens.ids.size(); ++slot) {
    if (slot % tokens.top_k + 1 != tokens.top_k) {
      if (tokens.ids[slot] == 11) tokens.ids[slot] = -1;
      continue;
    }
    tokens.ids[slot] = 11;
    tokens.weights[slot] = 1.0f;
  }
}

// Every second token takes the copies of experts 0 and 1. Contract 2.11.
void UseReplicas(MoeTokens& tokens) {
  for (size_t slot = 0; slot < tokens.ids.size(); ++slot) {
    if (slot / tokens.top_k % 2 == 1 && (tokens.ids[slot] == 0 || tokens.ids[slot] == 1))
      tokens.ids[slot] += 12;
  }
}

void ZeroFirstWeights(MoeTokens& tokens) {
  for (size_t slot = 0; slot < tokens.weights.size(); slot += tokens.top_k)
    tokens.weights[slot] = 0.0f;
}

void ZeroRow(MoeTokens& tokens) { std::fill_n(tokens.hidden.begin(), tokens.cols, 0.0f); }

std::vector<Axis> BatchAxes() {
  std::vector<Axis> axes;
  for (size_t count : {size_t{0}, size_t{1}, size_t{64}, size_t{kReduced ? 33 : 129}})
    axes.push_back({.name = fmt::format("{} tokens", count), .count = count});
  axes.push_back({.name = "top 1", .top_k = 1});
  axes.push_back({.name = "top 8", .top_k = 8});
  axes.push_back({.name = "129 tokens, top 8",
                  .layer = {.experts = 12, .hidden = 48, .intermediate = 24},
                  .count = kReduced ? 33u : 129u,
                  .top_k = 8,
                  .spread = Spread::kRandom});
  axes.push_back(
      {.name = "all to one expert", .count = 33, .top_k = 1, .spread = Spread::kAllToOne});
  axes.push_back({.name = "all to two experts", .count = 97, .spread = Spread::kAllToOne});
  axes.push_back({.name = "none to the first expert", .spread = Spread::kNoneToFirst});
  axes.push_back({.name = "no empty slot", .spread = Spread::kRandom});
  axes.push_back({.name = "all slots empty", .spread = Spread::kAllSkipped});
  axes.push_back({.name = "padded rows", .edit = &AddPadding});
  axes.push_back({.name = "a row of zeros", .edit = &ZeroRow});
  axes.push_back({.name = "shared expert", .top_k = 3, .edit = &AddSharedExpert});
  axes.push_back({.name = "redundant experts", .count = 20, .edit = &UseReplicas});
  axes.back().layer.replicas = 2;
  axes.push_back({.name = "weights of 0", .edit = &ZeroFirstWeights});
  axes.push_back({.name = "one expert",
                  .layer = {.experts = 1, .hidden = 64, .intermediate = 32},
                  .top_k = 1});
  return axes;
}

std::vector<Axis> ShapeAxes() {
  std::vector<Axis> axes;
  for (const auto& [hidden, inner] :
       {std::array<size_t, 2>{70, 43}, {33, 17}, {130, 200}, {1, 1}}) {
    axes.push_back({.name = fmt::format("H {}, I {}", hidden, inner),
                    .layer = {.experts = 12, .hidden = hidden, .intermediate = inner}});
  }
  axes.push_back({.name = "bias"});
  axes.back().layer.bias = true;
  axes.push_back({.name = "gate and up as halves, bias"});
  axes.back().layer.bias = true;
  axes.back().layer.storage = GateUpStorage::kHalves;
  axes.push_back({.name = "gate and up in turn, bias"});
  axes.back().layer.bias = true;
  axes.back().layer.storage = GateUpStorage::kInterleaved;
  axes.back().layer.runner.gate_up_interleaved = true;
  axes.push_back({.name = "bf16 products",
                  .scheme_w13 = "unquant",
                  .scheme_w2 = "unquant",
                  .act_dtype = DType::kBF16});
  axes.back().layer.variant = 1;
  axes.push_back({.name = "no activation quantisation",
                  .refusal = Refusal::kOthers,
                  .activation_quant = false});
  for (const auto& [w13, w2] : {std::array<const char*, 2>{"fp8_block", "w8a8_int8"},
                                {"mxfp4_w4a8", "unquant"},
                                {"unquant", "awq"},
                                {"w4a8_int", "mxfp8"},
                                {"w8a8_int8", "w4a4_int"}}) {
    axes.push_back({.name = fmt::format("w13 {}, w2 {}", w13, w2),
                    .refusal = Refusal::kOthers,
                    .scheme_w13 = w13,
                    .scheme_w2 = w2});
  }
  return axes;
}

Axis WithRunner(std::string name, Refusal refusal, const MoeRunnerConfig& runner) {
  Axis axis{.name = std::move(name), .refusal = refusal};
  axis.layer.runner = runner;
  return axis;
}

// Every formula that a config selects, by the names of contract 1.6, and those that are registered
// under names of their own.
std::vector<Axis> ActivationAxes() {
  std::vector<MoeRunnerConfig> configs;
  const auto add = [&](std::string_view name, bool gated, std::optional<float> alpha = {},
                       std::optional<float> clamp = {}, std::optional<float> limit = {}) {
    MoeRunnerConfig config;
    config.activation = name;
    config.is_gated = gated;
    config.gemm1_alpha = alpha;
    config.gemm1_clamp_limit = clamp;
    config.swiglu_limit = limit;
    configs.push_back(config);
  };
  // Limits that values of about 1.2 reach.
  add("silu", true, {}, 0.8f);
  add("silu", true, 1.702f, 0.9f);
  add("silu", true, {}, {}, 0.7f);
  for (const char* name : {"gelu", "gelu_tanh", "silu_rounded", "situ", "npu_swiglu_oai", "swiglu"})
    add(name, true);
  add("situ", true, 1.5f, 0.6f);
  for (const char* name : {"silu", "gelu", "gelu_tanh", "relu2"}) add(name, false);
  std::set<std::string_view> reached = {"silu"};
  for (const MoeRunnerConfig& config : configs)
    reached.insert(ResolveActivation(BuiltinRegistry(), config).entry.name);
  for (const ActivationEntry& entry : BuiltinRegistry().activations()) {
    if (!reached.contains(entry.name)) add(entry.name, entry.is_gated);
  }
  std::vector<Axis> axes;
  for (const MoeRunnerConfig& config : configs) {
    axes.push_back(WithRunner(
        fmt::format("activation {}{} ({})", config.activation, config.is_gated ? "" : ", not gated",
                    ResolveActivation(BuiltinRegistry(), config).entry.name),
        Refusal::kOthers, config));
    axes.push_back(axes.back());
    axes.back().name += ", bias";
    axes.back().layer.bias = true;
  }
  return axes;
}

std::vector<Axis> FactorAxes() {
  std::vector<Axis> axes;
  MoeRunnerConfig config;
  config.routed_scaling_factor = 2.5;
  axes.push_back(WithRunner("routed_scaling_factor", Refusal::kBehindExchange, config));
  config = {};
  config.no_combine = true;
  axes.push_back(WithRunner("no_combine", Refusal::kBehindExchange, config));
  config.no_combine_keep_router_weight = true;
  axes.push_back(WithRunner("no_combine, weighted", Refusal::kBehindExchange, config));
  config = {};
  config.apply_router_weight_on_input = true;
  axes.push_back(WithRunner("router weight on input", Refusal::kBehindWeighing, config));
  axes.back().top_k = 1;
  axes.push_back(axes.back());
  axes.back().name += ", bias";
  axes.back().layer.bias = true;
  return axes;
}

bool MayRefuse(Refusal refusal, const Place& place) {
  const bool complete = place.runner == "aiter" || place.runner == "reference";
  switch (refusal) {
    case Refusal::kNobody: return false;
    case Refusal::kOthers: return !complete;
    case Refusal::kBehindExchange:
      return !complete || place.realisation.format != DispatchFormat::kStandard;
    case Refusal::kBehindWeighing: return !complete || place.CombineWeighs();
  }
  return false;
}

class ConformanceAxes : public Conformance {
 protected:
  // The layer of an axis under a scheme; nullptr if its format has no such layer.
  Data* Find(const Axis& axis, const std::string& w13, const std::string& w2) {
    const std::string key = fmt::format("{}, schemes {} and {}", axis.name, w13, w2);
    const auto found = data_.find(key);
    if (found != data_.end()) return found->second.get();
    std::unique_ptr<Data>& data = data_[key];
    MoeCaseOptions layer = axis.layer;
    layer.scheme_w13 = w13;
    layer.scheme_w2 = w2;
    testing::FitSizes(layer);
    // Draws of its own: what is tested before, and how many schemes there are, changes nothing
    // here.
    random_.seed(std::hash<std::string>{}(key));
    MoeTokens tokens = testing::RandomTokens(axis.count, axis.top_k, layer.experts, layer.hidden,
                                             axis.spread, random_);
    if (axis.edit != nullptr) axis.edit(tokens);
    if (Refused([&] { data = std::make_unique<Data>(MakeData(key, layer, std::move(tokens))); }))
      return nullptr;
    data->refusal = axis.refusal;
    data->info = data->layer->Info(axis.activation_quant);
    data->config.activation_dtype = axis.act_dtype;
    return data.get();
  }

  // The schemes of a runner that an axis is tested with there: a few, others at each place.
  std::vector<std::string> Rotating(const std::string& runner, size_t turn) const {
    std::vector<std::string> listed, chosen;
    for (const SchemeEntry& scheme : registry_.schemes()) {
      if (Lists(scheme, runner)) listed.emplace_back(scheme.name);
    }
    for (size_t i = 0; i < (kReduced ? 1 : 3); ++i)
      chosen.push_back(listed[(turn * 5 + i * 7) % listed.size()]);
    return chosen;
  }

  void RunAxis(const Axis& axis, size_t turn) {
    for (const Place& place : places_) {
      ++turn;
      std::vector<std::array<std::string, 2>> schemes;
      if (!axis.scheme_w13.empty()) {
        const bool listed = Lists(registry_.FindScheme(axis.scheme_w13), place.runner) &&
                            Lists(registry_.FindScheme(axis.scheme_w2), place.runner);
        if (listed) schemes.push_back({axis.scheme_w13, axis.scheme_w2});
      } else {
        for (const std::string& name : Rotating(place.runner, turn))
          schemes.push_back({name, name});
      }
      for (const auto& [w13, w2] : schemes) {
        Data* data = Find(axis, w13, w2);
        if (data == nullptr || Cell(*data, place, {})) continue;
        EXPECT_TRUE(MayRefuse(axis.refusal, place)) << place.name() << " refused " << data->name;
      }
    }
  }

  void RunAxes(const std::vector<Axis>& axes) {
    // A place that refuses the simplest layer does not take this realisation.
    MoeCaseOptions simple{.experts = 12, .hidden = 64, .intermediate = 32};
    Data base =
        MakeData("base", simple, testing::RandomTokens(3, 2, 12, 64, Spread::kRandom, random_));
    for (const Place& place : testing::AllPlaces(registry_)) {
      if (!Refused([&] { Run(base, place); })) places_.push_back(place);
    }
    ASSERT_FALSE(places_.empty());
    testing::ForEachTarget([&] {
      for (auto& [key, data] : data_) {
        if (data != nullptr) data->first_results.clear();
      }
      for (size_t i = 0; i < axes.size(); ++i) RunAxis(axes[i], i);
    });
    Report();
  }

  std::vector<Place> places_;
  std::map<std::string, std::unique_ptr<Data>> data_;
};

TEST_F(ConformanceAxes, Batches) { RunAxes(BatchAxes()); }
TEST_F(ConformanceAxes, Shapes) { RunAxes(ShapeAxes()); }
TEST_F(ConformanceAxes, Activations) { RunAxes(ActivationAxes()); }
TEST_F(ConformanceAxes, Factors) { RunAxes(FactorAxes()); }

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The scale of such a scheme is over all rows of a rank, so a row's codes depend on the others.
bool ScalesOverBatch(const SchemeEntry& scheme) {
  return scheme.act_quant == ActQuantKind::kFp8Tensor;
}

// Experts divided among ranks, tokens unevenly, one rank without any: the sum is that of one rank.
TEST_F(Conformance, DividedExpertsGiveTheSameSum) {
  for (const SchemeEntry& scheme : registry_.schemes()) {
    if (ScalesOverBatch(scheme)) continue;
    const std::string name(scheme.name);
    MoeCaseOptions options{.scheme_w13 = name,
                           .scheme_w2 = name,
                           .experts = 12,
                           .hidden = 72,
                           .intermediate = 40,
                           .bias = true};
    testing::FitSizes(options);
    Data data =
        MakeData(name, options,
                 testing::RandomTokens(9, 3, 12, options.hidden, Spread::kSomeSkipped, random_));
    const MoeTruth truth(*data.layer, data.info, data.config, data.tokens);
    for (const Place& place : testing::AllPlaces(registry_)) {
      if (!Lists(scheme, place.runner) || place.realisation.kind == Realisation::Kind::kRegistered)
        continue;
      std::vector<float> whole;
      if (Refused([&] { whole = Run(data, place); })) continue;
      for (const std::vector<size_t>& counts :
           {std::vector<size_t>{5, 4}, {9, 0}, {0, 9}, {3, 0, 6}, {2, 1, 3, 3}}) {
        std::vector<MoeTokens> sources;
        size_t first = 0;
        for (size_t count : counts) {
          sources.push_back(data.tokens.Slice(first, count));
          first += count;
        }
        const std::vector<float> rows = Run(data, place, {}, std::move(sources));
        ++cells_;
        num_requantised_ += truth.num_requantised();
        const Verdict verdict = truth.Judge(rows);
        codes_on_boundary_ += verdict.codes_on_boundary;
        EXPECT_TRUE(verdict.ok) << place.name() << ", scheme " << name << ", " << counts.size()
                                << " ranks: " << verdict.why;
        // Rows are computed alike wherever their expert is. Combine adds them in the order of the
        // columns, a runner those of its rank.
        if (place.CombineWeighs()) {
          EXPECT_TRUE(SameBits(rows, whole)) << place.name() << ", scheme " << name;
        }
        const std::vector<double> expected(whole.begin(), whole.end());
        EXPECT_LE(
            testing::RelativeL2(ConstRows(rows.data(), 9, 72), expected, truth.faithful().size),
            1e-6)
            << place.name() << ", scheme " << name;
      }
    }
  }
  Report();
}

// The same bits for any number of threads and in any company.
TEST_F(Conformance, BitsDoNotDependOnThreadsOrBatch) {
  std::vector<Data> layers;
  for (const SchemeEntry& scheme : registry_.schemes()) {
    const std::string name(scheme.name);
    MoeCaseOptions options{.scheme_w13 = name,
                           .scheme_w2 = name,
                           .experts = 12,
                           .hidden = 72,
                           .intermediate = 40,
                           .bias = true};
    testing::FitSizes(options);
    layers.push_back(
        MakeData(name, options,
                 testing::RandomTokens(33, 3, 12, options.hidden, Spread::kSomeSkipped, random_)));
  }
  testing::ForEachTarget([&] {
    for (const Data& data : layers) {
      const SchemeEntry& scheme = registry_.FindScheme(data.name);
      for (const Place& place : testing::AllPlaces(registry_)) {
        if (!Lists(scheme, place.runner)) continue;
        SCOPED_TRACE(place.name() + ", scheme " + data.name);
        std::vector<float> whole;
        if (Refused([&] { whole = Run(data, place); })) continue;
        for (size_t threads : {1u, 3u}) {
          pool_ = std::make_unique<ThreadPool>(threads);
          EXPECT_TRUE(SameBits(Run(data, place), whole)) << threads << " threads";
        }
        pool_ = std::make_unique<ThreadPool>(2);
        ++cells_;
        if (ScalesOverBatch(scheme)) continue;
        for (size_t t = 0; t < data.tokens.count; t += kReduced ? 8 : 1) {
          const std::vector<float> alone = Run(data, place, {}, {data.tokens.Slice(t, 1)});
          const size_t width = data.tokens.cols;
          ASSERT_EQ(alone.size(), width);
          ASSERT_EQ(std::memcmp(alone.data(), whole.data() + t * width, width * sizeof(float)), 0)
              << "token " << t << " alone";
        }
      }
    }
  });
  EXPECT_GT(cells_, 0u);
}

// A fused function that wraps the modular path, to prove that it is taken, that the switch drops
// it, and that both give the same.
size_t fused_calls = 0;
template <size_t kRunner>
const CombineInput& RunWrapped(ExecContext& context, const DispatchOutput& output,
                               const MoeQuantInfo& info, const MoeRunnerConfig& config) {
  ++fused_calls;
  const RunnerEntry& entry = BuiltinRegistry().runners().at(kRunner);
  // A runner must outlive its answer's use only through the arena, which holds the rows.
  return MoeRunner::Create(BuiltinRegistry(), {std::string(entry.name), "none", true}, config,
                           output.format)
      ->Run(context, output, info);
}
using WrappedFn = decltype(FusedEntry::run);
constexpr WrappedFn kWrapped[] = {&RunWrapped<0>, &RunWrapped<1>, &RunWrapped<2>, &RunWrapped<3>,
                                  &RunWrapped<4>, &RunWrapped<5>, &RunWrapped<6>, &RunWrapped<7>};

TEST_F(Conformance, FusedEqualsModular) {
  Registry registry;
  RegisterBuiltins(registry);
  for (size_t i = 0; i < registry_.runners().size() && i < std::size(kWrapped); ++i)
    registry.Add(FusedEntry{"none", registry_.runners()[i].name, kWrapped[i]});
  for (const SchemeEntry& scheme : registry_.schemes()) {
    const std::string name(scheme.name);
    Data data = MakeData(name, {.scheme_w13 = name, .scheme_w2 = name},
                         testing::RandomTokens(5, 2, 6, 64, Spread::kRandom, random_));
    for (const Place& place : testing::AllPlaces(registry_)) {
      if (!Lists(scheme, place.runner)) continue;
      std::vector<float> expected;
      if (Refused([&] { expected = Run(data, place); })) continue;
      for (bool disable_fused : {false, true}) {
        ArenaScope scope(arena_);
        ExecContext context{*pool_, arena_};
        const auto runner = MoeRunner::Create(registry, {place.runner, "none", disable_fused},
                                              data.config, place.realisation.format);
        EXPECT_EQ(runner->is_fused(), !disable_fused);
        SimulatedDispatch dispatch(context, place.realisation, data.config, data.layer->experts(),
                                   {data.tokens});
        fused_calls = 0;
        const CombineInput* answer = &runner->Run(context, dispatch.output(0), data.info);
        EXPECT_EQ(fused_calls, disable_fused ? 0u : 1u) << place.name();
        EXPECT_TRUE(SameBits(dispatch.Combine({&answer, 1})[0], expected))
            << place.name() << ", scheme " << name;
      }
    }
  }
}

// Bug-log 18, 26, 34: an expert whose raw output is far beyond the range of f16 keeps it, in
// batches of all sizes.
TEST_F(Conformance, LargeValuesBetweenTheProductsStayFinite) {
  for (size_t variant : {0u, 1u}) {  // f32, bf16
    for (size_t count : {1u, 63u, 64u, 65u}) {
      Data data =
          MakeData("large", {.variant = variant, .experts = 2, .hidden = 32, .intermediate = 16},
                   testing::RandomTokens(count, 1, 2, 32, Spread::kRandom, random_));
      data.owned->FillW2(1e6f);
      data.info = data.layer->Info();
      for (float& weight : data.tokens.weights) weight = 1e-3f;
      const MoeTruth truth(*data.layer, data.info, data.config, data.tokens);
      for (const Place& place : testing::AllPlaces(registry_)) {
        std::vector<float> rows;
        if (Refused([&] { rows = Run(data, place); })) continue;
        const Verdict verdict = truth.Judge(rows);
        EXPECT_TRUE(verdict.ok) << place.name() << ", " << count << " tokens: " << verdict.why;
        if (variant == 0) continue;
        data.config.activation_dtype = DType::kBF16;
        for (float value : Run(data, place)) ASSERT_TRUE(std::isfinite(value)) << place.name();
        data.config.activation_dtype = DType::kF32;
      }
    }
  }
}

// Bug-log 5, 20: numbers of experts that are no power of two, and of columns that are.
TEST_F(Conformance, AnyNumberOfExperts) {
  for (size_t experts : {1u, 6u, 60u, 96u, 160u, 384u}) {
    for (size_t top_k : {size_t{1}, size_t{6}, size_t{16}}) {
      if (top_k > experts || (kReduced && experts > 96)) continue;
      Data data = MakeData(fmt::format("{} experts, top {}", experts, top_k),
                           {.experts = experts, .hidden = 16, .intermediate = 8},
                           testing::RandomTokens(65, top_k, experts, 16, Spread::kRandom, random_));
      for (const Place& place : testing::AllPlaces(registry_)) Cell(data, place, {});
    }
  }
  Report();
}

// The judge itself: what is wrong is found, what a boundary explains is not.
TEST_F(Conformance, TheJudgeFindsErrors) {
  Data data = MakeData("judge", {.scheme_w13 = "w8a8_int8", .scheme_w2 = "w8a8_int8"},
                       testing::RandomTokens(40, 2, 6, 64, Spread::kRandom, random_));
  const MoeTruth truth(*data.layer, data.info, data.config, data.tokens);
  const std::vector<float> good(truth.faithful().values.begin(), truth.faithful().values.end());
  EXPECT_TRUE(truth.Judge(good).ok);
  std::vector<float> bad = good;
  std::swap_ranges(bad.begin(), bad.begin() + 64, bad.begin() + 64);
  EXPECT_FALSE(truth.Judge(bad).ok) << "swapped tokens";
  bad = good;
  bad[70] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(truth.Judge(bad).ok) << "NaN";
  bad = good;
  for (size_t h = 0; h < 64; ++h) bad[h] *= 1.001f;
  EXPECT_FALSE(truth.Judge(bad).ok) << "scaled by 1.001";
  bad.pop_back();
  EXPECT_FALSE(truth.Judge(bad).ok) << "short";
}

}  // namespace
}  // namespace switchyard::moe
