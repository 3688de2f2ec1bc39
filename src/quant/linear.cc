#include "quant/linear.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/convert/convert.h"
#include "kernels/decode/decode.h"
#include "quant/act_quant.h"
#include "quant/expert_matmul.h"
#include "quant/node_tiles.h"
#include "quant/panel_matmul.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::quant {

ActRows PrepareActivations(ExecContext& context, ConstRows x, DType dtype) {
  const std::span<const void*> rows = context.arena.AllocateSpan<const void*>(x.rows);
  if (dtype == DType::kF32) {
    for (size_t t = 0; t < x.rows; ++t) rows[t] = x.Row(t);
    return {dtype, rows, x.cols};
  }
  // Rows start at multiples of 64 bytes, so that vector loads do not straddle cache lines.
  const size_t stride = (x.cols + 31) / 32 * 32;
  BF16* copy = context.arena.AllocateSpan<BF16>(x.rows * stride).data();
  for (size_t t = 0; t < x.rows; ++t) rows[t] = copy + t * stride;
  constexpr size_t kRowsPerTask = 16;
  context.pool.Run((x.rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(x.rows, (task + 1) * kRowsPerTask);
    for (size_t t = task * kRowsPerTask; t < end; ++t) {
      kernels::ConvertFromF32(x.Row(t), x.cols, dtype, copy + t * stride);
    }
  });
  return {dtype, rows, x.cols};
}

ActRows GatherRows(Arena& arena, const ActRows& x, std::span<const uint32_t> indices) {
  const std::span<const void*> rows = arena.AllocateSpan<const void*>(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) rows[i] = x.rows[indices[i]];
  ActRows result{x.dtype, rows, x.cols, {}, x.records};
  if (x.row_scale.empty()) return result;
  const std::span<float> scales = arena.AllocateSpan<float>(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) scales[i] = x.row_scale[indices[i]];
  result.row_scale = scales;
  return result;
}

DType ResolveActDType(std::string_view setting, std::string_view fast, const MatrixFormat& weights,
                      size_t cols) {
  if (setting != "auto" && setting != "f32" && setting != "bf16") {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("act_dtype must be auto, f32 or bf16, found \"{}\"", setting));
  }
  if (fast != "auto" && fast != "on" && fast != "off") {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("fast_activations must be auto, on or off, found \"{}\"", fast));
  }
  if (setting == "f32") return DType::kF32;
  const DType dtype = weights.dtype;
  const bool is_plain = !weights.is_quantized() &&
                        (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16);
  if (!is_plain) {
    if (!weights.in_panels) return DType::kF32;
    const PanelMatrix panels(weights, cols);
    const bool is_fast = fast == "on" || (fast == "auto" && IsGgmlBlock(dtype));
    if (setting == "auto" && is_fast && TakesPath(panels.format, kernels::PanelPath::kInt8))
      return DType::kI8;
    return TakesPath(panels.format, kernels::PanelPath::kBF16) ? DType::kBF16 : DType::kF32;
  }
  if (setting == "bf16" && kernels::FindMatmul(DType::kBF16, dtype) == nullptr) {
    throw Error(ErrorCode::kUnsupported, fmt::format("--act-dtype bf16: no kernel multiplies bf16 "
                                                     "activations with {} weights; use f32 or auto",
                                                     DTypeName(dtype)));
  }
  const bool fast_pairs = setting == "auto" && dtype == DType::kBF16 && HasNativeBF16();
  return setting == "bf16" || fast_pairs ? DType::kBF16 : DType::kF32;
}

kernels::MatmulFn MatmulFor(DType act, DType weight) {
  const kernels::MatmulKernel* kernel = kernels::FindMatmul(act, weight);
  SY_CHECK(kernel != nullptr);
  return kernel->run;
}

size_t TaskRows(size_t total_rows, size_t num_threads) {
  // Several tasks a thread even out their speeds; at most 64 rows of weights then stay in L2 while
  // all activations pass.
  const size_t wanted = total_rows / (num_threads * 8);
  return std::clamp<size_t>(wanted / 32 * 32, 32, 64);
}

