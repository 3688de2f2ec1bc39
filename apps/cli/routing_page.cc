// The page of `inspect --routing`. No script and no other file: it opens anywhere.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "html.h"
#include "routing_stats.h"

namespace switchyard::cli {
namespace {

// Colours follow log2 of the load in half steps, kSteps of them on each side of the even share:
// from an eighth of it to eight times as much.
constexpr int kSteps = 6;

struct Rgb {
  int r, g, b;
};

Rgb Mix(Rgb a, Rgb b, double t) {
  const auto mix = [t](int x, int y) { return static_cast<int>(std::lround(x + (y - x) * t)); };
  return {mix(a.r, b.r), mix(a.g, b.g), mix(a.b, b.b)};
}

// The colours of one theme: towards `cold` below the even share, towards `hot` above it.
struct Theme {
  Rgb even, cold, hot;

  Rgb Step(int step) const {
    const double t = std::pow(std::abs(step) / double{kSteps}, 0.8);
    return Mix(even, step < 0 ? cold : hot, t);
  }
};
constexpr Theme kLight{{240, 239, 235}, {30, 84, 160}, {196, 62, 12}};
constexpr Theme kDark{{52, 54, 60}, {96, 165, 250}, {255, 138, 76}};

// The class of a cell: "z" for an idle expert, else "s0" (coldest) to "s12" (hottest).
std::string CellClass(double load) {
  if (load <= 0) return "z";
  const double step = std::clamp(std::round(2 * std::log2(load)), double{-kSteps}, double{kSteps});
  return fmt::format("s{}", static_cast<int>(step) + kSteps);
}

using Out = std::back_insert_iterator<std::string>;

void WriteColours(Out out, const Theme& theme) {
  for (int step = -kSteps; step <= kSteps; ++step) {
    const Rgb c = theme.Step(step);
    fmt::format_to(out, "--s{}:#{:02x}{:02x}{:02x};", step + kSteps, c.r, c.g, c.b);
  }
}

void WriteStyle(Out out) {
  fmt::format_to(out,
                 "<style>\n:root{{color-scheme:light dark;--bg:#fff;--fg:#1d1f23;--dim:#5f6670;"
                 "--line:#d9dce1;--idle:#fff;");
  WriteColours(out, kLight);
  fmt::format_to(out,
                 "}}\n@media (prefers-color-scheme:dark){{:root{{--bg:#16181c;--fg:#e6e8eb;"
                 "--dim:#9aa1ab;--line:#3a3e45;--idle:#16181c;");
  WriteColours(out, kDark);
  fmt::format_to(out, "}}}}\n{}", R"css(body{margin:0 auto;max-width:76rem;padding:1.5rem 1rem 3rem;
 background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.dim{color:var(--dim)}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.card{border:1px solid var(--line);border-radius:8px;padding:.6rem .9rem;flex:1 1 14rem}
.card b{display:block;font-size:1.4rem;font-weight:600}
.map{overflow-x:auto;margin-top:.8rem}svg{display:block}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.z{fill:var(--idle);stroke:var(--dim);stroke-dasharray:2 2}
.m rect:hover{stroke:var(--fg);stroke-width:2;stroke-dasharray:none}
table{border-collapse:collapse}th,td{padding:.2rem .9rem .2rem 0;text-align:left;
 border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;vertical-align:top}
th{color:var(--dim);font-weight:500}td.n,th.n{text-align:right}
meter{width:7rem;vertical-align:middle}
)css");
  for (int step = 0; step <= 2 * kSteps; ++step)
    fmt::format_to(out, ".s{0}{{fill:var(--s{0})}}", step);
  fmt::format_to(out, "\n</style>\n");
}

std::string LoadText(double load) { return fmt::format("{:.2f}\u00d7", load); }

void WriteCard(Out out, const std::string& figure, const std::string& text) {
  fmt::format_to(out, "<div class=\"card\"><b>{}</b>{}</div>\n", figure, text);
}

void WriteCards(Out out, const RoutingStats& stats) {
  fmt::format_to(out, "<div class=\"cards\">\n");
  WriteCard(out, fmt::format("{:.2f}", stats.balancedness),
            "balancedness, mean of the layers <span class=\"dim\">(mean expert / hottest expert; "
            "1 = every expert gets the same)</span>");
  for (const ExpertPlace& place : HottestExperts(stats, 1)) {
    const LayerRouting& layer = stats.layers[place.layer];
    WriteCard(
        out, LoadText(stats.Load(layer, place.expert)),
        fmt::format("hottest: expert {} of layer {} <span class=\"dim\">({:.0f} tokens; an "
                    "even share is {:.1f})</span>",
                    place.expert, layer.layer, layer.tokens[place.expert], stats.EvenShare()));
  }
  WriteCard(out, fmt::format("{}", IdleExperts(stats).size()),
            fmt::format("of {} experts idle <span class=\"dim\">(chosen by no token)</span>",
                        stats.layers.size() * stats.num_experts));
  fmt::format_to(out, "</div>\n");
}

void WriteLegend(Out out) {
  constexpr int kCell = 26;
  constexpr std::array<const char*, 7> kLabels = {"\u215b", "\u00bc", "\u00bd", "1", "2", "4", "8"};
  fmt::format_to(out,
                 "<svg width=\"560\" height=\"44\" viewBox=\"0 0 560 44\" role=\"img\" "
                 "aria-label=\"Scale: load relative to an even share\">\n"
                 "<rect class=\"z\" x=\"1\" y=\"1\" width=\"{0}\" height=\"18\"/>"
                 "<text x=\"14\" y=\"36\" text-anchor=\"middle\">idle</text>\n",
                 kCell);
  const int left = 2 * kCell;
  for (int step = 0; step <= 2 * kSteps; ++step) {
    const int x = left + step * kCell;
    fmt::format_to(out, "<rect class=\"s{}\" x=\"{}\" y=\"1\" width=\"{}\" height=\"18\"/>", step,
                   x, kCell);
    if (step % 2 == 0) {
      const char* bound = step == 0 ? "\u2264" : step == 2 * kSteps ? "\u2265" : "";
      fmt::format_to(out, "<text x=\"{}\" y=\"36\" text-anchor=\"middle\">{}{}\u00d7</text>\n",
                     x + kCell / 2, bound, kLabels[static_cast<size_t>(step / 2)]);
    }
  }
  fmt::format_to(out, "<text x=\"{}\" y=\"15\">of an even share</text></svg>\n",
                 left + (2 * kSteps + 1) * kCell + 10);
}

// Every how many cells of this size a label of `label_size` fits: 1, 2, 4, …
size_t LabelStep(double cell, double label_size) {
  size_t step = 1;
  while (cell * static_cast<double>(step) < label_size) step *= 2;
  return step;
}

void WriteMap(Out out, const RoutingStats& stats) {
  const size_t num_rows = stats.layers.size();
  const double width = std::clamp(1080.0 / static_cast<double>(stats.num_experts), 4.0, 40.0);
  const double height = std::clamp(720.0 / static_cast<double>(num_rows), 10.0, 28.0);
  constexpr double kLeft = 64, kTop = 34;
  const double all_width = kLeft + width * static_cast<double>(stats.num_experts) + 2;
  const double all_height = kTop + height * static_cast<double>(num_rows) + 2;
  const double gap = width >= 8 ? 1 : 0;
  fmt::format_to(out,
                 "<div class=\"map\"><svg class=\"m\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
                 "viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" aria-label=\"Heat map: layers down, "
                 "experts across\">\n<text x=\"{2}\" y=\"11\">expert</text>",
                 all_width, all_height, kLeft);
  const size_t column_step = LabelStep(width, 26), row_step = LabelStep(height, 13);
  for (size_t e = 0; e < stats.num_experts; e += column_step) {
    fmt::format_to(out, "<text x=\"{:.1f}\" y=\"28\" text-anchor=\"middle\">{}</text>",
                   kLeft + (static_cast<double>(e) + 0.5) * width, e);
  }
  for (size_t row = 0; row < num_rows; ++row) {
    const LayerRouting& layer = stats.layers[row];
    fmt::format_to(out, "\n<g transform=\"translate(0,{:.1f})\">",
                   kTop + height * static_cast<double>(row));
    if (row % row_step == 0) {
      fmt::format_to(out, "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">layer {}</text>",
                     kLeft - 8, height / 2 + 4, layer.layer);
    }
    for (size_t e = 0; e < stats.num_experts; ++e) {
      const double load = stats.Load(layer, e);
      fmt::format_to(out,
                     "<rect class=\"{}\" x=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"><title>"
                     "layer {}, expert {}: {:.0f} tokens, {}</title></rect>",
                     CellClass(load), kLeft + static_cast<double>(e) * width, width - gap,
                     height - 1, layer.layer, e, layer.tokens[e], LoadText(load));
    }
    fmt::format_to(out, "</g>");
  }
  fmt::format_to(out, "\n</svg></div>\n");
}

void WriteLayers(Out out, const RoutingStats& stats) {
  fmt::format_to(out,
                 "<h2>Layers</h2>\n<table><thead><tr><th class=\"n\">layer</th><th>hottest</th>"
                 "<th>coldest</th><th>idle</th><th>balancedness</th></tr></thead><tbody>\n");
  const auto expert = [&](const LayerRouting& layer, size_t e) {
    return fmt::format("expert {} <span class=\"dim\">{}</span>", e,
                       LoadText(stats.Load(layer, e)));
  };
  for (const LayerRouting& layer : stats.layers) {
    fmt::format_to(out,
                   "<tr><td class=\"n\">{}</td><td>{}</td><td>{}</td><td>{}</td><td><meter "
                   "min=\"0\" max=\"1\" value=\"{:.3f}\"></meter> {:.2f}</td></tr>\n",
                   layer.layer, expert(layer, layer.hottest), expert(layer, layer.coldest),
                   layer.idle.empty() ? "none" : ListOf(layer.idle, 12), layer.balancedness,
                   layer.balancedness);
  }
  fmt::format_to(out, "</tbody></table>\n");
}

void WriteHottest(Out out, const RoutingStats& stats) {
  fmt::format_to(out, "<h2>Hottest experts of all layers</h2>\n<ol>\n");
  for (const ExpertPlace& place : HottestExperts(stats, 8)) {
    const LayerRouting& layer = stats.layers[place.layer];
    const double load = stats.Load(layer, place.expert);
    if (load <= 1) break;
    fmt::format_to(out, "<li>layer {}, expert {}: {:.0f} tokens, {}</li>\n", layer.layer,
                   place.expert, layer.tokens[place.expert], LoadText(load));
  }
  fmt::format_to(out, "</ol>\n");
}

void WriteIdle(Out out, const RoutingStats& stats) {
  constexpr size_t kShown = 40;
  const std::vector<ExpertPlace> idle = IdleExperts(stats);
  fmt::format_to(out, "<h2>Idle experts</h2>\n<p>");
  if (idle.empty()) fmt::format_to(out, "None: every expert was chosen by some token.");
  for (size_t i = 0; i < std::min(idle.size(), kShown); ++i) {
    fmt::format_to(out, "{}layer {}, expert {}", i == 0 ? "" : "; ",
                   stats.layers[idle[i].layer].layer, idle[i].expert);
  }
  if (idle.size() > kShown) fmt::format_to(out, "; and {} more", idle.size() - kShown);
  fmt::format_to(out, "</p>\n");
}

}  // namespace

std::string RoutingPage(const RoutingStats& stats) {
  std::string page;
  const Out out(page);
  fmt::format_to(out,
                 "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta "
                 "name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                 "<title>Experts of {}</title>\n",
                 EscapeHtml(stats.model));
  WriteStyle(out);
  fmt::format_to(out,
                 "</head><body>\n<h1>Which experts fire where</h1>\n<p>{}</p>\n<p class=\"dim\">{} "
                 "tokens of {}, {} MoE layers, {} experts each, {} per token</p>\n",
                 EscapeHtml(stats.model), stats.num_tokens, EscapeHtml(stats.text),
                 stats.layers.size(), stats.num_experts, stats.top_k);
  WriteCards(out, stats);
  fmt::format_to(out, "<h2>Load of every expert</h2>\n");
  WriteLegend(out);
  WriteMap(out, stats);
  WriteLayers(out, stats);
  WriteHottest(out, stats);
  WriteIdle(out, stats);
  fmt::format_to(out, "</body></html>\n");
  return page;
}

}  // namespace switchyard::cli
