// Pictures of `simulate`: tokens per second against ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "switchyard/simulate/predict.h"

namespace switchyard::cli {

// One model's simulation.
struct SimulatedModel {
  simulate::SimulationRequest request;
  simulate::Prediction layout;              // as requested
  std::vector<simulate::Prediction> sweep;  // over the ranks
};

// "qwen3-30b-a3b:bf16".
std::string ShapeLabel(const simulate::ModelShape& shape);

// What a sweep takes for granted, a sentence each.
std::vector<std::string> SweepAssumptions(const simulate::SimulationRequest& request);

// An SVG that stands alone: tokens per second and the share of the exchanges against ranks, one
// colour a model, one dash pattern a scheme, and the assumptions under the curves. `models` is not
// empty, and their requests differ in the shape only.
std::string SimulationPlot(std::span<const SimulatedModel> models);

// A page of HTML that needs nothing but itself: the plot, and the figures of every layout.
std::string SimulationPage(std::span<const SimulatedModel> models);

}  // namespace switchyard::cli
