#include "testing/ep_ranks.h"

#include <fmt/format.h>

#include <numeric>
#include <stdexcept>

#include "switchyard/moe/layer/register_builtins.h"

namespace switchyard::testing {

using namespace std::chrono_literals;

namespace {

std::vector<float> Values(ConstRows rows) {
  std::vector<float> values;
  for (size_t t = 0; t < rows.rows; ++t)
    values.insert(values.end(), rows.Row(t), rows.Row(t) + rows.cols);
  return values;
}

}  // namespace

EpRank::EpRank(ProcessGroup& world_in, const ParallelConfig& config,
               const moe::ExpertParallelOptions& options)
    : world(world_in),
      groups(MakeGroups(world_in, config, "test", Deadline::After(60s, "groups"))),
      ep(groups, options) {}

ParallelConfig EpSetup::Config() const {
  ParallelConfig config;
  config.tp_size = ranks;
  config.moe_dp_size = moe_dp;
  config.moe_ep_size = ranks / moe_tp / moe_dp;
  config.dp_attention = !options.tokens_are_replicated;
  return config;
}

std::string EpSetup::Describe() const {
  return fmt::format("{} ranks, MoE-TP {}, MoE-DP {}, nodes of {}, {} x {}, {}, {}, wire {} {}",
                     ranks, moe_tp, moe_dp, node_size, layer.a2a, layer.runner,
                     options.tokens_are_replicated ? "replicated" : "own tokens",
                     options.deterministic ? "routewise" : "summed by ranks", layer.dispatch_dtype,
                     layer.combine_dtype);
}

std::vector<float> RunOneRank(const MoeCase& layer, const MoeTokens& tokens,
                              const std::string& runner) {
  moe::MoeLayerOptions options;
  options.runner = runner;
  options.act_dtype = "f32";
  moe::MoeLayer alone(moe::BuiltinRegistry(), LayerConfigOf(layer, tokens.top_k), options,
                      layer.Weights());
  ThreadPool pool(1);
  Arena arena;
  ExecContext context{pool, arena};
  return Values(alone.ForwardRouted(context, tokens.Hidden(), tokens.TopK()));
}

void RunEp(const EpSetup& setup, const std::function<void(EpRank&)>& body) {
  RunRanks(RankOptions{.num_ranks = setup.ranks, .node_size = setup.node_size},
           [&](ProcessGroup& world) {
             std::unique_ptr<ProcessGroup> ordered;
             if (!setup.order.empty()) {
               ordered = world.Split(0, setup.order[world.rank()], "ordered",
                                     Deadline::After(60s, "groups"));
             }
             EpRank rank(ordered ? *ordered : world, setup.Config(), setup.options);
             body(rank);
           });
}

moe::MoeLayerConfig LayerConfigOf(const MoeCase& layer, size_t top_k) {
  moe::MoeLayerConfig config;
  config.topk.num_experts = layer.experts();
  config.topk.top_k = top_k;
  config.runner = layer.options().runner;
  config.scheme_w13 = layer.options().scheme_w13;
  config.scheme_w2 = layer.options().scheme_w2;
  return config;
}

std::unique_ptr<moe::MoeLayer> MakeRankLayer(EpRank& rank, const EpSetup& setup,
                                             const MoeCase& layer, size_t top_k) {
  const size_t local = layer.experts() / rank.ep.ep_size();
  std::vector<int32_t> slots(local);
  std::iota(slots.begin(), slots.end(), static_cast<int32_t>(rank.ep.ep_rank() * local));
  moe::MoeLayerOptions options = setup.layer;
  options.ep = &rank.ep;
  return std::make_unique<moe::MoeLayer>(
      moe::BuiltinRegistry(), LayerConfigOf(layer, top_k), options,
      moe::SplitExperts(moe::PickExperts(layer.Weights(), slots), rank.ep.moe_tp_rank(),
                        rank.ep.moe_tp_size()));
}

std::vector<std::vector<float>> RunSpread(const EpSetup& setup, const MoeCase& layer,
                                          const std::vector<MoeTokens>& sources) {
  std::vector<std::vector<float>> results(setup.ranks);
  const bool replicated = setup.options.tokens_are_replicated;
  RunEp(setup, [&](EpRank& rank) {
    const size_t me = rank.world.rank();
    const MoeTokens& tokens = sources[replicated ? 0 : me];
    const auto moe = MakeRankLayer(rank, setup, layer, tokens.top_k);
    rank.ep.BeginPass(setup.options.deepep_mode == moe::DeepepMode::kLowLatency
                          ? moe::ForwardPhase::kDecode
                          : moe::ForwardPhase::kPrefill);
    const Rows rows = moe->ForwardRouted(rank.context, tokens.Hidden(), tokens.TopK());
    results[me] = Values(rows);
  });
  if (!replicated) return results;
  for (const std::vector<float>& rows : results) {
    if (rows != results[0]) throw std::runtime_error("ranks have different results");
  }
  return {results[0]};
}

}  // namespace switchyard::testing
