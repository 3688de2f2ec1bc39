// Weights in the layouts of the vendor's operators, and their way into canonical form. Contract
// 4.1.3, 5.3 to 5.6, 5.15.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "switchyard/core/quant_format.h"
#include "switchyard/core/settings.h"
#include "switchyard/core/shape.h"
#include "switchyard/moe/ascend/grouped_matmul.h"

namespace switchyard::moe::ascend {

// The tensors of one prefix (w13 or w2) after the reference's post-load step. A view without data
// is an absent operand. Kd = input width, N = output channels, g = group size.
//
//   mode          weight                             weight_scale              weight_offset
//   unquantized   f32, f16, bf16 [E, Kd, N]          -                         -
//   W8A8          i8 [E, Kd, N]                      [E, N]                    unused
//   W4A8 int      i32 [E, Kd, N/8] (or the bytes     i64 bits or f32: [E, N],  unused
//                 [E, Kd, N/2]): nibble i of word    or [E, Kd/g, N]
//                 c is channel 8c + i
//   W4A4 int      the same                           i64 bits or f32: [E, N]   unused
//   W4A16         the same, code - 8; i8 [E, Kd, N]  [E, Kd/g, N]              [E, Kd/g, N] of
//                 for 8 bits, code - 128                                       whole numbers
//   MXFP8         e4m3 [E, Kd, N]                    e8m0 [E, Kd/64, N, 2]     -
//   both MXFP4    u8 [E, Kd/2, N], low nibble = even e8m0 [E, Kd/64, N, 2]     -
//                 k
//
// With `transposed` false, weight is [E, N, Kd] ([E, N, Kd/2] for MXFP4, i8 [E, N/2, Kd] with rows
// 2j in low nibbles for int4). Float scales may be f32, f16 or bf16.
struct AscendOperands {
  TensorView weight;
  TensorView weight_scale;
  TensorView weight_offset;
  TensorView weight_bias;  // f32 [E, N]
  TensorView scale_bias;   // f32 [E, N]; W8A8 also i32, added to the integer sums
  bool transposed = true;  // weight is [E, Kd, N]
};

// Owns one matrix [N, Kd] per expert, with biases.
class CanonicalWeights {
 public:
  struct Impl;
  explicit CanonicalWeights(std::unique_ptr<Impl> impl);
  CanonicalWeights(CanonicalWeights&&) noexcept;
  CanonicalWeights& operator=(CanonicalWeights&&) noexcept;
  ~CanonicalWeights();

  // Refers to this object and lives as long.
  ExpertMatrices View() const;
  std::span<const int32_t* const> int_bias() const;

 private:
  std::unique_ptr<Impl> impl_;
};

// Converts once. The bias is scale_bias if it is there, else weight_bias; but in W4A8 scale_bias is
// the checksum 8 * sum of weights, which a product of signed codes must not add: it is compared
// with the weights and dropped, and weight_bias is added.
// Errors: kInvalidArgument naming the layer, `name` and the operand: dtype or shape that are not
//   the mode's; kCorruptData for a scale_bias that is not the checksum, offsets that are no whole
//   numbers in range, and what the packings refuse.
CanonicalWeights ImportOperands(GroupedMatmulMode mode, const AscendOperands& operands,
                                std::string_view name, size_t layer_id);

// How ModelSlim W4A4 checkpoints pack two int4 (contract 5.4).
enum class W4A4Packing {
  kOld,  // i8 [E, N, K], one in a byte
  kNew   // i8 [E, N/2, K], output channels 2j and 2j + 1 in one byte
};
// Setting moe-w4a4-new-packing (SGLANG_NPU_W4A4_NEW_PACKING).
W4A4Packing W4A4PackingOf(const Settings& settings);

// A W4A4 checkpoint's tensors as canonical int4 weights.
// Shapes: weight i8 [E, N, K] or [E, N/2, K] as `packing` says; scale f32 [E, N, 1] or [E, N].
// Errors: kInvalidArgument naming the layer, `name`, both shapes and the setting, if the weight is
//   packed the other way: never read as half or twice the channels.
CanonicalWeights ImportW4A4Checkpoint(W4A4Packing packing, const TensorView& weight,
                                      const TensorView& scale, std::string_view name,
                                      size_t layer_id);

}  // namespace switchyard::moe::ascend