namespace {

// The activations of a job: rows as MultiplyExpert takes them, or codes with scales of groups.
struct JobRows {
  ActRows rows;
  std::span<const float* const> group_scales = {};  // [rows] of [groups], or empty
};

// Whether weights have scales for the same groups of columns as their activations.
bool TakesGroups(const LinearJob& job) {
  const MatrixFormat& format = job.weight.format;
  return !format.in_panels && job.weight.act.kind == ActQuantKind::kFp8Group &&
         format.dtype == DType::kF8E4M3 && format.scale_cols == job.weight.act.group &&
         !format.has_zero;
}

JobRows PrepareJob(ExecContext& context, ConstRows x, const LinearJob& job) {
  const WeightMatrix& weight = job.weight;
  if (!TakesGroups(job)) {
    return {
        PrepareExpertRows(context, QuantRows::Plain(x), weight.act, weight.format, job.act_dtype)};
  }
  const QuantRows codes = QuantizeRows(context, x, weight.act);
  const size_t stride = (x.cols + 15) / 16 * 16;
  float* values = context.arena.AllocateSpan<float>(x.rows * stride).data();
  const std::span<const void*> rows = context.arena.AllocateSpan<const void*>(x.rows);
  const std::span<const float*> scales = context.arena.AllocateSpan<const float*>(x.rows);
  ForEachRow(context, x.rows, [&](size_t i) {
    kernels::DecodeRow({codes.dtype, codes.Row(i), x.cols}, values + i * stride);
    rows[i] = values + i * stride;
    scales[i] = reinterpret_cast<const float*>(codes.ScaleRow(i));
  });
  return {{DType::kF32, rows, x.cols}, scales};
}

// Products of codes, group by group: e4m3 times e4m3 has 8 bits, so the sum over a group is all but
// exact in f32, and little more than its two scales rounds. What is quantised next then meets the
// same boundaries as with exact sums.
//
//   x codes [ g0 | g1 | .. ]  *  w codes [ g0 | g1 | .. ]  ->  sum of sx[g] sw[n, g] (x_g w_g)
void MultiplyGroups(const JobRows& x, const WeightMatrix& w, size_t n0, size_t n,
                    std::span<float> scratch, Rows out) {
  constexpr size_t kRows = 96, kCols = 64;  // of results that wait for their scales
  float partial[kRows * kCols];
  const void* slice[kRows];
  const size_t group = w.format.scale_cols;
  const size_t stride = (w.cols + 15) / 16 * 16;
  const size_t tile = std::min({n, kCols, scratch.size() / stride});
  for (size_t j = 0; j < n; j += tile) {
    const size_t cols = std::min(tile, n - j);
    for (size_t c = 0; c < cols; ++c)
      kernels::DecodeRow({w.dtype(), w.RowAt(n0 + j + c), w.cols}, scratch.data() + c * stride);
    for (size_t t = 0; t < out.rows; t += kRows) {
      const size_t count = std::min(kRows, out.rows - t);
      for (size_t r = 0; r < count; ++r) std::fill_n(out.Row(t + r) + n0 + j, cols, 0.0f);
      for (size_t g = 0; g * group < w.cols; ++g) {
        for (size_t r = 0; r < count; ++r)
          slice[r] = static_cast<const float*>(x.rows.rows[t + r]) + g * group;
        kernels::MatmulArgs args;
        args.a_rows = slice;
        args.num_rows = count;
        args.w = scratch.data() + g * group;
        args.w_stride = stride;
        args.n = cols;
        args.k = std::min(group, w.cols - g * group);
        args.out = partial;
        args.out_stride = cols;
        MatmulFor(DType::kF32, DType::kF32)(args);
        for (size_t c = 0; c < cols; ++c) {
          const size_t grid_row = (n0 + j + c) / w.format.scale_rows;
          const float scale =
              kernels::ScaleAt(w.format.scale_dtype, w.scale, grid_row * w.scale_stride + g);
          for (size_t r = 0; r < count; ++r)
            out.Row(t + r)[n0 + j + c] +=
                partial[r * cols + c] * (x.group_scales[t + r][g] * scale);
        }
      }
    }
  }
}

// Outputs [n0, n0 + n) of a job.
void RunPart(const JobRows& prepared, const LinearJob& job, size_t n0, size_t n,
             std::span<float> scratch) {
  const ActRows& x = prepared.rows;
  if (prepared.group_scales.empty()) {
    MultiplyExpert(x, job.weight.AsBank(), 0, n0, n, scratch, job.out.data + n0, job.out.stride);
  } else {
    MultiplyGroups(prepared, job.weight, n0, n, scratch, job.out);
  }
  const float* bias = job.weight.bias != nullptr ? job.weight.bias : job.bias;
  if (bias == nullptr) return;
  for (size_t t = 0; t < x.rows.size(); ++t) {
    float* out = job.out.Row(t) + n0;
    for (size_t i = 0; i < n; ++i) out[i] += bias[n0 + i];
  }
}

// Runs parts of all calls, in parallel. call_at(i) is a LinearJob and its activations.
template <typename JobAt, typename RowsAt>
void RunParts(ExecContext& context, size_t num_jobs, const JobAt& job_at, const RowsAt& rows_at) {
  size_t total_rows = 0;
  for (size_t i = 0; i < num_jobs; ++i) total_rows += job_at(i).num_outputs();
  const size_t task_rows = TaskRows(total_rows, context.pool.num_threads());
  size_t scratch_floats = 0;
  for (size_t i = 0; i < num_jobs; ++i) {
    scratch_floats =
        std::max(scratch_floats, ExpertScratchFloats(job_at(i).weight.AsBank(), task_rows));
  }
  scratch_floats = (scratch_floats + 15) / 16 * 16;
  float* scratch =
      context.arena.AllocateSpan<float>(context.pool.num_threads() * scratch_floats).data();
  const auto rows_of = [&](size_t i) {
    const LinearJob& job = job_at(i);
    return ProductRows{{job.first, job.first + job.num_outputs()}, job.weight.rows};
  };
  ForEachNodeTile(context, num_jobs, task_rows, rows_of,
                  [&](size_t i, RowRange rows, size_t worker) {
                    RunPart(rows_at(i), job_at(i), rows.begin, rows.end - rows.begin,
                            {scratch + worker * scratch_floats, scratch_floats});
                  });
}

// Whether what is prepared for one job serves another.
bool TakesSameRows(const LinearJob& a, const LinearJob& b) {
  const auto dtype = [](const LinearJob& job) {
    return ExpertRowDType(job.weight.act, job.weight.format, job.weight.cols, job.act_dtype);
  };
  const auto records = [](const LinearJob& job) {
    const WeightMatrix& weight = job.weight;
    if (!weight.format.in_panels) return kernels::PanelRowLayout();
    return RecordsFor(weight.act, weight.format, weight.cols, job.act_dtype);
  };
  return a.weight.act == b.weight.act && dtype(a) == dtype(b) && records(a) == records(b) &&
         TakesGroups(a) == TakesGroups(b);
}

}  // namespace

