// The first part of a step: tokens to the ranks of their experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/fuseep/window.h"
#include "quant/expert_rows.h"
#include "quant/linear.h"
#include "switchyard/core/exec_context.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe::fuseep {

// Writes each token once into the area of this rank at every rank that has an expert for it.
class Sender {
 public:
  // Shapes: rows [T, H] as gemm1 takes them; ids of topk in [-1, R * L).
  Sender(ExecContext& context, Window& window, const TopKOutput& topk, const quant::ActRows& rows);

  // Block after block of experts, so that those who wait can start with the first.
  void Send();
  bool WasSent(size_t token, size_t to) const { return row_of_[to * num_tokens_ + token] != kNone; }

 private:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;

  // A row to be written.
  struct Copy {
    const void* from;
    std::byte* to;
  };

  // The routes of the experts of a block at rank `to`; returns their number.
  uint32_t WriteRoutes(size_t to, size_t block);
  // The row of a token there, which is to be copied if it is new.
  uint32_t RowFor(size_t token, size_t to);
  void CopyRows() const;

  ExecContext& context_;
  Window& window_;
  const Layout& layout_;
  const quant::ActRows& rows_;
  const size_t num_tokens_;
  const size_t top_k_;
  quant::GroupedItems slots_;         // by physical expert
  std::span<uint32_t> row_of_;        // [R, T] row of each token at each rank
  std::span<uint32_t> num_rows_;      // [R] rows that each rank has
  std::span<uint32_t> num_routes_;    // [R] routes that each rank has
  std::span<uint32_t> block_routes_;  // [R] of the present block
  std::span<Copy> copies_;            // of the present block
  size_t num_copies_ = 0;
};

}  // namespace switchyard::moe::fuseep
