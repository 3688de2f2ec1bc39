#include "simulation_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "html.h"

namespace switchyard::cli {
namespace {

using simulate::Prediction;
using simulate::StepPrediction;
using Out = std::back_insert_iterator<std::string>;

// Told apart with every common kind of colour blindness, on white.
constexpr std::array<const char*, 6> kColours = {"#1b6ca8", "#c4450c", "#2f7d46",
                                                 "#7b4fa3", "#8a6d00", "#555b66"};

const char* Colour(size_t model) { return kColours[model % kColours.size()]; }

// The first scheme is solid.
const char* Dashes(size_t scheme) { return scheme == 0 ? "" : " stroke-dasharray=\"7 4\""; }

// The values of one axis: linear or logarithmic, drawn from `start` to `end`.
struct Axis {
  double low, high, start, end;
  bool is_log;

  double operator()(double value) const {
    const auto scale = [this](double v) { return is_log ? std::log2(v) : v; };
    const double t = (scale(value) - scale(low)) / (scale(high) - scale(low));
    return start + t * (end - start);
  }
};

// One of the two diagrams.
struct Panel {
  std::string title;
  Axis x, y;
  std::vector<double> y_ticks;
  std::string (*label)(double);
  double (*value)(const StepPrediction&);
};

std::string RateLabel(double value) {
  return value >= 1e6   ? fmt::format("{:g}M", value / 1e6)
         : value >= 1e3 ? fmt::format("{:g}k", value / 1e3)
                        : fmt::format("{:g}", value);
}
std::string ShareLabel(double value) { return fmt::format("{:g} %", value); }
double Rate(const StepPrediction& step) { return step.tokens_per_s; }
double ShareOfExchange(const StepPrediction& step) { return 100 * step.exchange_share(); }

// Smallest and largest of a figure over all curves.
std::pair<double, double> Extent(std::span<const SimulatedModel> models,
                                 double (*value)(const StepPrediction&)) {
  double low = INFINITY, high = 0;
  for (const SimulatedModel& model : models)
    for (const Prediction& point : model.sweep)
      for (const StepPrediction& step : point.steps) {
        low = std::min(low, value(step));
        high = std::max(high, value(step));
      }
  return {low, high};
}

Axis RankAxis(std::span<const SimulatedModel> models, double start, double end) {
  double high = 4;
  for (const SimulatedModel& model : models)
    for (const Prediction& point : model.sweep)
      high = std::max(high, static_cast<double>(point.num_ranks));
  return {2, high, start, end, true};
}

constexpr double kTop = 60, kBottom = 360, kWidth = 1000;

Panel RatePanel(std::span<const SimulatedModel> models) {
  const auto [low, high] = Extent(models, &Rate);
  // An idle step has no rate; the axis still needs two ends.
  const double first = std::pow(10, std::floor(std::log10(std::max(low, 1e-3))));
  const double last =
      std::max(10 * first, std::pow(10, std::ceil(std::log10(std::max(high, 1e-2)))));
  Panel panel{"tokens per second, all ranks together",
              RankAxis(models, 64, 480),
              {first, last, kBottom, kTop, true},
              {},
              &RateLabel,
              &Rate};
  for (double tick = first; tick <= last * 1.001; tick *= 10) panel.y_ticks.push_back(tick);
  return panel;
}

Panel SharePanel(std::span<const SimulatedModel> models) {
  const double high = Extent(models, &ShareOfExchange).second;
  const double step = high > 50 ? 20 : high > 20 ? 10 : high > 8 ? 5 : 1;
  const double last = std::max(step, std::ceil(high / step) * step);
  Panel panel{"share of the step spent exchanging rows",
              RankAxis(models, 566, 982),
              {0, last, kBottom, kTop, false},
              {},
              &ShareLabel,
              &ShareOfExchange};
  for (double tick = 0; tick <= last * 1.001; tick += step) panel.y_ticks.push_back(tick);
  return panel;
}

void WriteAxes(Out out, const Panel& panel) {
  fmt::format_to(out, "<text x=\"{}\" y=\"{}\" font-weight=\"bold\">{}</text>\n",
                 panel.x.start - 40, kTop - 20, panel.title);
  for (const double tick : panel.y_ticks) {
    const double y = panel.y(tick);
    fmt::format_to(out,
                   "<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text class=\"tick\" "
                   "x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
                   panel.x.start, y, panel.x.end, panel.x.start - 6, y + 4, panel.label(tick));
  }
  for (double ranks = 2; ranks <= panel.x.high; ranks *= 2) {
    const double x = panel.x(ranks);
    fmt::format_to(
        out,
        "<path class=\"grid\" d=\"M{0:.1f} {1}V{2}\"/><text class=\"tick\" x=\"{0:.1f}\" "
        "y=\"{3}\" text-anchor=\"middle\">{4:g}</text>\n",
        x, kTop, kBottom, kBottom + 18, ranks);
  }
  fmt::format_to(out,
                 "<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">ranks</text>\n",
                 (panel.x.start + panel.x.end) / 2, kBottom + 36);
}

void WriteCurves(Out out, const Panel& panel, std::span<const SimulatedModel> models) {
  for (size_t m = 0; m < models.size(); ++m) {
    for (size_t s = 0; s < models[m].layout.steps.size(); ++s) {
      fmt::format_to(out, "<polyline class=\"curve\" stroke=\"{}\"{} points=\"", Colour(m),
                     Dashes(s));
      for (const Prediction& point : models[m].sweep) {
        const double value = std::max(panel.value(point.steps[s]), panel.y.low);
        fmt::format_to(out, "{:.1f},{:.1f} ", panel.x(static_cast<double>(point.num_ranks)),
                       panel.y(value));
      }
      fmt::format_to(out, "\"/>\n");
    }
  }
}

void WriteLegend(Out out, std::span<const SimulatedModel> models) {
  double x = 24;
  for (size_t m = 0; m < models.size(); ++m) {
    for (size_t s = 0; s < models[m].layout.steps.size(); ++s) {
      const std::string label = fmt::format("{} {}", ShapeLabel(models[m].request.shape),
                                            simulate::SchemeName(models[m].layout.steps[s].scheme));
      const double width = 42 + 6.6 * static_cast<double>(label.size());
      // One line for the solid, one for the dashed curves.
      fmt::format_to(
          out,
          "<path class=\"curve\" stroke=\"{}\"{} d=\"M{:.0f} {}h26\"/><text class=\"tick\" "
          "x=\"{:.0f}\" y=\"{}\">{}</text>\n",
          Colour(m), Dashes(s), x, 424 + 18 * s, x + 32, 428 + 18 * s, EscapeHtml(label));
      if (s + 1 == models[m].layout.steps.size()) x += width;
    }
  }
}

// `text` in lines of at most `width` characters, broken at spaces.
std::vector<std::string> Wrap(const std::string& text, size_t width) {
  std::vector<std::string> lines;
  size_t begin = 0;
  while (text.size() - begin > width) {
    size_t end = text.rfind(' ', begin + width);
    if (end == std::string::npos || end <= begin) end = begin + width;
    lines.push_back(text.substr(begin, end - begin));
    begin = end + (end < text.size() && text[end] == ' ' ? 1 : 0);
  }
  lines.push_back(text.substr(begin));
  return lines;
}

// The assumptions of a sweep, wrapped; the first line of each starts with a dash.
std::vector<std::string> AssumptionLines(const simulate::SimulationRequest& request) {
  std::vector<std::string> lines;
  for (const std::string& assumption : SweepAssumptions(request)) {
    const char* mark = "\u2013 ";
    for (const std::string& line : Wrap(assumption, 150)) {
      lines.push_back(mark + line);
      mark = "\u00a0\u00a0";
    }
  }
  return lines;
}

// The plot: two diagrams side by side, the legend and the assumptions below.
void WritePlot(Out out, std::span<const SimulatedModel> models) {
  const std::vector<std::string> assumptions = AssumptionLines(models[0].request);
  const double height = 500 + 17 * static_cast<double>(assumptions.size());
  fmt::format_to(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" "
                 "font-family=\"sans-serif\" font-size=\"14\" role=\"img\" "
                 "aria-label=\"Predicted tokens per second against ranks\">\n"
                 "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n"
                 "<style>.grid{{stroke:#e2e4e8;stroke-width:1}} .tick{{font-size:12px;fill:#445}} "
                 ".curve{{fill:none;stroke-width:2}}</style>\n"
                 "<text x=\"24\" y=\"22\" font-size=\"16\" font-weight=\"bold\">Predicted, not "
                 "measured: one decode step of {2} tokens a rank</text>\n",
                 kWidth, height, models[0].request.tokens);
  for (const Panel& panel : {RatePanel(models), SharePanel(models)}) {
    WriteAxes(out, panel);
    WriteCurves(out, panel, models);
  }
  WriteLegend(out, models);
  double y = 476;
  fmt::format_to(
      out, "<text class=\"tick\" x=\"24\" y=\"{}\" font-weight=\"bold\">Assumptions</text>\n", y);
  for (const std::string& line : assumptions) {
    y += 17;
    fmt::format_to(out, "<text class=\"tick\" x=\"24\" y=\"{}\">{}</text>\n", y, EscapeHtml(line));
  }
  fmt::format_to(out, "</svg>\n");
}

void WriteTable(Out out, const SimulatedModel& model) {
  fmt::format_to(out,
                 "<h2>{}</h2>\n<table><thead><tr><th>ranks</th><th>nodes</th><th>redundant "
                 "experts</th><th>busiest rank / mean</th><th>weights of a rank, GB</th><th></th>"
                 "<th>dispatch, \u00b5s</th><th>experts, \u00b5s</th><th>combine, \u00b5s</th>"
                 "<th>busiest card, MB a dispatch</th><th>step, ms</th><th>tokens/s</th>"
                 "</tr></thead><tbody>\n",
                 EscapeHtml(ShapeLabel(model.request.shape)));
  for (const Prediction& point : model.sweep) {
    for (const StepPrediction& step : point.steps) {
      fmt::format_to(
          out,
          "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.2f}</td><td>{:.1f}</td><td>{}</td>"
          "<td>{:.0f}</td><td>{:.0f}</td><td>{:.0f}</td><td>{:.2f}</td><td>{:.1f}</td>"
          "<td>{:.0f}</td></tr>\n",
          point.num_ranks, point.num_nodes, point.redundant, point.balance.mean,
          point.weight_bytes / 1e9, simulate::SchemeName(step.scheme), step.dispatch.total_us(),
          step.experts_us, step.combine.total_us(), step.dispatch.busiest_nic_bytes / 1e6,
          step.step_us / 1e3, step.tokens_per_s);
    }
  }
  fmt::format_to(out, "</tbody></table>\n");
}

constexpr std::string_view kStyle = R"css(<style>
body{margin:0 auto;max-width:72rem;padding:1.5rem 1rem 3rem;font:15px/1.5 system-ui,sans-serif;color:#1d1f23;background:#fff}
h1{font-size:1.5rem;margin:0 0 .6rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}svg{max-width:100%}
table{border-collapse:collapse}th,td{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid #d9dce1;
 font-variant-numeric:tabular-nums;vertical-align:bottom}th{color:#5f6670;font-weight:500}
</style>
)css";

}  // namespace

std::string ShapeLabel(const simulate::ModelShape& shape) {
  return fmt::format("{}:{}", shape.name, shape.scheme);
}

std::vector<std::string> SweepAssumptions(const simulate::SimulationRequest& request) {
  std::vector<std::string> lines = simulate::Assumptions(request);
  lines.insert(lines.begin() + 3,
               fmt::format("{} ranks on a node; where the experts do not divide by the ranks, "
                           "replicas are added, so that each rank has at least one expert",
                           request.num_ranks / request.num_nodes));
  return lines;
}

std::string SimulationPlot(std::span<const SimulatedModel> models) {
  std::string plot;
  WritePlot(Out(plot), models);
  return plot;
}

std::string SimulationPage(std::span<const SimulatedModel> models) {
  std::string page;
  const Out out(page);
  fmt::format_to(out,
                 "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta "
                 "name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                 "<title>Simulated expert parallelism</title>\n{}</head><body>\n"
                 "<h1>Simulated expert parallelism</h1>\n",
                 kStyle);
  WritePlot(out, models);
  for (const SimulatedModel& model : models) WriteTable(out, model);
  fmt::format_to(out, "</body></html>\n");
  return page;
}

}  // namespace switchyard::cli
