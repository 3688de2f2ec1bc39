// Bytes as a call of a MoE layer: a random layer behind a random runner and dispatch format, legal
// or with fields that contradict each other.
//
// A legal call gives the oracle's answer or is refused as unsupported; an illegal one is refused
// with an Error that is no internal one, or gives as many rows as were asked for.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/moe_places.h"
#include "testing/moe_truth.h"

namespace {

namespace moe = switchyard::moe;
namespace testing = switchyard::testing;
using switchyard::ActQuantKind;
using switchyard::Error;
using switchyard::ErrorCode;
using testing::MoeTokens;

void Require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

// Numbers from the input; zeros behind its end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Next() { return at_ < size_ ? data_[at_++] : uint8_t{0}; }
  // In [0, n).
  size_t Below(size_t n) { return n == 0 ? 0 : Next() % n; }
  bool Flag() { return (Next() & 1) != 0; }
  // Small numbers, and those at which arithmetic goes wrong.
  int32_t Wild() {
    constexpr int32_t kWild[] = {-1, -2, INT32_MIN, INT32_MAX, 1 << 16, 0, 1, 7};
    const uint8_t byte = Next();
    return byte < 128 ? kWild[byte % 8] : byte % 16;
  }
  bool empty() const { return at_ >= size_; }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

// Part of a span; what is longer than its memory cannot be detected, and is not a call.
template <typename T>
void Shorten(Bytes& bytes, std::span<const T>& span) {
  span = span.first(bytes.Below(span.size() + 1));
}

// A copy of a span with one wild value; the copies live as long as `store`.
void Edit(Bytes& bytes, std::vector<std::vector<int32_t>>& store, std::span<const int32_t>& span) {
  store.emplace_back(span.begin(), span.end());
  if (!span.empty()) store.back()[bytes.Below(span.size())] = bytes.Wild();
  span = store.back();
}

class Call {
 public:
  Call(const uint8_t* data, size_t size) : bytes_(data, size), pool_(1), context_{pool_, arena_} {}

  void Run() {
    testing::MoeCaseOptions options = ReadOptions();
    try {
      random_.seed(bytes_.Next());
      layer_ = std::make_unique<testing::MoeCase>(options, random_);
      placed_ = {layer_.get(), layer_->Info(!bytes_.Flag()), {}};
      ReadTokens();
      placed_.config = layer_->Config(tokens_.top_k);
    } catch (const Error& error) {
      // A format that cannot be stacked, an activation that cannot be selected.
      return RequireClean(error);
    }
    if (bytes_.Flag()) return RunLayer();
    const std::vector<testing::Place> places = testing::AllPlaces(moe::BuiltinRegistry());
    const testing::Place& place = places[bytes_.Below(places.size())];
    const std::vector<testing::Wire> wires = testing::AllWires();
    const testing::Wire& wire = wires[bytes_.Below(wires.size())];
    if (bytes_.Flag()) {
      RunLegal(place, wire);
    } else {
      RunIllegal(place, wire);
    }
  }

 private:
  static void RequireClean(const Error& error) {
    Require(error.code() != ErrorCode::kInternal, error.message());
    Require(error.message().size() < 4000,
            "a message of " + std::to_string(error.message().size()));
  }

  const std::string AnyScheme() {
    const auto& schemes = moe::BuiltinRegistry().schemes();
    return std::string(schemes[bytes_.Below(schemes.size())].name);
  }

