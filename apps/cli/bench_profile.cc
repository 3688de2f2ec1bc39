#include "bench_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace switchyard::cli {
namespace {

double GopsOf(const kernels::MachineLimits& limits, Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kF32: return limits.f32_gops;
    case Arithmetic::kBF16: return limits.bf16_gops;
    case Arithmetic::kInt8: return limits.int8_gops;
  }
  return 0;
}

StageReport MakeStage(Stage stage, const Profile::Row& row, const kernels::MachineLimits& limits) {
  StageReport report{stage, row};
  double compute = 0;
  for (size_t i = 0; i < kNumArithmetics; ++i) {
    report.ops += row.ops[i];
    compute += row.ops[i] / 1e9 / PeakOf(limits, static_cast<Arithmetic>(i)).second;
  }
  const double memory = row.bytes / 1e9 / limits.read_gbps;
  report.limit_seconds = std::max(memory, compute);
  report.is_memory_bound = memory >= compute;
  return report;
}

// Which limit, or nothing where there is no work that must be done.
std::string_view BoundBy(const StageReport& stage) {
  if (stage.limit_seconds == 0) return "";
  return stage.is_memory_bound ? "memory" : "compute";
}

double PerSecond(double amount, const StageReport& stage) {
  return stage.measured.seconds > 0 ? amount / 1e9 / stage.measured.seconds : 0;
}

}  // namespace

std::pair<Arithmetic, double> PeakOf(const kernels::MachineLimits& limits, Arithmetic arithmetic) {
  const double gops = GopsOf(limits, arithmetic);
  if (gops > 0) return {arithmetic, gops};
  return {Arithmetic::kF32, limits.f32_gops};
}

PhaseReport MakeReport(std::string name, std::string title, const Profile& profile,
                       const kernels::MachineLimits& limits) {
  PhaseReport report{std::move(name), std::move(title), profile.seconds(), {}};
  for (size_t i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const Profile::Row& row = profile.row(stage);
    if (row.seconds > 0) report.stages.push_back(MakeStage(stage, row, limits));
  }
  return report;
}

std::string ProfileTable(const PhaseReport& phase) {
  std::string table = fmt::format(
      "{}: {:.2f} ms\n  {:<20} {:>8} {:>7} {:>9} {:>9} {:>8} {:>9} {:>6}\n", phase.title,
      1e3 * phase.seconds, "stage", "calls", "share", "ms", "MB", "GB/s", "Gop/s", "limit");
  const auto amount = [](double value) {
    return value > 0 ? fmt::format("{:.1f}", value) : std::string();
  };
  for (const StageReport& stage : phase.stages) {
    const Profile::Row& row = stage.measured;
    const std::string share =
        stage.limit_seconds > 0 ? fmt::format("{:.0f} %", 100 * stage.share_of_limit()) : "";
    std::string line =
        fmt::format("  {:<20} {:>8} {:>5.1f} % {:>9.3f} {:>9} {:>8} {:>9} {:>6} {}",
                    StageName(stage.stage), row.calls, 100 * row.seconds / phase.seconds,
                    1e3 * row.seconds, amount(row.bytes / 1e6), amount(PerSecond(row.bytes, stage)),
                    amount(PerSecond(stage.ops, stage)), share, BoundBy(stage));
    line.resize(line.find_last_not_of(' ') + 1);
    table += line + '\n';
  }
  return table;
}

nlohmann::ordered_json ProfileJson(const PhaseReport& phase) {
  nlohmann::ordered_json stages = nlohmann::ordered_json::array();
  for (const StageReport& stage : phase.stages) {
    stages.push_back({{"stage", StageName(stage.stage)},
                      {"calls", stage.measured.calls},
                      {"seconds", stage.measured.seconds},
                      {"bytes", stage.measured.bytes},
                      {"ops", stage.ops},
                      {"gbps", PerSecond(stage.measured.bytes, stage)},
                      {"gops", PerSecond(stage.ops, stage)},
                      {"share_of_limit", stage.share_of_limit()},
                      {"bound_by", BoundBy(stage)}});
  }
  return {{"seconds", phase.seconds}, {"stages", std::move(stages)}};
}

}  // namespace switchyard::cli
