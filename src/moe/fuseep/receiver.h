// The second part of a step: the experts of this rank, for the rows that arrive.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "moe/fuseep/layer.h"
#include "moe/fuseep/window.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/runner.h"

namespace switchyard::moe::fuseep {

// Takes blocks of routes as they arrive, computes those that are ready and writes each route's row
// home. In mode 1 a block is ready when it has come from all sources, in mode 2 from its source;
// but there too it is worth a moment's wait that an expert's weights are not read once for each
// source.
class Receiver {
 public:
  // Shapes: weights of this rank's experts.
  Receiver(ExecContext& context, Window& window, const Layer& layer, const MoeQuantInfo& weights);

  // Whether there was something to compute. Errors: kUnavailable if a source has failed.
  bool Advance();
  // Whether a source has posted something that Advance has not looked at, or what has come waits no
  // longer for the rest.
  bool HasNews() const;
  // Whether every route of every source is computed and home.
  bool finished() const { return num_finished_ == sources_.size(); }
  // The sources that have not sent everything.
  std::vector<size_t> Late() const;

 private:
  struct Source {
    size_t arrived = 0;   // blocks
    size_t ready = 0;     // of those
    size_t computed = 0;  // of those
  };
  // Rows of several experts, to be computed together.
  struct Batch {
    std::span<uint32_t> experts, begin;  // as ExpertGroups
    size_t num_experts = 0;
    std::span<const void*> rows;
    std::span<float> scales;
    std::span<float*> homes;
    size_t num_rows = 0;
  };

  void TakeArrivals();
  // Whether blocks of some sources are to wait for those of others.
  bool IsWaitingForRest() const;
  bool FindReady();
  // Routes of a source before expert e, of those that have arrived.
  uint32_t& RoutesBefore(size_t source, size_t expert) {
    return routes_before_[source * (layout_.shape.num_local_experts + 1) + expert];
  }
  Batch MakeBatch();
  // Adds the routes of an expert that are ready.
  void AddExpert(Batch& batch, size_t expert);
  void AddRoute(Batch& batch, size_t source, const Route& route) const;
  void Compute(Batch& batch) const;
  void FinishReady();

  ExecContext& context_;
  Window& window_;
  const Layout& layout_;
  const Layer& layer_;
  const MoeQuantInfo& weights_;
  std::span<Source> sources_;          // [R]
  std::span<uint32_t> routes_before_;  // [R, L + 1]
  size_t num_finished_ = 0;
  std::optional<std::chrono::steady_clock::time_point> began_;  // to look for rows
  bool is_waiting_ = false;                                     // rows that came, for the rest
};

}  // namespace switchyard::moe::fuseep