void RunLinears(ExecContext& context, ConstRows x, std::span<const LinearJob> jobs) {
  const std::span<JobRows> rows = context.arena.AllocateSpan<JobRows>(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    size_t same = 0;
    while (same < i && !TakesSameRows(jobs[same], jobs[i])) ++same;
    rows[i] = same < i ? rows[same] : PrepareJob(context, x, jobs[i]);
  }
  RunParts(
      context, jobs.size(), [&](size_t i) -> const LinearJob& { return jobs[i]; },
      [&](size_t i) -> const JobRows& { return rows[i]; });
}

void RunLinearCalls(ExecContext& context, std::span<const LinearCall> calls) {
  RunParts(
      context, calls.size(), [&](size_t i) -> const LinearJob& { return calls[i].job; },
      [&](size_t i) { return JobRows{calls[i].x}; });
}

ActRows SliceColumns(Arena& arena, const ActRows& x, size_t first, size_t count) {
  SY_CHECK(!x.are_records());
  const std::span<const void*> rows = arena.AllocateSpan<const void*>(x.rows.size());
  for (size_t t = 0; t < rows.size(); ++t)
    rows[t] = static_cast<const std::byte*>(x.rows[t]) + BytesOf(x.dtype, first);
  return {x.dtype, rows, count, x.row_scale};
}

}  // namespace switchyard::quant
