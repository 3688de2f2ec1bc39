#include "switchyard/moe/routing/select_experts.h"

#include <algorithm>

#include "moe/routing/columns.h"
#include "moe/routing/policies.h"
#include "moe/routing/validate.h"
#include "switchyard/moe/routing/topk_formats.h"

namespace switchyard::moe {
namespace {

// One call: its inputs, its result, and what observers want to see.
class Selection {
 public:
  Selection(ExecContext& context, const TopKConfig& config, ConstRows logits,
            const TopKInputs& inputs)
      : context_(context), config_(config), logits_(logits), inputs_(inputs) {
    Arena& arena = context.arena;
    weights_ = arena.AllocateSpan<float>(logits.rows * config.top_k);
    ids_ = arena.AllocateSpan<int32_t>(logits.rows * config.top_k);
    if (inputs.observer != nullptr) {
      logical_ids_ = arena.AllocateSpan<int32_t>(logits.rows * config.NumRouted());
      physical_ids_ = arena.AllocateSpan<int32_t>(logits.rows * config.NumRouted());
    }
  }

  TopKOutput Run() {
    AllocateScratch();
    constexpr size_t kTokensPerTask = 8;
    const size_t num_tokens = logits_.rows;
    context_.pool.Run((num_tokens + kTokensPerTask - 1) / kTokensPerTask,
                      [&](size_t task, size_t worker) {
                        const size_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
                        for (size_t t = task * kTokensPerTask; t < end; ++t) Route(t, worker);
                      });
    Observe();
    return {num_tokens, config_.top_k, weights_, ids_, logits_, {}};
  }

 private:
  size_t num_groups() const { return config_.use_grouped_topk ? config_.num_expert_group : 0; }

  void AllocateScratch() {
    const size_t workers = context_.pool.num_threads();
    floats_ = context_.arena.AllocateSpan<float>(workers * FloatsPerWorker());
    group_ids_ = context_.arena.AllocateSpan<int32_t>(workers * num_groups());
  }

  size_t FloatsPerWorker() const { return 3 * config_.num_experts + num_groups(); }

  RoutingScratch Scratch(size_t worker) const {
    float* floats = floats_.data() + worker * FloatsPerWorker();
    const size_t n = config_.num_experts;
    return {floats, floats + n, floats + 2 * n, floats + 3 * n,
            group_ids_.data() + worker * num_groups()};
  }

  void Route(size_t token, size_t worker) const {
    int32_t* ids = &ids_[token * config_.top_k];
    float* weights = &weights_[token * config_.top_k];
    const bool is_padding = token >= inputs_.num_token_non_padded;
    if (!is_padding || config_.padding == PaddingFamily::kAscend) {
      RouteToken(config_, inputs_, logits_.Row(token), token, Scratch(worker), ids, weights);
      Show(logical_ids_, token, ids);
      PlaceIds(config_, inputs_, token, ids);
      Show(physical_ids_, token, ids);
      AppendShared(config_, NumPhysical(config_, inputs_), ids, weights);
    }
    // Last: a map is never indexed with -1, and the shift of per-rank slots never moves one.
    if (!is_padding) return;
    MaskPadding(config_, ids, weights);
    Show(logical_ids_, token, nullptr);
    Show(physical_ids_, token, nullptr);
  }

  // Keeps the routed ids of a token for the observer; -1 for null.
  void Show(std::span<int32_t> shown, size_t token, const int32_t* ids) const {
    if (shown.empty()) return;
    int32_t* row = &shown[token * config_.NumRouted()];
    if (ids == nullptr) {
      std::fill_n(row, config_.NumRouted(), -1);
    } else {
      std::copy_n(ids, config_.NumRouted(), row);
    }
  }

  void Observe() const {
    if (inputs_.observer == nullptr) return;
    RoutedExperts routed{inputs_.layer_id, logits_.rows, config_.NumRouted(), logical_ids_};
    if (config_.allow_routed_experts_capture) inputs_.observer->OnLogicalExperts(routed);
    routed.ids = physical_ids_;
    inputs_.observer->OnPhysicalExperts(routed);
  }

  ExecContext& context_;
  const TopKConfig& config_;
  ConstRows logits_;
  const TopKInputs& inputs_;
  std::span<float> weights_;                       // [T, K']
  std::span<int32_t> ids_;                         // [T, K']
  std::span<int32_t> logical_ids_, physical_ids_;  // [T, K], for the observer only
  std::span<float> floats_;                        // scratch of all workers
  std::span<int32_t> group_ids_;
};

}  // namespace

TopKOutput SelectExperts(ExecContext& context, const TopKConfig& config, ConstRows logits,
                         const TopKInputs& inputs) {
  CheckInputs(config, logits, inputs);
  TopKOutput output = Selection(context, config, logits, inputs).Run();
  if (config.fused_gate_packed_ids) output.packed_topk_ids = PackTopK(context, output).words;
  return output;
}

}  // namespace switchyard::moe
