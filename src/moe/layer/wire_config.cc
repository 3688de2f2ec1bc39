#include "moe/layer/wire_config.h"

#include <fmt/format.h>

#include <string_view>

#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

// The rows of one direction.
struct RowKindChoice {
  ActQuant quant;
  DType plain = DType::kF32;
};

RowKindChoice ParseDType(std::string_view setting, std::string_view name) {
  RowKindChoice choice;
  if (name == "f32") return choice;
  if (name == "bf16") {
    choice.plain = DType::kBF16;
  } else if (name == "fp8") {
    choice.quant.kind = ActQuantKind::kFp8Group;
    choice.quant.amax_floor = 1e-4f;  // of the all-to-all kernel, contract 3.1
  } else if (name == "int8") {
    choice.quant.kind = ActQuantKind::kInt8Token;
  } else if (name == "mxfp8") {
    choice.quant.kind = ActQuantKind::kMxFp8;
  } else if (name == "mxfp4") {
    choice.quant.kind = ActQuantKind::kMxFp4;
  } else {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is auto, f32, bf16, fp8, int8, mxfp8 or mxfp4, found \"{}\"",
                            setting, name));
  }
  return choice;
}

RowKindChoice LosslessRows(const SchemeEntry& w13, const MoeQuantInfo& quant_info,
                           const MoeRunnerConfig& config, const Dispatcher& dispatcher) {
  RowKindChoice choice;
  const ActQuantKind kind = quant_info.a13.kind;
  if (kind != ActQuantKind::kNone && kind == w13.wire && dispatcher.CanSend(kind))
    choice.quant = quant_info.a13;
  const bool rounds = kind == ActQuantKind::kNone && !quant_info.w1.format.is_quantized() &&
                      config.activation_dtype == DType::kBF16 &&
                      !config.apply_router_weight_on_input;
  if (rounds) choice.plain = DType::kBF16;
  return choice;
}

}  // namespace

DispatcherQuantConfig ResolveWire(const MoeLayerOptions& options, const SchemeEntry& w13,
                                  const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                  const Dispatcher& dispatcher) {
  const bool automatic =
      options.dispatch_dtype == "auto" || dispatcher.format() == DispatchFormat::kAscendTp;
  const RowKindChoice out = automatic ? LosslessRows(w13, quant_info, config, dispatcher)
                                      : ParseDType("moe-dispatch-dtype", options.dispatch_dtype);
  const RowKindChoice home = ParseDType(
      "moe-combine-dtype", options.combine_dtype == "auto" ? "f32" : options.combine_dtype);
  DispatcherQuantConfig wire;
  wire.output = out.quant;
  wire.plain = out.plain;
  const ActQuant& wanted = quant_info.a13;
  wire.decode_on_arrival = wire.output.kind != wanted.kind || wire.output.group != wanted.group ||
                           wanted.kind != w13.wire;
  wire.combine = home.quant;
  wire.combine_plain = home.plain;
  return wire;
}

}  // namespace switchyard::moe
