#include "switchyard/moe/ascend/activation.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/activations/activations.h"
#include "kernels/quantize/quantize.h"
#include "quant/act_quant.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::ascend {
namespace {

[[noreturn]] void Refuse(size_t layer_id, std::string_view name, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("layer {}: {}: {}", layer_id, name, what));
}

void CheckAboveZero(std::optional<float> value, std::string_view what, std::string_view name,
                    size_t layer_id) {
  if (value && !(*value > 0))
    Refuse(layer_id, name, fmt::format("{} must be above 0, found {}", what, *value));
}

RowActivation::Options Named(std::string_view formula, std::string_view name, size_t layer_id) {
  RowActivation::Options options;
  options.formula.entry = kernels::FindActivation(formula);
  options.name = name;
  options.layer_id = layer_id;
  return options;
}

ActQuant Int8Token() { return {.kind = ActQuantKind::kInt8Token}; }

ActQuant MxFp8(MxScaleRule rule) { return {.kind = ActQuantKind::kMxFp8, .mx_rule = rule}; }

// Rows that belong to an expert; all of them without groups.
size_t DefinedRows(ExecContext& context, const std::optional<GroupList>& groups, size_t num_rows,
                   size_t layer_id) {
  if (!groups) return num_rows;
  return CheckGroups(context, *groups, groups->values.size(), num_rows, layer_id).num_rows();
}

// Column pairs apart: even ones to `gate`, odd ones to `up`.
void Deinterleave(const float* x, size_t n, float* gate, float* up) {
  for (size_t i = 0; i < n; ++i) {
    gate[i] = x[2 * i];
    up[i] = x[2 * i + 1];
  }
}

// One row of accumulators to f32.
void ScaleRow(const int32_t* sums, const float* weight_scale, float act_scale, const float* bias,
              size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(sums[i]) * weight_scale[i] * act_scale;
    if (bias != nullptr) out[i] += bias[i];
  }
}

}  // namespace

QuantRows RowActivation::Run(ExecContext& context, const ActivationArgs& args) const {
  const bool gated = options_.formula.entry.is_gated;
  if (gated && args.x.cols % 2 != 0)
    Refuse(options_.layer_id, options_.name,
           fmt::format("gate and up need an even number of columns, found {}", args.x.cols));
  if (options_.grouped && !args.groups)
    Refuse(options_.layer_id, options_.name, "needs a group list");
  if (options_.counts_only && args.groups && args.groups->type != GroupListType::kCounts)
    Refuse(options_.layer_id, options_.name,
           "takes a group list of counts (type 1), found end offsets (type 0)");
  const size_t defined = options_.grouped
                             ? DefinedRows(context, args.groups, args.x.rows, options_.layer_id)
                             : args.x.rows;
  const size_t width = gated ? args.x.cols / 2 : args.x.cols;
  const Rows out = context.arena.AllocateRows(defined, width);
  quant::ForEachRow(context, defined, [&](size_t i) {
    const float* x = args.x.Row(i);
    if (!gated || options_.layout == GateUpLayout::kHalves) {
      options_.formula(x, gated ? x + width : nullptr, width, out.Row(i));
      return;
    }
    // Pieces that fit the stack.
    constexpr size_t kPiece = 256;
    float gate[kPiece];
    float up[kPiece];
    for (size_t first = 0; first < width; first += kPiece) {
      const size_t n = std::min(kPiece, width - first);
      Deinterleave(x + 2 * first, n, gate, up);
      options_.formula(gate, up, n, out.Row(i) + first);
    }
  });
  return quant::QuantizeRows(context, out, options_.requant);
}

RowActivation Swiglu(size_t layer_id) { return RowActivation(Named("silu", "Swiglu", layer_id)); }

RowActivation SwigluQuant(size_t layer_id) {
  RowActivation::Options options = Named("silu", "SwigluQuant", layer_id);
  options.requant = Int8Token();
  return RowActivation(options);
}

RowActivation SwigluOai(const SwigluOaiParams& params, size_t layer_id) {
  RowActivation::Options options = Named("swiglu_oai", "SwigluOAI", layer_id);
  CheckAboveZero(params.limit, "the limit", options.name, layer_id);
  options.formula.params.alpha = params.alpha.value_or(1.0f);
  options.formula.params.clamp_limit = params.limit.value_or(ActivationParams::kNoLimit);
  options.layout = params.layout;
  return RowActivation(options);
}

RowActivation SwigluDeepEpKernel(bool need_quant, const SwigluOaiParams& params, size_t layer_id) {
  constexpr std::string_view kName = "SwigluDeepEPKernel";
  if (params.alpha.has_value() != params.limit.has_value())
    Refuse(layer_id, kName, "alpha and limit go together: the OAI form needs both");
  RowActivation::Options options =
      params.alpha ? SwigluOai(params, layer_id).options() : Swiglu(layer_id).options();
  options.name = kName;
  options.layout = params.layout;
  options.grouped = true;
  if (need_quant) options.requant = Int8Token();
  return RowActivation(options);
}

RowActivation SwigluStepAndMul(float limit, size_t layer_id) {
  RowActivation::Options options = Named("swiglu_step", "SwigluStepAndMul", layer_id);
  CheckAboveZero(limit, "the limit", options.name, layer_id);
  options.formula.params.clamp_limit = limit;
  return RowActivation(options);
}

RowActivation SwigluLimit(float limit, size_t layer_id) {
  RowActivation::Options options = Named("swiglu_limit", "swiglu_limit", layer_id);
  CheckAboveZero(limit, "the limit", options.name, layer_id);
  options.formula.params.swiglu_limit = limit;
  return RowActivation(options);
}

