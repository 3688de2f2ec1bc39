// FuseEP: dispatch, gemm1, activation, (re)quantisation, gemm2 and weighted combine of one layer as
// a single operation on a process group of its own, with memory of its own. Contract 3.13.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "switchyard/core/dtype.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/core/settings.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/contract/runner.h"
#include "switchyard/moe/contract/topk.h"
#include "switchyard/parallel/process_group.h"

namespace switchyard::moe {

namespace fuseep {
class Window;
struct Layer;
}  // namespace fuseep

// When experts start. The results are the same bits, and ranks may differ in it.
inline constexpr int kDispatchGmmCombineDecode = 1;  // an expert once all its rows are in: its
                                                     // weights are read once
inline constexpr int kDispatchFfnCombine = 2;  // the rows of a source soon after they are in: no
                                               // rank waits for the slowest longer than a moment

// Choices of a model; the same on all ranks, but for `mode`. Names of settings in brackets.
struct FusedMoeOptions {
  int mode = kDispatchFfnCombine;  // [fuseep-mode]
  // Most tokens of one rank in a call [num-max-dispatch-tokens-per-rank].
  size_t num_max_dispatch_tokens_per_rank = 128;
  // Most MB (2^20 bytes) of a rank's part of the buffer; 0 = ask the environment
  // [moe-fused-buffer-mb].
  size_t buffer_mb = 0;
  std::chrono::milliseconds timeout{10000};  // of every wait for other ranks
  // Whether the process of a rank of the group has ended: looked at while waiting. Unset: never.
  std::function<bool(size_t rank)> is_dead = {};
  uint32_t first_epoch = 0;  // steps are numbered from here modulo 2^32; tests start near the wrap
};

// How large a buffer may be, and who said so.
struct FusedBufferLimit {
  size_t mb = 0;
  std::string source;  // "moe-fused-buffer-mb", "HCCL_BUFFSIZE", "default", …
};

// options.buffer_mb if it is set, else the setting moe-fused-buffer-mb of the environment: its own
// variable, then DEEPEP_HCCL_BUFFSIZE, then HCCL_BUFFSIZE, then 200 MB. Contract 1.7.
// Errors: those of Settings::FromEnvironment.
FusedBufferLimit ResolveFusedBuffer(const FusedMoeOptions& options);
// The same from settings that were read before.
FusedBufferLimit ResolveFusedBuffer(const FusedMoeOptions& options, const Settings& settings);

// What the layers that share a buffer have in common.
struct FusedMoeShape {
  size_t hidden_size = 0;
  size_t top_k = 0;
  size_t num_local_experts = 0;  // of each rank
  // Bytes of the widest row that travels, without its scale; 0 = those of f32, which fit every
  // layer.
  size_t row_bytes = 0;
};

// The shape of one layer, whose rows travel as its gemm1 multiplies them: int8 codes, bf16 or f32.
// Errors: kInvalidArgument, kUnsupported: those of FusedMoe about the config.
FusedMoeShape FusedMoeShapeOf(const MoeRunnerConfig& config);

// Bytes of a rank's part of the buffer, flags included: for each source the rows that it may send,
// and for each route of the rank's own tokens a f32 row that comes home.
// Errors: kResourceExhausted naming the sizes if that is more than can be addressed;
//   kInvalidArgument naming the size that is 0.
size_t FusedMoeBytes(const FusedMoeShape& shape, size_t num_max_dispatch_tokens_per_rank,
                     size_t num_ranks);

// The memory through which ranks exchange rows and results, and the numbering of their steps. One
// serves all layers of a model that agree in shape, one call at a time. The group must outlive it;
// destroy it on all ranks alike.
class FusedMoeBuffer {
 public:
  // Collective. `fuse_ep` is a communicator for this alone: a duplicate of moe_ep.
  // Errors, on all ranks: kUnsupported if the ranks are not all on one node, because FuseEP writes
  //   into their memory; kResourceExhausted naming moe-fused-buffer-mb, what it is and where that
  //   comes from, and the MB needed; kInvalidArgument naming shapes that differ or sizes of 0;
  //   those of ProcessGroup::MakeWindow.
  FusedMoeBuffer(ProcessGroup& fuse_ep, const FusedMoeShape& shape, const FusedMoeOptions& options);
  ~FusedMoeBuffer();
  FusedMoeBuffer(const FusedMoeBuffer&) = delete;
  FusedMoeBuffer& operator=(const FusedMoeBuffer&) = delete;