  testing::MoeCaseOptions ReadOptions() {
    testing::MoeCaseOptions options;
    options.scheme_w13 = AnyScheme();
    options.scheme_w2 = bytes_.Below(4) == 0 ? AnyScheme() : options.scheme_w13;
    options.variant = bytes_.Below(8);
    options.experts = 1 + bytes_.Below(8);
    options.hidden = 1 + bytes_.Below(48);
    options.intermediate = 1 + bytes_.Below(40);
    testing::FitSizes(options);
    const uint8_t flags = bytes_.Next();
    options.bias = (flags & 1) != 0;
    options.storage = static_cast<testing::GateUpStorage>((flags >> 1) % 3);
    options.replicas = (flags & 8) != 0 ? 1 : 0;
    moe::MoeRunnerConfig& runner = options.runner;
    runner.is_gated = (flags & 16) == 0;
    const uint8_t numbers = bytes_.Next();
    const auto& activations = moe::BuiltinRegistry().activations();
    if ((numbers & 1) != 0) runner.activation = activations[bytes_.Below(activations.size())].name;
    if ((numbers & 2) != 0) runner.gemm1_clamp_limit = static_cast<float>(bytes_.Next()) / 64.0f;
    if ((numbers & 4) != 0) runner.gemm1_alpha = static_cast<float>(bytes_.Next()) / 64.0f;
    if ((numbers & 8) != 0) runner.swiglu_limit = static_cast<float>(bytes_.Next()) / 64.0f;
    if ((numbers & 16) != 0) runner.routed_scaling_factor = 2.5;
    if ((numbers & 32) != 0) runner.no_combine = true;
    if ((numbers & 64) != 0) runner.no_combine_keep_router_weight = true;
    if ((numbers & 128) != 0) runner.apply_router_weight_on_input = true;
    return options;
  }

  // Legal ones: distinct experts, or none.
  void ReadTokens() {
    const size_t experts = layer_->options().experts;
    const size_t top_k = 1 + bytes_.Below(std::min<size_t>(experts, 4));
    const auto spread = static_cast<testing::Spread>(bytes_.Below(5));
    const bool fits = spread != testing::Spread::kNoneToFirst || top_k < experts;
    tokens_ = testing::RandomTokens(bytes_.Below(9), top_k, experts, layer_->hidden(),
                                    fits ? spread : testing::Spread::kRandom, random_);
  }

  // The whole layer: its routing may be wrong, its banks may not fit.
  void RunLayer() {
    moe::ExpertWeights weights = layer_->Weights();
    moe::MoeLayerConfig config;
    config.runner = layer_->options().runner;
    config.scheme_w13 = bytes_.Flag() ? AnyScheme() : layer_->options().scheme_w13;
    config.scheme_w2 = bytes_.Flag() ? AnyScheme() : layer_->options().scheme_w2;
    config.topk.num_experts = layer_->experts() + bytes_.Below(8) / 7;
    config.topk.top_k = tokens_.top_k;
    config.hidden_pad = bytes_.Below(8) / 7 * bytes_.Below(64);
    config.intermediate_pad = bytes_.Below(8) / 7 * bytes_.Below(64);
    if (bytes_.Below(4) == 0) config.expert_mask.assign(bytes_.Below(12), 1);
    moe::ExpertBank* banks[] = {&weights.w1, &weights.w3, &weights.w2};
    moe::ExpertBank& bank = *banks[bytes_.Below(3)];
    switch (bytes_.Below(16)) {
      case 0: bank.data.resize(bytes_.Below(9)); break;
      case 1: bank.scale.resize(bytes_.Below(9)); break;
      case 2: bank.zero.resize(bytes_.Below(9)); break;
      case 3: bank.bias.resize(bytes_.Below(9)); break;
      case 4: bank.rows = bytes_.Below(50); break;
      case 5: bank.cols = bytes_.Below(50); break;
      case 6: bank.format.scale_dtype = static_cast<switchyard::DType>(bytes_.Below(16)); break;
      case 7: bank.act.scale = static_cast<float>(bytes_.Wild()); break;
      default: break;
    }
    // A type of wider elements than the bank has would be read past its end, and cannot be seen.
    if (BytesOf(bank.format.scale_dtype, 1) > 1 && bank.format != layer_->Weights().w2.format)
      bank.format.scale_dtype = layer_->Weights().w2.format.scale_dtype;
    MoeTokens call = tokens_;
    if (bytes_.Flag() && !call.ids.empty()) call.ids[bytes_.Below(call.ids.size())] = bytes_.Wild();
    moe::TopKOutput topk = call.TopK();
    if (bytes_.Below(8) == 0) Shorten(bytes_, topk.ids);
    if (bytes_.Below(8) == 0) Shorten(bytes_, topk.weights);
    if (bytes_.Below(8) == 0) topk.num_tokens = bytes_.Below(12);
    if (bytes_.Below(8) == 0) topk.top_k = bytes_.Below(6);
    try {
      const auto& runners = moe::BuiltinRegistry().runners();
      moe::MoeLayer layer(moe::BuiltinRegistry(), config,
                          {.runner = std::string(runners[bytes_.Below(runners.size())].name),
                           .activation_quant = bytes_.Flag()},
                          std::move(weights));
      for (int again = 0; again < 2; ++again) {
        try {
          const auto rows = layer.ForwardRouted(context_, call.Hidden(), topk);
          const size_t per_token = config.runner.no_combine ? topk.top_k : 1;
          Require(rows.rows == call.count * per_token && rows.cols == layer_->hidden(),
                  "the layer returns another number of rows");
        } catch (const Error& error) {
          RequireClean(error);
        }
      }
    } catch (const Error& error) {
      RequireClean(error);
    }
  }

