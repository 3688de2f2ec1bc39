// What `bench --profile` shows: the stages of prefill and decode beside this machine's limits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/limits/limits.h"
#include "switchyard/core/profile.h"

namespace switchyard::cli {

// The peak that bounds such products here, and whose it is: f32 where the CPU lacks the others.
std::pair<Arithmetic, double> PeakOf(const kernels::MachineLimits& limits, Arithmetic arithmetic);

// One stage of one phase.
struct StageReport {
  Stage stage = Stage::kOther;
  Profile::Row measured;
  double ops = 0;  // of all kinds
  double limit_seconds =
      0;  // that its bytes or its operations, whichever take longer, need at least
  bool is_memory_bound = false;

  // 0 if nothing is known that it must read or compute.
  double share_of_limit() const {
    return measured.seconds > 0 ? limit_seconds / measured.seconds : 0;
  }
};

// One profiled phase.
struct PhaseReport {
  std::string name;                 // "prefill"
  std::string title;                // "prefill of 512 tokens"
  double seconds = 0;               // of all stages
  std::vector<StageReport> stages;  // those that took time, in the order of Stage
};

PhaseReport MakeReport(std::string name, std::string title, const Profile& profile,
                       const kernels::MachineLimits& limits);

// A table for people.
std::string ProfileTable(const PhaseReport& phase);

// {"seconds": …, "stages": [{"stage", "calls", "seconds", "bytes", "ops", "gbps", "gops",
// "share_of_limit", "bound_by"}, …]}
nlohmann::ordered_json ProfileJson(const PhaseReport& phase);

// A page of HTML that needs nothing but itself: for each phase the measured times as one stacked
// bar above those of the limits, and a table. `facts` are lines about the run.
std::string ProfilePage(const std::string& title, std::span<const std::string> facts,
                        std::span<const PhaseReport> phases);

}  // namespace switchyard::cli
