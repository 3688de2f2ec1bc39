#include "simulation_page.h"

#include <gtest/gtest.h>

#include <string>

namespace switchyard::cli {
namespace {

std::vector<SimulatedModel> Models(size_t tokens, bool low_latency = false) {
  std::vector<SimulatedModel> models;
  for (const char* shape : {"olmoe-1b-7b", "deepseek-v3:fp8_block"}) {
    SimulatedModel model;
    model.request.shape = simulate::FindShape(shape);
    model.request.link = simulate::DefaultLink();
    model.request.link.name = "<b>&\"cluster\"";
    model.request.routing =
        simulate::UniformShares(model.request.shape.num_experts, model.request.shape.top_k);
    model.request.tokens = tokens;
    model.request.low_latency = low_latency;
    model.layout = simulate::Predict(model.request);
    model.sweep = simulate::Sweep(model.request, 64);
    models.push_back(std::move(model));
  }
  return models;
}

size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST(SimulationPlot, HasACurvePerModelAndScheme) {
  const std::string plot = SimulationPlot(Models(128));
  EXPECT_EQ(Count(plot, "<polyline"), 2u * 2 * 2) << "panels, models, schemes";
  EXPECT_EQ(Count(plot, "<svg"), 1u);
  EXPECT_EQ(Count(plot, "</svg>"), 1u);
  EXPECT_EQ(plot.find("nan"), std::string::npos);
  EXPECT_EQ(plot.find("inf"), std::string::npos);
  EXPECT_NE(plot.find("olmoe-1b-7b:bf16 hierarchical"), std::string::npos);
  EXPECT_NE(plot.find("Assumptions"), std::string::npos);
  EXPECT_NE(plot.find("8 ranks on a node"), std::string::npos);
  EXPECT_EQ(Count(SimulationPlot(Models(16, true)), "<polyline"), 2u * 2);
}

TEST(SimulationPlot, AnIdleStepHasAPlotToo) {
  const std::string plot = SimulationPlot(Models(0));
  EXPECT_EQ(plot.find("nan"), std::string::npos);
  EXPECT_EQ(plot.find("inf"), std::string::npos);
}

TEST(SimulationPage, IsOnePageAndEscapesNames) {
  const std::string page = SimulationPage(Models(128));
  EXPECT_EQ(Count(page, "<table>"), 2u);
  EXPECT_EQ(page.find("<b>"), std::string::npos);
  EXPECT_NE(page.find("&lt;b&gt;&amp;&quot;cluster&quot;"), std::string::npos);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(Count(page, "http"), 1u) << "only the name of the SVG namespace";
}

}  // namespace
}  // namespace switchyard::cli