  void RunLegal(const testing::Place& place, const testing::Wire& wire) {
    std::vector<float> rows;
    try {
      rows = RunPlace(context_, moe::BuiltinRegistry(), place, placed_, {tokens_},
                      {.wire = wire, .spare = bytes_.Below(4), .expert_output = bytes_.Flag()});
    } catch (const Error& error) {
      Require(error.code() == ErrorCode::kUnsupported, place.name() + ": " + error.message());
      return;
    }
    const testing::Arrival arrival = ArrivalOf(context_, place, placed_, tokens_, wire);
    const testing::MoeTruth truth(*layer_, arrival.info, placed_.config, arrival.tokens);
    const testing::Verdict verdict = truth.Judge(rows, false);
    Require(verdict.ok, place.name() + ": " + verdict.why);
  }

  void RunIllegal(const testing::Place& place, const testing::Wire& wire) {
    // The dispatch itself is good.
    moe::MoeRunnerConfig plain = placed_.config;
    plain.no_combine = false;
    if (bytes_.Flag() && !tokens_.hidden.empty()) {
      constexpr float kValues[] = {__builtin_nanf(""), __builtin_inff(), 3e38f, -3e38f};
      tokens_.hidden[bytes_.Below(tokens_.hidden.size())] = kValues[bytes_.Below(4)];
    }
    try {
      testing::SimulatedDispatch dispatch(context_, place.realisation, plain, layer_->experts(),
                                          {tokens_}, {.wire = wire});
      const auto runner =
          moe::MoeRunner::Create(moe::BuiltinRegistry(), {place.runner, "none", true},
                                 placed_.config, place.realisation.format);
      EditInfo();
      switch (place.realisation.format) {
        case moe::DispatchFormat::kStandard:
          return RunEdited<moe::StandardDispatchOutput>(*runner, dispatch.output(0));
        case moe::DispatchFormat::kDeepepNormal:
          return RunEdited<moe::DeepepNormalDispatchOutput>(*runner, dispatch.output(0));
        case moe::DispatchFormat::kDeepepLl:
          return RunEdited<moe::DeepepLlDispatchOutput>(*runner, dispatch.output(0));
        case moe::DispatchFormat::kAscendTp:
          return RunEdited<moe::AscendTpDispatchOutput>(*runner, dispatch.output(0));
        default: return;
      }
    } catch (const Error& error) {
      RequireClean(error);
    }
  }

  void EditInfo() {
    moe::MoeQuantInfo& info = placed_.info;
    if (bytes_.Below(4) != 0) return;
    switch (bytes_.Below(6)) {
      case 0: info.hidden_pad = bytes_.Below(64); break;
      case 1: info.intermediate_pad = bytes_.Below(64); break;
      case 2:
        mask_.assign(bytes_.Below(12), 1);
        if (!mask_.empty()) mask_[bytes_.Below(mask_.size())] = bytes_.Wild();
        info.expert_mask = mask_;
        break;
      case 3: info.w2.rows = bytes_.Below(info.w2.rows + 1); break;
      case 4: info.w3.data = info.w3.data.first(bytes_.Below(info.w3.data.size() + 1)); break;
      default: info.a2.kind = static_cast<ActQuantKind>(bytes_.Below(10)); break;
    }
  }

  template <typename Output>
  void RunEdited(const moe::MoeRunner& runner, const moe::DispatchOutput& good) {
    Output output = moe::As<Output>(good);
    store_.reserve(64);
    for (int i = 0; i < 3 && !bytes_.empty(); ++i) EditCommon(output);
    for (int i = 0; i < 3 && !bytes_.empty(); ++i) EditFormat(output);
    const moe::CombineInput& answer = runner.Run(context_, output, placed_.info);
    Require(answer.format == output.format && answer.promises == output.promises,
            "the answer has other promises");
  }

