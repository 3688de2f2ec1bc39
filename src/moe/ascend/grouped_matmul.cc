#include "switchyard/moe/ascend/grouped_matmul.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/decode/decode.h"
#include "quant/expert_matmul.h"
#include "quant/linear.h"
#include "quant/node_tiles.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/ascend/activation.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void Refuse(size_t layer_id, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("layer {}: grouped matmul: {}", layer_id, what));
}

bool IsMx(const MatrixFormat& format) {
  return format.scale_dtype == DType::kF8E8M0 && format.scale_rows == 1 && format.scale_cols == 32;
}

// The kind of rows that the product sees.
ActQuantKind RowKindOf(const GroupedMatmulArgs& args) {
  return args.x.kind != ActQuantKind::kNone ? args.x.kind : args.act.kind;
}

void CheckWeights(const GroupedMatmulArgs& args, size_t layer_id) {
  if (args.weights.empty()) Refuse(layer_id, "no matrices were given");
  const ExpertMatrices& first = args.weights.front();
  for (const ExpertMatrices& w : args.weights) {
    if (w.cols != args.x.cols)
      Refuse(layer_id,
             fmt::format("rows of {} columns, matrices [{}, {}]", args.x.cols, w.rows, w.cols));
    if (w.num_experts() != first.num_experts())
      Refuse(layer_id, fmt::format("matrices of {} and of {} experts side by side",
                                   first.num_experts(), w.num_experts()));
    if (!(w.format == first.format))
      Refuse(layer_id, fmt::format("matrices of {} and of {} codes, or other scales, side by side",
                                   DTypeName(first.format.dtype), DTypeName(w.format.dtype)));
    if (!w.bias.empty() && w.bias.size() != w.num_experts())
      Refuse(layer_id,
             fmt::format("biases of {} experts, matrices of {}", w.bias.size(), w.num_experts()));
  }
  if (!args.int_bias.empty() && args.int_bias.size() != first.num_experts())
    Refuse(layer_id, fmt::format("integer biases of {} experts, matrices of {}",
                                 args.int_bias.size(), first.num_experts()));
}

// Rows of one matrix that one task multiplies with all rows of its expert.
struct Piece {
  size_t expert;
  size_t matrix;
  size_t begin;  // first row of the matrix
  size_t rows;
};

class Product {
 public:
  Product(const GroupedMatmulArgs& args, const GroupRanges& groups, const quant::ActRows& x,
          Rows out)
      : args_(args), groups_(groups), x_(x), out_(out) {}

  void Run(ExecContext& context) const {
    ArenaScope scope(context.arena);
    const std::span<const uint32_t> experts = ExpertsWithRows(context.arena);
    const size_t piece_rows =
        quant::TaskRows(experts.size() * out_.cols, context.pool.num_threads());
    size_t scratch_each = 0;
    for (const ExpertMatrices& w : args_.weights)
      scratch_each = std::max(scratch_each, quant::ExpertScratchFloats(w, piece_rows));
    const std::span<float> scratch =
        context.arena.AllocateSpan<float>(context.pool.num_threads() * scratch_each);
    const size_t num_weights = args_.weights.size();
    const auto all_rows = [&](size_t i) {
      const size_t rows = args_.weights[i % num_weights].rows;
      return quant::ProductRows{{0, rows}, rows};
    };
    // Each matrix is read once.
    quant::ForEachNodeTile(
        context, experts.size() * num_weights, piece_rows, all_rows,
        [&](size_t i, quant::RowRange rows, size_t worker) {
          Multiply({experts[i / num_weights], i % num_weights, rows.begin, rows.end - rows.begin},
                   scratch.subspan(worker * scratch_each, scratch_each));
        });
  }

 private:
  std::span<const uint32_t> ExpertsWithRows(Arena& arena) const {
    const std::span<uint32_t> experts = arena.AllocateSpan<uint32_t>(groups_.num_experts());
    size_t count = 0;
    for (size_t e = 0; e < groups_.num_experts(); ++e)
      if (groups_.Count(e) != 0) experts[count++] = static_cast<uint32_t>(e);
    return experts.first(count);
  }

