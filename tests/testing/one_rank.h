// Dispatch and combine of every format, written plainly and apart from the dispatchers and the
// runners: all ranks of a group in one process, one rank in the simplest case. What runners are
// tested behind, and what the dispatchers that move rows between processes are held to.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/dispatch.h"
#include "switchyard/moe/registry/registry.h"
#include "testing/moe_case.h"

namespace switchyard::testing {

// One realisation of a dispatch format: the same struct may be filled in several ways.
struct Realisation {
  enum class Kind {
    kStandard,
    kNormalTokens,
    kNormalExpanded,
    kMori,
    kLowLatency,
    kRegistered  // by a dispatcher of the registry, on one rank
  };
  Kind kind;
  moe::DispatchFormat format;
  std::string name;                                  // "deepep_normal, token rows"
  const moe::DispatcherEntry* dispatcher = nullptr;  // of kRegistered
};

// Those of a format. Empty for a format that has neither code here nor a dispatcher.
std::vector<Realisation> RealisationsOf(const moe::Registry& registry, moe::DispatchFormat format);

// How rows travel. Contract 3.1.
struct Wire {
  std::string name = "f32";
  ActQuant how = {};
  DType dtype = DType::kF32;  // of plain rows: kF32 or kBF16
};
// Plain f32 first.
std::vector<Wire> AllWires();

// The tokens as they arrive: dequantised, f32.
MoeTokens AfterWire(ExecContext& context, const MoeTokens& tokens, const Wire& wire);

struct DispatchOptions {
  Wire wire = {};
  size_t spare = 3;  // rows that a buffer has too many; all of them hold NaN, in scales too
  bool expert_output = false;           // kMori: the runner must write into a buffer of combine's
  std::optional<DType> out_dtype = {};  // kMori
};

// One dispatch of a group of ranks, from the tokens of each, and its combine.
//
// Experts are divided evenly: rank r has [r * E / R, (r + 1) * E / R). Buffers are owned here and
// hold NaN or nonsense wherever the contract leaves them undefined.
class SimulatedDispatch {
 public:
  // Errors: those of a registered dispatcher.
  SimulatedDispatch(ExecContext& context, const Realisation& realisation,
                    const moe::MoeRunnerConfig& config, size_t num_experts,
                    std::vector<MoeTokens> sources, const DispatchOptions& options = {});
  SimulatedDispatch(const SimulatedDispatch&) = delete;
  SimulatedDispatch& operator=(const SimulatedDispatch&) = delete;

  size_t num_ranks() const { return sources_.size(); }
  // What the runner of a rank gets.
  const moe::DispatchOutput& output(size_t rank) const { return *outputs_[rank]; }
  // What MoeQuantInfo::expert_mask must be there; empty where the format needs none.
  std::span<const int32_t> expert_mask(size_t rank) const;

  // From the answers of all ranks to the rows of each source, [T, H] one after the other, with the
  // owed sums added.
  // Errors: those of CheckAnswer; std::runtime_error for rows of another number, routing that did
  //   not come back as it was sent, or rows in another place than the one that was asked for.
  std::vector<std::vector<float>> Combine(std::span<const moe::CombineInput* const> answers);

 private:
  // A row that a rank holds, and where it came from.
  struct Received {
    size_t source, token, column;
  };
  // Rows in a buffer of their own.
  struct Buffer {
    std::vector<std::byte> data, scale;
  };

  bool OwnsExpert(size_t rank, int32_t id) const;
  size_t LocalId(int32_t id) const { return static_cast<size_t>(id) % num_local_; }
  std::vector<Received> TokenRowsOf(size_t rank) const;
  std::vector<Received> RouteRowsOf(size_t rank) const;
  QuantRows Place(const std::vector<Received>& rows, const std::vector<size_t>& places,
                  size_t capacity);

  void DispatchStandard();
  void DispatchTokens(size_t rank, bool mori);
  void DispatchExpanded(size_t rank);
  void DispatchLowLatency(size_t rank);
  void CheckReturn(const moe::CombineInput& answer, size_t rank) const;
  Rows AnswerRows(const moe::CombineInput& answer, size_t rank) const;
  std::vector<std::vector<float>> SumRanks(const std::vector<Rows>& rows) const;
  std::vector<std::vector<float>> SumRoutes(const std::vector<Rows>& rows) const;

  ExecContext& context_;
  Realisation realisation_;
  moe::MoeRunnerConfig config_;
  size_t num_local_;
  std::vector<MoeTokens> sources_;
  DispatchOptions options_;
  std::vector<QuantRows> sent_;  // of each source
  std::unique_ptr<moe::Dispatcher> dispatcher_;
  MoeTokens all_;  // kStandard: every rank has all tokens

  std::vector<const moe::DispatchOutput*> outputs_;
  std::deque<moe::StandardDispatchOutput> standard_;
  std::deque<moe::DeepepNormalDispatchOutput> normal_;
  std::deque<moe::DeepepLlDispatchOutput> low_latency_;
  std::deque<moe::MoriDispatch> mori_;
  std::deque<Buffer> buffers_;
  std::deque<std::vector<int32_t>> ints_;
  std::deque<std::vector<float>> floats_;
  std::vector<std::vector<int32_t>> masks_;
  std::vector<std::vector<Received>> received_;  // of each rank
  std::vector<std::vector<size_t>> places_;      // where those rows are, of each rank
  std::vector<size_t> capacity_;                 // rows of each rank's buffer
};

}  // namespace switchyard::testing
