#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "bench_profile.h"
#include "html.h"

namespace switchyard::cli {
namespace {

using Out = std::back_insert_iterator<std::string>;

// In the order of Stage: attention is blue, experts are warm, the rest is grey or violet.
// Neighbours differ in lightness, so that they are told apart without colour too.
constexpr std::array<const char*, kNumStages> kColours = {
    "#8a93a0", "#c3c8d0", "#1b4f8a", "#7fb2e5", "#2f7fc1", "#a9d0f5", "#5c3b8c",
    "#f2c98a", "#c4450c", "#f08a4b", "#8a6d00", "#2f7d46", "#b08fd0", "#555b66"};

const char* Colour(Stage stage) { return kColours[static_cast<size_t>(stage)]; }

constexpr size_t kLegendColumns = 7;  // in two lines
static_assert(kNumStages <= 2 * kLegendColumns);
constexpr double kLeft = 110, kRight = 980, kBar = 44, kPhaseHeight = 150;

// Segments side by side, as wide as their seconds; those that are wide enough are named.
template <typename Seconds>
void WriteBar(Out out, const PhaseReport& phase, double y, double scale, const Seconds& seconds) {
  double x = kLeft;
  for (const StageReport& stage : phase.stages) {
    const double width = seconds(stage) * scale;
    if (width <= 0) continue;
    const std::string name = EscapeHtml(StageName(stage.stage));
    fmt::format_to(out,
                   "<rect x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\">"
                   "<title>{}: {:.3f} ms, {:.1f} % of the measured time</title></rect>\n",
                   x, y, width, kBar, Colour(stage.stage), name, 1e3 * seconds(stage),
                   100 * seconds(stage) / phase.seconds);
    x += width;
  }
}

// Measured times above those at the limits, on one scale.
void WritePhase(Out out, const PhaseReport& phase, double y) {
  double limit = 0;
  for (const StageReport& stage : phase.stages) limit += stage.limit_seconds;
  const double longest = std::max(phase.seconds, limit);
  const double scale = longest > 0 ? (kRight - kLeft) / longest : 0;
  fmt::format_to(out,
                 "<text x=\"16\" y=\"{:.0f}\" font-weight=\"bold\">{}: {:.2f} ms, {:.0f} % of "
                 "the limits of its stages</text>\n",
                 y, EscapeHtml(phase.title), 1e3 * phase.seconds,
                 phase.seconds > 0 ? 100 * limit / phase.seconds : 0);
  const auto label = [&](double at, std::string_view text) {
    fmt::format_to(out, "<text class=\"tick\" x=\"16\" y=\"{:.0f}\">{}</text>\n", at + kBar / 2 + 4,
                   text);
  };
  label(y + 12, "measured");
  WriteBar(out, phase, y + 12, scale, [](const StageReport& s) { return s.measured.seconds; });
  label(y + 18 + kBar, "at the limits");
  WriteBar(out, phase, y + 18 + kBar, scale, [](const StageReport& s) { return s.limit_seconds; });
}

void WriteLegend(Out out, double y) {
  for (size_t i = 0; i < kNumStages; ++i) {
    const double x = 16 + 140 * static_cast<double>(i % kLegendColumns);
    const double line = y + (i < kLegendColumns ? 0 : 20);
    fmt::format_to(out,
                   "<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"12\" height=\"12\" fill=\"{}\"/>"
                   "<text class=\"tick\" x=\"{:.0f}\" y=\"{:.0f}\">{}</text>\n",
                   x, line, kColours[i], x + 17, line + 10, StageName(static_cast<Stage>(i)));
  }
}

void WritePicture(Out out, std::span<const PhaseReport> phases) {
  const double height = 70 + kPhaseHeight * static_cast<double>(phases.size());
  fmt::format_to(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 {0}\" "
                 "font-family=\"sans-serif\" font-size=\"14\" role=\"img\" "
                 "aria-label=\"Time of each stage, measured and at the limits\">\n"
                 "<rect width=\"1000\" height=\"{0}\" fill=\"#ffffff\"/>\n"
                 "<style>.tick{{font-size:12px;fill:#445}}</style>\n",
                 height);
  double y = 24;
  for (const PhaseReport& phase : phases) {
    WritePhase(out, phase, y);
    y += kPhaseHeight;
  }
  WriteLegend(out, y);
  fmt::format_to(out, "</svg>\n");
}

void WriteTable(Out out, const PhaseReport& phase) {
  fmt::format_to(out,
                 "<h2>{}</h2>\n<table><thead><tr><th>stage</th><th>calls</th><th>ms</th>"
                 "<th>share of the time</th><th>MB read</th><th>GB/s</th><th>Gop/s</th>"
                 "<th>share of the limit</th><th>bound by</th></tr></thead><tbody>\n",
                 EscapeHtml(phase.title));
  const auto cell = [&](double value, std::string_view unit = "") {
    if (value > 0) {
      fmt::format_to(out, "<td>{:.1f}{}</td>", value, unit);
    } else {
      fmt::format_to(out, "<td></td>");
    }
  };
  for (const StageReport& stage : phase.stages) {
    const Profile::Row& row = stage.measured;
    fmt::format_to(out,
                   "<tr><td><span class=\"key\" style=\"background:{}\"></span>{}</td><td>{}</td>"
                   "<td>{:.3f}</td>",
                   Colour(stage.stage), EscapeHtml(StageName(stage.stage)), row.calls,
                   1e3 * row.seconds);
    cell(100 * row.seconds / phase.seconds, " %");
    cell(row.bytes / 1e6);
    cell(row.bytes / 1e9 / row.seconds);
    cell(stage.ops / 1e9 / row.seconds);
    cell(100 * stage.share_of_limit(), " %");
    fmt::format_to(out, "<td>{}</td></tr>\n",
                   stage.limit_seconds == 0 ? ""
                   : stage.is_memory_bound  ? "memory"
                                            : "compute");
  }
  fmt::format_to(out, "</tbody></table>\n");
}

constexpr std::string_view kStyle = R"css(<style>
body{margin:0 auto;max-width:72rem;padding:1.5rem 1rem 3rem;font:15px/1.5 system-ui,sans-serif;color:#1d1f23;background:#fff}
h1{font-size:1.5rem;margin:0 0 .6rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}svg{max-width:100%}p{margin:.2rem 0;color:#5f6670}
table{border-collapse:collapse}th,td{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid #d9dce1;
 font-variant-numeric:tabular-nums;vertical-align:bottom}th{color:#5f6670;font-weight:500}
th:first-child,td:first-child{text-align:left}.key{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem}
</style>
)css";

}  // namespace

std::string ProfilePage(const std::string& title, std::span<const std::string> facts,
                        std::span<const PhaseReport> phases) {
  std::string page;
  const Out out(page);
  fmt::format_to(out,
                 "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta "
                 "name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                 "<title>{0}</title>\n{1}</head><body>\n<h1>{0}</h1>\n",
                 EscapeHtml(title), kStyle);
  for (const std::string& fact : facts) fmt::format_to(out, "<p>{}</p>\n", EscapeHtml(fact));
  WritePicture(out, phases);
  for (const PhaseReport& phase : phases) WriteTable(out, phase);
  fmt::format_to(out,
                 "<p>The limit of a stage is the time that its bytes (weights and KV cache, each "
                 "read once) need at the read bandwidth, or its operations at the peak of their "
                 "type, whichever is longer. Figures from caches may exceed it.</p>\n"
                 "</body></html>\n");
  return page;
}

}  // namespace switchyard::cli