  void Multiply(const Piece& piece, std::span<float> scratch) const {
    const ExpertMatrices& w = args_.weights[piece.matrix];
    const size_t begin = groups_.Begin(piece.expert);
    const size_t count = groups_.Count(piece.expert);
    const size_t column = FirstColumn(piece.matrix) + piece.begin;
    const Rows out(out_.Row(begin) + column, count, piece.rows, out_.stride);
    quant::MultiplyExpert(x_.Slice(begin, count), w, piece.expert, piece.begin, piece.rows, scratch,
                          out.data, out.stride);
    if (!args_.int_bias.empty()) AddIntBias(w, piece, begin, column, out);
    if (!w.bias.empty()) AddBias(w, piece, out);
  }

  size_t FirstColumn(size_t matrix) const {
    size_t column = 0;
    for (size_t i = 0; i < matrix; ++i) column += args_.weights[i].rows;
    return column;
  }

  static void AddBias(const ExpertMatrices& w, const Piece& piece, Rows out) {
    for (size_t m = 0; m < out.rows; ++m) {
      float* row = out.Row(m);
      for (size_t n = 0; n < out.cols; ++n)
        row[n] += w.bias[piece.expert][(piece.begin + n) * w.bias_stride];
    }
  }

  // (sum + bias) * scales = sum * scales + bias * scales.
  void AddIntBias(const ExpertMatrices& w, const Piece& piece, size_t first_row, size_t column,
                  Rows out) const {
    for (size_t n = 0; n < out.cols; ++n) {
      const float scale = kernels::ScaleAt(w.format.scale_dtype, w.scale[piece.expert],
                                           (piece.begin + n) * w.scale_stride);
      const float bias = static_cast<float>(args_.int_bias[piece.expert][column + n]) * scale;
      for (size_t m = 0; m < out.rows; ++m) out.Row(m)[n] += bias * x_.row_scale[first_row + m];
    }
  }

  const GroupedMatmulArgs& args_;
  const GroupRanges& groups_;
  const quant::ActRows& x_;
  Rows out_;
};

}  // namespace

std::string_view GroupedMatmulModeName(GroupedMatmulMode mode) {
  switch (mode) {
    case GroupedMatmulMode::kUnquantized: return "unquantized";
    case GroupedMatmulMode::kW8A8: return "W8A8";
    case GroupedMatmulMode::kW4A8Int: return "W4A8 int";
    case GroupedMatmulMode::kW4A4Int: return "W4A4 int";
    case GroupedMatmulMode::kW4A16: return "W4A16";
    case GroupedMatmulMode::kMxFp8: return "MXFP8";
    case GroupedMatmulMode::kW4A8MxFp4: return "W4A8 MXFP4";
    case GroupedMatmulMode::kW4A4MxFp4: return "W4A4 MXFP4";
  }
  return "?";
}

