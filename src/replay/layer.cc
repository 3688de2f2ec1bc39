// Kind "layer": hidden states, routing and float weights to the layer's output.
#include <fmt/format.h>

#include <cmath>

#include "replay/layer_case.h"

namespace switchyard::replay {
namespace {

// A bank [E, rows, cols] as it lies in the file, experts [first, first + count).
moe::ExpertBank FloatBank(const TensorView& tensor, size_t first, size_t count) {
  moe::ExpertBank bank;
  bank.format.dtype = tensor.dtype;
  bank.rows = tensor.shape[1];
  bank.cols = tensor.shape[2];
  const size_t bytes = BytesOf(tensor.dtype, bank.rows * bank.cols);
  for (size_t e = first; e < first + count; ++e) bank.data.push_back(tensor.data + e * bytes);
  return bank;
}

class LayerReplay {
 public:
  explicit LayerReplay(const KindInput& input) : input_(input), layer_(input) {
    const size_t h = layer_.hidden_size();
    const size_t i = layer_.intermediate_size();
    const size_t rows = layer_.config().runner.is_gated ? 2 * i : i;
    w13_ = input.file.View("w.w13", {layer_.num_experts(), rows, h});
    w2_ = input.file.View("w.w2", {layer_.num_experts(), h, i});
  }

  KindOutput Run() {
    KindOutput result;
    std::vector<double> y = layer_.Run(input_, layer_.config(), AllExperts(), skipped_);
    if (!IsFirstRank(input_.options)) return {{}, skipped_};
    if (skipped_.empty() && input_.file.Has("w.shared_w13")) AddShared(y);
    const bool no_combine = layer_.config().runner.no_combine;
    const size_t tokens = layer_.num_tokens();
    result.outputs["out.y"] = {no_combine ? Shape{tokens, layer_.topk().top_k, layer_.hidden_size()}
                                          : Shape{tokens, layer_.hidden_size()},
                               std::move(y)};
    if (input_.file.HasConfig("routing")) AddRouting(result.outputs);
    if (skipped_.empty() && input_.file.Has("out.y_rank")) AddRanks(result.outputs);
    result.skipped = skipped_;
    return result;
  }

 private:
  moe::ExpertWeights AllExperts() const {
    return layer_.Weights(FloatBank(w13_, 0, layer_.num_experts()),
                          FloatBank(w2_, 0, layer_.num_experts()));
  }

  void AddRouting(Outputs& outputs) const {
    const moe::TopKOutput& topk = layer_.topk();
    const Shape shape{topk.num_tokens, topk.top_k};
    outputs["out.topk_ids"] = {shape, {topk.ids.begin(), topk.ids.end()}};
    outputs["out.topk_weights"] = {shape, {topk.weights.begin(), topk.weights.end()}};
  }

  // The shared expert is a layer of one expert, whose weight is 1 or sigmoid(x . gate).
  void AddShared(std::vector<double>& y) {
    const CaseFile& file = input_.file;
    const size_t h = layer_.hidden_size();
    const size_t inner = file.Size("shared_intermediate_size");
    const bool gated = layer_.config().runner.is_gated;
    TensorView up = file.View("w.shared_w13", {gated ? 2 * inner : inner, h});
    TensorView down = file.View("w.shared_w2", {h, inner});
    up.shape = Shape{1, up.shape[0], up.shape[1]};
    down.shape = Shape{1, h, inner};
    moe::ExpertWeights weights;
    weights.hidden_size = h;
    weights.intermediate_size = inner;
    weights.w1 = FloatBank(up, 0, 1);
    if (gated)
      std::tie(weights.w1, weights.w3) =
          SplitGateUp(weights.w1, layer_.config().runner.gate_up_interleaved);
    weights.w2 = FloatBank(down, 0, 1);
    moe::MoeLayerConfig config = layer_.config();
    config.runner.routed_scaling_factor = 1.0;
    config.topk = {};
    config.topk.num_experts = config.topk.top_k = 1;
    const std::vector<int32_t> ids(layer_.num_tokens(), 0);
    const std::vector<float> gate = SharedGate();
    moe::TopKOutput topk;
    topk.num_tokens = layer_.num_tokens();
    topk.top_k = 1;
    topk.ids = ids;
    topk.weights = gate;
    const std::vector<double> shared =
        layer_.RunAlone(input_, config, std::move(weights), topk, skipped_);
    for (size_t i = 0; i < shared.size(); ++i) y[i] += shared[i];
  }

  std::vector<float> SharedGate() const {
    std::vector<float> weights(layer_.num_tokens(), 1.0f);
    if (!input_.file.Has("w.shared_gate")) return weights;
    input_.file.View("w.shared_gate", {1, layer_.hidden_size()});
    const std::vector<float> gate = input_.file.F32("w.shared_gate");
    for (size_t t = 0; t < weights.size(); ++t) {
      double sum = 0;
      for (size_t h = 0; h < gate.size(); ++h) sum += double{gate[h]} * layer_.hidden().Row(t)[h];
      weights[t] = static_cast<float>(1.0 / (1.0 + std::exp(-sum)));
    }
    return weights;
  }

  // The routed partial of each EP rank. Where the pair takes a mask, a rank holds its experts
  // alone; otherwise (ascend_tp has all experts on each rank) the other ranks' slots are dropped.
  void AddRanks(Outputs& outputs) {
    const size_t ranks = input_.file.Size("moe_ep_size");
    const size_t experts = layer_.num_experts();
    if (ranks == 0 || experts % ranks != 0) input_.file.Corrupt("moe_ep_size does not divide E");
    const size_t local = experts / ranks;
    Computed all{{ranks, layer_.num_tokens(), layer_.hidden_size()}, {}};
    for (size_t r = 0; r < ranks && skipped_.empty(); ++r) {
      moe::MoeLayerConfig config = layer_.config();
      moe::ExpertWeights weights = AllExperts();
      std::vector<int32_t> ids(layer_.topk().ids.begin(), layer_.topk().ids.end());
      moe::TopKOutput topk = layer_.topk();
      if (input_.options.runner == "ascend") {
        for (int32_t& id : ids) {
          if (id >= 0 && static_cast<size_t>(id) / local != r) id = -1;
        }
        topk.ids = ids;
      } else {
        config.expert_mask.assign(experts, 0);
        std::fill_n(config.expert_mask.begin() + static_cast<std::ptrdiff_t>(r * local), local, 1);
        KeepExperts(weights, r * local, local);
      }
      const std::vector<double> y =
          layer_.RunAlone(input_, config, std::move(weights), topk, skipped_);
      all.values.insert(all.values.end(), y.begin(), y.end());
    }
    if (skipped_.empty()) outputs["out.y_rank"] = std::move(all);
  }

  static void KeepExperts(moe::ExpertWeights& weights, size_t first, size_t count) {
    const auto keep = [&](auto& list) {
      if (list.empty()) return;
      const auto begin = list.begin() + static_cast<std::ptrdiff_t>(first);
      list = {begin, begin + static_cast<std::ptrdiff_t>(count)};
    };
    for (moe::ExpertBank* bank : {&weights.w1, &weights.w3, &weights.w2}) {
      keep(bank->data);
      keep(bank->bias);
    }
  }

  const KindInput& input_;
  LayerCase layer_;
  TensorView w13_, w2_;
  std::string skipped_;
};

}  // namespace

KindOutput ReplayLayer(const KindInput& input) { return LayerReplay(input).Run(); }

}  // namespace switchyard::replay
