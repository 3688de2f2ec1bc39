#include "testing/moe_places.h"

#include <algorithm>
#include <stdexcept>

#include "switchyard/moe/layer/register_builtins.h"

namespace switchyard::testing {
namespace {

// Contract 4.2: what a runner behind mori does with codes before it multiplies.
bool MoriDequantises(const PlacedLayer& placed, ActQuantKind wire) {
  using moe::QuantType;
  const QuantType weights =
      moe::BuiltinRegistry().FindScheme(placed.layer->options().scheme_w13).quant_type;
  const bool weight_only = placed.info.a13.kind == ActQuantKind::kNone;
  // Without activation quantisation the weights are of type No, but for the MX ones.
  const bool mx = weights == QuantType::kPer1x32;
  switch (weight_only && !mx ? QuantType::kNo : weights) {
    case QuantType::kPer1x32: {
      const bool clamped =
          placed.config.swiglu_limit.has_value() && placed.config.gate_up_interleaved;
      return wire == ActQuantKind::kFp8Group || (wire == ActQuantKind::kMxFp4 && clamped);
    }
    case QuantType::kPer128x128:
    case QuantType::kPerToken: return wire == ActQuantKind::kMxFp4 || wire == ActQuantKind::kMxFp8;
    case QuantType::kNo: return false;
  }
  return false;
}

}  // namespace

std::vector<Place> AllPlaces(const moe::Registry& registry) {
  std::vector<Place> places;
  for (const moe::PrePermuteEntry& pair : registry.pre_permutes()) {
    const std::vector<Realisation> realisations = RealisationsOf(registry, pair.format);
    if (realisations.empty()) {
      throw std::runtime_error("runner " + std::string(pair.runner) + " takes format " +
                               std::string(DispatchFormatName(pair.format)) +
                               ", which no dispatcher emits and tests/testing/one_rank.cc does "
                               "not know");
    }
    for (const Realisation& realisation : realisations)
      places.push_back({std::string(pair.runner), realisation});
  }
  return places;
}

bool Lists(const moe::SchemeEntry& scheme, std::string_view runner) {
  return std::find(scheme.runners.begin(), scheme.runners.end(), runner) != scheme.runners.end();
}

std::vector<float> RunPlace(ExecContext& context, const moe::Registry& registry, const Place& place,
                            const PlacedLayer& placed, std::vector<MoeTokens> sources,
                            const DispatchOptions& options) {
  const size_t ranks = sources.size();
  moe::MoeRunnerConfig config = placed.config;
  config.num_local_experts = placed.layer->experts() / ranks;
  SimulatedDispatch dispatch(context, place.realisation, config, placed.layer->experts(),
                             std::move(sources), options);
  const auto runner = moe::MoeRunner::Create(registry, {place.runner, "none", true}, config,
                                             place.realisation.format);
  std::vector<const moe::CombineInput*> answers;
  for (size_t rank = 0; rank < ranks; ++rank) {
    moe::MoeQuantInfo info = placed.info;
    if (ranks > 1) {
      info = placed.layer->InfoOfExperts(rank * config.num_local_experts, config.num_local_experts);
      info.a13 = placed.info.a13;
      info.a2 = placed.info.a2;
    }
    info.expert_mask = dispatch.expert_mask(rank);
    answers.push_back(&runner->Run(context, dispatch.output(rank), info));
  }
  std::vector<float> all;
  for (const std::vector<float>& rows : dispatch.Combine(answers))
    all.insert(all.end(), rows.begin(), rows.end());
  return all;
}

Arrival ArrivalOf(ExecContext& context, const Place& place, const PlacedLayer& placed,
                  const MoeTokens& tokens, const Wire& wire) {
  Arrival arrival{wire.name, AfterWire(context, tokens, wire), placed.info};
  if (wire.how.kind == ActQuantKind::kNone) return arrival;
  if (place.realisation.kind == Realisation::Kind::kMori &&
      MoriDequantises(placed, wire.how.kind)) {
    arrival.name += " to bf16";
    for (float& value : arrival.tokens.hidden) value = ToFloat(ToBF16(value));
  } else {
    arrival.info.a13 = {};
  }
  return arrival;
}

}  // namespace switchyard::testing
