// Where a layer can run: every runner behind every realisation of the formats that it has permutes
// for, from a registry.
#pragma once

#include <string>
#include <vector>

#include "switchyard/moe/registry/moe_runner.h"
#include "testing/moe_case.h"
#include "testing/one_rank.h"

namespace switchyard::testing {

// A permute pair behind one realisation of its format.
struct Place {
  std::string runner;
  Realisation realisation;

  std::string name() const { return runner + " behind " + realisation.name; }
  // Whether combine weighs and sums, not the runner.
  bool CombineWeighs() const {
    return realisation.kind != Realisation::Kind::kStandard &&
           realisation.kind != Realisation::Kind::kNormalTokens &&
           realisation.kind != Realisation::Kind::kMori;
  }
};

// Errors: std::runtime_error naming runner and format if one has no realisation: no dispatcher
//   emits it and one_rank.cc does not know it.
std::vector<Place> AllPlaces(const moe::Registry& registry);

// Whether a scheme names the runner among those that compute it.
bool Lists(const moe::SchemeEntry& scheme, std::string_view runner);

// A layer as a runner is given it.
struct PlacedLayer {
  const MoeCase* layer = nullptr;
  moe::MoeQuantInfo info;
  moe::MoeRunnerConfig config;
};

// Dispatch, the runner of each rank and combine, one rank for each source. Experts are divided
// evenly among them. Returns the rows of the sources one after the other.
// Errors: those of the runner and its permutes; those of SimulatedDispatch.
std::vector<float> RunPlace(ExecContext& context, const moe::Registry& registry, const Place& place,
                            const PlacedLayer& placed, std::vector<MoeTokens> sources,
                            const DispatchOptions& options = {});

// What the experts compute with after a wire: codes are multiplied as they are, unless the runner
// makes bf16 of them first (contract 4.2, the table of mori).
struct Arrival {
  std::string name;  // the same for equal arrivals of one batch
  MoeTokens tokens;
  moe::MoeQuantInfo info;
};
Arrival ArrivalOf(ExecContext& context, const Place& place, const PlacedLayer& placed,
                  const MoeTokens& tokens, const Wire& wire);

}  // namespace switchyard::testing