GroupedMatmulMode ModeOf(const MatrixFormat& weights, size_t cols, ActQuantKind rows,
                         size_t layer_id) {
  const bool plain = rows == ActQuantKind::kNone;
  const bool int8 = rows == ActQuantKind::kInt8Token || rows == ActQuantKind::kInt8Static;
  const bool per_channel = weights.scale_rows == 1 && weights.scale_cols >= cols;
  const bool symmetric = weights.is_quantized() && !weights.has_zero;
  if (!weights.is_quantized() && plain) return GroupedMatmulMode::kUnquantized;
  if (weights.is_quantized() && plain) return GroupedMatmulMode::kW4A16;
  if (symmetric && weights.dtype == DType::kI8 && per_channel && int8)
    return GroupedMatmulMode::kW8A8;
  if (symmetric && weights.dtype == DType::kI4 && weights.scale_rows == 1 && int8)
    return GroupedMatmulMode::kW4A8Int;
  if (symmetric && weights.dtype == DType::kI4 && per_channel && rows == ActQuantKind::kInt4Token)
    return GroupedMatmulMode::kW4A4Int;
  if (symmetric && IsMx(weights) && rows == ActQuantKind::kMxFp8) {
    if (weights.dtype == DType::kF8E4M3) return GroupedMatmulMode::kMxFp8;
    if (weights.dtype == DType::kF4E2M1) return GroupedMatmulMode::kW4A8MxFp4;
  }
  if (symmetric && IsMx(weights) && rows == ActQuantKind::kMxFp4 && weights.dtype == DType::kF4E2M1)
    return GroupedMatmulMode::kW4A4MxFp4;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("layer {}: the Ascend grouped matmul has no mode for rows of {} with "
                          "weights of {} under {} scales per {}x{}{}; take --moe-runner aiter",
                          layer_id, ActQuantKindName(rows), DTypeName(weights.dtype),
                          DTypeName(weights.scale_dtype), weights.scale_rows, weights.scale_cols,
                          weights.has_zero ? " and zero points" : ""));
}

Rows GroupedMatmul::Run(ExecContext& context, const GroupedMatmulArgs& args) const {
  CheckWeights(args, layer_id_);
  const ExpertMatrices& first = args.weights.front();
  const GroupedMatmulMode mode = ModeOf(first.format, first.cols, RowKindOf(args), layer_id_);
  if (!args.int_bias.empty() && mode != GroupedMatmulMode::kW8A8)
    Refuse(layer_id_,
           fmt::format("an integer bias belongs to W8A8, this is {}", GroupedMatmulModeName(mode)));
  const GroupRanges groups =
      CheckGroups(context, args.group_list, first.num_experts(), args.x.rows, layer_id_);
  size_t width = 0;
  for (const ExpertMatrices& w : args.weights) width += w.rows;
  const Rows out = context.arena.AllocateRows(std::max(args.x.rows, args.num_rows), width);
  const quant::ActRows x = quant::PrepareExpertRows(context, args.x.Slice(0, groups.num_rows()),
                                                    args.act, first.format, args.act_dtype);
  Product(args, groups, x, out).Run(context);
  return out;
}

GroupedMatmulSwigluQuant::GroupedMatmulSwigluQuant(const Options& options) : options_(options) {
  if (options.swiglu_limit != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: the fused gemm1 with Swiglu and mxfp8 cannot clamp, and "
                            "swiglu_limit is {}; take --moe-runner aiter",
                            options.layer_id, options.swiglu_limit));
  }
  if (options.requant.kind != ActQuantKind::kMxFp8) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: the fused gemm1 gives mxfp8 rows, {} were asked for",
                            options.layer_id, ActQuantKindName(options.requant.kind)));
  }
}

QuantRows GroupedMatmulSwigluQuant::Run(ExecContext& context, const GroupedMatmulArgs& args) const {
  if (RowKindOf(args) != ActQuantKind::kMxFp8) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: the fused gemm1 takes mxfp8 rows, found {}",
                            options_.layer_id, ActQuantKindName(RowKindOf(args))));
  }
  if (args.weights.size() != 2 || args.weights[0].rows != args.weights[1].rows)
    Refuse(options_.layer_id, "the fused gemm1 takes the gate and the up matrix");
  GroupedMatmulArgs cumulative = args;
  cumulative.group_list = ToCumulative(context, args.group_list, options_.layer_id);
  const Rows gate_up = GroupedMatmul(options_.layer_id).Run(context, cumulative);
  RowActivation::Options swiglu = Swiglu(options_.layer_id).options();
  swiglu.grouped = true;
  swiglu.requant = options_.requant;
  ActivationArgs activation;
  activation.x = gate_up;
  activation.groups = cumulative.group_list;
  return RowActivation(swiglu).Run(context, activation);
}

}  // namespace switchyard::moe::ascend