  ProcessGroup& group() const { return group_; }
  const FusedMoeShape& shape() const { return shape_; }
  size_t max_tokens_per_rank() const { return max_tokens_; }
  size_t bytes() const { return bytes_; }  // of this rank's part
  fuseep::Window& window() const { return *window_; }

 private:
  ProcessGroup& group_;
  FusedMoeShape shape_;
  size_t max_tokens_;
  size_t bytes_ = 0;
  std::unique_ptr<fuseep::Window> window_;
};

// One layer, its experts spread evenly over the ranks of a group: rank r has the physical experts
// [r * L, (r + 1) * L).
//
// Each token goes once to every rank that has an expert for it, as gemm1 multiplies it: quantised
// or rounded by its source, so that nothing is lost on the way. Each route's row comes home as f32,
// unweighted, into a place of its own, and the source sums the rows of a token in the order of its
// columns. That is the arithmetic of runner "aiter", and results are the bits of that runner on one
// rank, whatever the number of ranks, threads, tokens or the mode.
//
// It computes un-quantised weights (f32, bf16, f16) and int8 weights with a scale per output
// channel under int8 activations per token (W8A8), or under plain ones where activation
// quantisation is off. It reads the canonical layout (contract 5.15). The weight preparation of
// contract 3.13 (w13 interleaved in chunks of 64, scales bit-cast into int64) is the tiling of one
// device's matrix unit: it holds the same numbers in another order. Here gate and up are two
// matrices whose products meet in cache anyway, and kernels read scales as f32, so there is nothing
// that it could speed up.
class FusedMoe {
 public:
  // Collective over the buffer's group. config: num_local_experts is L; formula must be set
  //   (ResolveActivation), and w13_kernel and w2_kernel, which say what travels. Of `options` the
  //   mode and the timeout are read; the other fields are the buffer's.
  // Errors, on all ranks: kUnsupported naming layer and formats of schemes that it does not
  //   compute, no_combine, or router weights on the input with top_k other than 1; kInvalidArgument
  //   naming layer and setting for a mode that there is not, a config without formula or kernels,
  //   one that does not fit the buffer, or ranks that disagree.
  FusedMoe(std::shared_ptr<FusedMoeBuffer> buffer, const MoeRunnerConfig& config,
           const FusedMoeOptions& options);
  // With a buffer of its own. Errors: also those of FusedMoeBuffer.
  FusedMoe(ProcessGroup& fuse_ep, const MoeRunnerConfig& config, const FusedMoeOptions& options);
  ~FusedMoe();

  // Collective: every rank calls it, also without tokens, and layers that share a buffer in the
  // same order. Waits on the calling thread only; computes on context.pool.
  //
  // Shapes: hidden [T, H]; topk ids and weights [T, K], ids physical in [0, R * L), -1 = no expert;
  //   weights: the L experts of this rank, expert_mask is not read. Returns [T, H] in
  //   context.arena. T may differ per rank and be 0.
  // Errors: kInvalidArgument naming layer and setting, found and limit, for more tokens than
  //   num-max-dispatch-tokens-per-rank; naming layer, token and id for an id that is no expert; and
  //   for sizes or formats that contradict each other. kUnavailable naming layer, stage and ranks
  //   if a wait runs out, and naming layer and rank if another rank failed in this step: then no
  //   rank waits for what will not come. After any of these the next call, on all ranks, works
  //   again.
  // Cost: 6 M H I operations for the M routes that come here. No allocation but from the arena.
  Rows Run(ExecContext& context, ConstRows hidden, const TopKOutput& topk,
           const MoeQuantInfo& weights);

  const FusedMoeBuffer& buffer() const { return *buffer_; }
  // The type in which rows travel.
  DType wire_dtype() const;

 private:
  std::shared_ptr<FusedMoeBuffer> buffer_;
  std::unique_ptr<const fuseep::Layer> layer_;
};

}  // namespace switchyard::moe
