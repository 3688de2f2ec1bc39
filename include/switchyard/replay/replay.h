// Replays one recorded MoE-layer case and compares the result with the expected tensors in its
// file. The format is that of the recorded cases: a safetensors file whose metadata holds "format"
// (moe-golden-1), "kind" and "case" (JSON: name, kind, config, checks, source, notes); tensors are
// named in.*, w.*, out.* (expected) and info.*.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/moe/ep/expert_parallel.h"
#include "switchyard/moe/registry/registry.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::replay {

// How a case is computed.
struct ReplayOptions {
  std::string runner = "auto";          // of the kinds layer and qlayer
  std::string a2a = "none";             // likewise
  std::string act_dtype = "f32";        // f32, bf16
  bool activation_quant = true;         // false: weight-only arithmetic, compared with out.y_plain
  std::filesystem::path output = {};    // if given, the computed tensors are written to this file
  std::string dispatch_dtype = "auto";  // of layers over ranks, as in MoeLayerOptions
  std::string combine_dtype = "auto";
  // The ranks that replay a case together, or null for this process alone. Not owned.
  ProcessGroup* world = nullptr;
  // How they exchange rows. Limits on tokens are taken from the case.
  moe::ExpertParallelOptions ep = {};
};

// One comparison of a case.
struct CheckResult {
  std::string tensor;
  bool passed = false;
  double error = 0;      // the largest, in the measure of the check
  double tolerance = 0;  // of the same measure
  std::string detail;    // what differs, empty if passed
};

// What came of one case.
struct ReplayResult {
  std::string name;  // "softmax-raw"
  std::string kind;  // "routing"
  // Empty, or why this case cannot be computed with these options ("runner ascend does not take
  // scheme fp8_block"); then there are no checks.
  std::string skipped;
  std::vector<CheckResult> checks;

  // Computed, and every check passed.
  bool passed() const;
};

// The kinds that this build replays.
std::vector<std::string_view> KnownKinds();

// Replays one case.
//
// With options.world this is collective: all ranks name the same case and options. Layers are
// spread over the ranks, their experts divided (with copies where the number of ranks does not
// divide them), and dispatch cases of no more ranks than these run over them as well; all else is
// rank 0's. Rank 0 compares; the others return the name and kind of the case and no checks.
//
// Dispatch cases are computed from the ids alone and, always, also by the real dispatchers on
// threads as ranks; each way has checks of its own ("out.masked_m (nixl, 4 threads)").
//
// Errors: kNotFound (no file), kCorruptData (not a case, a missing tensor or field, a shape that
//   contradicts the config), kUnsupported (a kind or policy that this build lacks); each names the
//   file and the tensor or field; kInvalidArgument for an unknown act_dtype; those of
//   WriteSafetensors. Of several ranks, the error of one is thrown on all; kFailedPrecondition if
//   they do not have the same case and options; kUnavailable if one does not answer in time.
ReplayResult ReplayCase(const std::filesystem::path& path, const moe::Registry& registry,
                        ExecContext& context, const ReplayOptions& options);

}  // namespace switchyard::replay