  void EditCommon(moe::DispatchOutput& output) {
    moe::DispatchPromises& promises = output.promises;
    switch (bytes_.Below(16)) {
      case 0: promises.row_kind = static_cast<moe::RowKind>(bytes_.Below(2)); break;
      case 1:
        promises.weights_applied_by = static_cast<moe::WeightsAppliedBy>(bytes_.Below(2));
        break;
      case 2: promises.id_space = static_cast<moe::IdSpace>(bytes_.Below(2)); break;
      case 3: promises.sums_owed = static_cast<moe::SumsOwed>(bytes_.Below(4)); break;
      default: break;
    }
  }

  void EditRows(switchyard::QuantRows& rows) {
    if (bytes_.Flag()) {
      rows.rows = bytes_.Below(rows.rows + 1);
    } else {
      rows.cols = bytes_.Below(rows.cols + 1);
    }
  }

  void EditFormat(moe::StandardDispatchOutput& output) {
    switch (bytes_.Below(8)) {
      case 0: EditRows(output.hidden_states); break;
      case 1: Edit(bytes_, store_, output.topk_output.ids); break;
      case 2: Shorten(bytes_, output.topk_output.ids); break;
      case 3: Shorten(bytes_, output.topk_output.weights); break;
      case 4: output.topk_output.top_k = bytes_.Below(6); break;
      case 5: output.topk_output.num_tokens = bytes_.Below(12); break;
      default: break;
    }
  }

  void EditFormat(moe::DeepepNormalDispatchOutput& output) {
    if (output.mori != nullptr) mori_ = *output.mori;
    switch (bytes_.Below(12)) {
      case 0: EditRows(output.hidden_states); break;
      case 1: Edit(bytes_, store_, output.topk_ids); break;
      case 2: Shorten(bytes_, output.topk_ids); break;
      case 3: Shorten(bytes_, output.topk_weights); break;
      case 4: output.top_k = bytes_.Below(6); break;
      case 5: Edit(bytes_, store_, output.num_recv_tokens_per_expert); break;
      case 6: Shorten(bytes_, output.num_recv_tokens_per_expert); break;
      case 7: mori_.num_recv_tokens = bytes_.Below(16); break;
      case 8: mori_.recv_cap = bytes_.Below(16); break;
      case 9: Edit(bytes_, store_, mori_.expert_mask); break;
      case 10: Shorten(bytes_, mori_.expert_mask); break;
      default: mori_.out_dtype = static_cast<switchyard::DType>(bytes_.Below(16)); break;
    }
    if (output.mori != nullptr) output.mori = &mori_;
  }

  void EditFormat(moe::DeepepLlDispatchOutput& output) {
    switch (bytes_.Below(6)) {
      case 0: EditRows(output.hidden_states); break;
      case 1: Edit(bytes_, store_, output.masked_m); break;
      case 2: Shorten(bytes_, output.masked_m); break;
      case 3: output.capacity = bytes_.Below(output.capacity + 1); break;
      case 4: Shorten(bytes_, output.topk_ids); break;
      default: output.top_k = bytes_.Below(6); break;
    }
  }

  void EditFormat(moe::AscendTpDispatchOutput& output) {
    switch (bytes_.Below(6)) {
      case 0: EditRows(output.hidden_states); break;
      case 1:
        counts_.assign(output.expert_tokens.begin(), output.expert_tokens.end());
        if (!counts_.empty()) counts_[bytes_.Below(counts_.size())] = bytes_.Wild();
        output.expert_tokens = counts_;
        break;
      case 2: Shorten(bytes_, output.expert_tokens); break;
      case 3: output.group_list_type = static_cast<moe::GroupListType>(bytes_.Below(3)); break;
      default: break;
    }
  }

  Bytes bytes_;
  switchyard::ThreadPool pool_;
  switchyard::Arena arena_;
  switchyard::ExecContext context_;
  std::mt19937_64 random_;
  std::unique_ptr<testing::MoeCase> layer_;
  testing::PlacedLayer placed_;
  MoeTokens tokens_;
  std::vector<std::vector<int32_t>> store_;
  std::vector<int64_t> counts_;
  std::vector<int32_t> mask_;
  moe::MoriDispatch mori_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Call(data, size).Run();
  return 0;
}