RowActivation SwigluMxFp8Quant(float limit, MxScaleRule mx_rule, size_t layer_id) {
  RowActivation::Options options = SwigluLimit(limit, layer_id).options();
  options.name = "SwigluMxfp8Quant";
  options.requant = MxFp8(mx_rule);
  options.grouped = true;
  options.counts_only = true;
  return RowActivation(options);
}

RowActivation GeluAndMul(size_t layer_id, GeluApproximate approximate) {
  const bool tanh = approximate == GeluApproximate::kTanh;
  return RowActivation(Named(tanh ? "gelu_tanh" : "gelu", "GeluAndMul", layer_id));
}

RowActivation Situ(const SituParams& params, bool need_quant, size_t layer_id) {
  RowActivation::Options options = Named("situ", "SiTU", layer_id);
  CheckAboveZero(params.beta, "beta", options.name, layer_id);
  CheckAboveZero(params.linear_limit, "the linear limit", options.name, layer_id);
  options.formula.params.alpha = params.beta;
  options.formula.params.clamp_limit = params.linear_limit.value_or(ActivationParams::kNoLimit);
  if (need_quant) options.requant = Int8Token();
  return RowActivation(options);
}

RowActivation SituMxFp8Quant(const SituParams& params, MxScaleRule mx_rule, size_t layer_id) {
  RowActivation::Options options = Situ(params, false, layer_id).options();
  options.name = "SituMXFP8Quant";
  if (!params.linear_limit)
    Refuse(layer_id, options.name, "needs the linear limit (gemm1_clamp_limit)");
  options.requant = MxFp8(mx_rule);
  return RowActivation(options);
}

RowActivation NotGated(std::string_view name, size_t layer_id) {
  const std::string formula = name == "relu2" ? "relu2" : fmt::format("{}_plain", name);
  RowActivation::Options options = Named(formula, "activation", layer_id);
  options.name = options.formula.entry.name;
  return RowActivation(options);
}

QuantRows SwigluQuantWithScales::Run(ExecContext& context, const ActivationArgs& args) const {
  constexpr std::string_view kName = "SwigluQuantWithScales";
  const size_t layer_id = options_.layer_id;
  const RowsView<const int32_t>& sums = args.accumulators;
  if (!args.groups) Refuse(layer_id, kName, "needs a group list");
  if (sums.cols % 2 != 0)
    Refuse(layer_id, kName,
           fmt::format("gate and up need an even number of columns, found {}", sums.cols));
  const size_t experts = args.groups->values.size();
  const size_t width = sums.cols / 2;
  const auto check = [&](std::string_view what, ConstRows rows, size_t cols, bool needed) {
    if (rows.rows == 0 && !needed) return;
    if (rows.rows != experts || rows.cols != cols)
      Refuse(layer_id, kName,
             fmt::format("{} is [{}, {}], expected [{}, {}]", what, rows.rows, rows.cols, experts,
                         cols));
  };
  check("weight_scale", args.weight_scale, sums.cols, experts != 0);
  check("bias", args.bias, sums.cols, false);
  check("quant_scale", args.quant_scale, width, options_.quant_offset.has_value() && experts != 0);
  if (args.act_scale.size() != sums.rows)
    Refuse(layer_id, kName,
           fmt::format("act_scale has {} values, expected {}", args.act_scale.size(), sums.rows));
  const GroupRanges groups = CheckGroups(context, *args.groups, experts, sums.rows, layer_id);
  const Activation silu = Swiglu(layer_id).options().formula;
  const Rows scaled = context.arena.AllocateRows(groups.num_rows(), sums.cols);
  const Rows out = context.arena.AllocateRows(groups.num_rows(), width);
  for (size_t e = 0; e < experts; ++e) {
    quant::ForEachRow(context, groups.Count(e), [&](size_t i) {
      const size_t row = groups.Begin(e) + i;
      float* x = scaled.Row(row);
      ScaleRow(sums.Row(row), args.weight_scale.Row(e), args.act_scale[row],
               args.bias.rows == 0 ? nullptr : args.bias.Row(e), sums.cols, x);
      float* left = x;
      float* right = x + width;
      if (!options_.activate_left) std::swap(left, right);
      silu(left, right, width, out.Row(row));
      if (args.quant_scale.rows == 0) return;
      const float* smooth = args.quant_scale.Row(e);
      for (size_t k = 0; k < width; ++k) out.Row(row)[k] *= smooth[k];
    });
  }
  ActQuant how = Int8Token();
  if (options_.quant_offset) {
    how.kind = ActQuantKind::kInt8Static;
    how.offset = *options_.quant_offset;
  }
  return quant::QuantizeRows(context, out, how);
}

AllGatherActivationWrapper::AllGatherActivationWrapper(const BaseActivation& inner,
                                                       GatherColumns gather, size_t layer_id)
    : inner_(inner), gather_(std::move(gather)) {
  if (inner.output_kind() != ActQuantKind::kNone) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("layer {}: AllGatherActivationWrapper puts columns of ranks side by side; "
                    "the activation quantises to {}, and each rank would have its own "
                    "scales",
                    layer_id, ActQuantKindName(inner.output_kind())));
  }
}

QuantRows AllGatherActivationWrapper::Run(ExecContext& context, const ActivationArgs& args) const {
  const QuantRows rows = inner_.Run(context, args);
  return gather_ ? QuantRows::Plain(gather_(context, rows.F32())) : rows;
}

}  // namespace switchyard::moe::ascend
