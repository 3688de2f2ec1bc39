// Which activation stands between the products. Contract 4.1.4, "Selection in the Ascend core".
#include <fmt/format.h>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
#include "switchyard/moe/runners/ascend.h"

namespace switchyard::moe {
namespace {

using ascend::GroupedMatmulMode;
using ascend::RowActivation;

// A selection in progress.
class Selection {
 public:
  Selection(const MoeRunnerConfig& config, const ExpertKernel& w13, const ExpertKernel& w2,
            DispatchFormat format)
      : config_(config),
        w2_(w2),
        format_(format),
        mode13_(ascend::ModeOf(w13.format, config.hidden_size, w13.act.kind, config.layer_id)),
        mode2_(ascend::ModeOf(w2.format, config.intermediate_size_per_partition, w2.act.kind,
                              config.layer_id)) {}

  AscendActivation Choose() const {
    if (FusesGemm1()) return {true, std::nullopt};
    if (Is("swiglu_limit") && mode2_ == GroupedMatmulMode::kW4A8MxFp4) {
      return {false, ascend::SwigluMxFp8Quant(config_.formula.params.swiglu_limit, w2_.act.mx_rule,
                                              config_.layer_id)};
    }
    const bool deepep =
        format_ == DispatchFormat::kDeepepNormal || format_ == DispatchFormat::kDeepepLl;
    return {false, RowActivation(deepep ? BehindDeepep() : BehindAscendTp())};
  }

 private:
  bool Is(std::string_view formula) const { return config_.formula.entry.name == formula; }

  // W8A8 and W4A8: the activation gives int8 codes and their scales to gemm2. Others receive plain
  // rows and quantise in gemm2.
  bool GivesInt8() const {
    const bool int8 = mode2_ == GroupedMatmulMode::kW8A8 || mode2_ == GroupedMatmulMode::kW4A8Int;
    return int8 && w2_.act.kind == ActQuantKind::kInt8Token;
  }

  // MXFP8 has no other gemm1; W4A8 MXFP4 has one for SiTU and for the clamp.
  bool FusesGemm1() const {
    if (mode13_ == GroupedMatmulMode::kMxFp8) {
      if (config_.formula.params.swiglu_limit != ActivationParams::kNoLimit)
        Refuse("its gemm1 is fused with Swiglu and cannot clamp (swiglu_limit)");
      if (!Is("silu")) Refuse("its gemm1 is fused with Swiglu");
      if (w2_.act.kind != ActQuantKind::kMxFp8)
        Refuse("its gemm1 is fused with mxfp8 requantisation, which this w2 does not take");
      return true;
    }
    if (mode13_ != GroupedMatmulMode::kW4A8MxFp4 || Is("situ") || Is("swiglu_limit")) return false;
    if (!Is("silu")) Refuse("its gemm1 is fused with Swiglu, unless the activation is situ");
    return w2_.act.kind == ActQuantKind::kMxFp8;
  }

  RowActivation::Options BehindAscendTp() const {
    RowActivation::Options options = Plain();
    if (!GivesInt8()) return options;
    if (!Is("silu")) Refuse("the vendor's pipeline computes SwigluQuant whatever the activation");
    return WithRequant(options);
  }

  RowActivation::Options BehindDeepep() const {
    RowActivation::Options options = Plain();
    if (Is("situ")) {
      const bool has_limit = options.formula.params.clamp_limit != ActivationParams::kNoLimit;
      const bool gives_mx = mode2_ == GroupedMatmulMode::kW4A8MxFp4 && has_limit;
      return GivesInt8() || gives_mx ? WithRequant(options) : options;
    }
    options.grouped = true;
    if (!GivesInt8()) return options;
    if (!Is("silu") && !Is("swiglu_oai"))
      Refuse(
          "the vendor's SwigluDeepEPKernel computes SwiGLU or SwiGLU-OAI whatever the "
          "activation");
    return WithRequant(options);
  }

  RowActivation::Options Plain() const {
    RowActivation::Options options;
    options.formula = config_.formula;
    options.layer_id = config_.layer_id;
    options.name = config_.formula.entry.name;
    return options;
  }
  RowActivation::Options WithRequant(RowActivation::Options options) const {
    options.requant = w2_.act;
    return options;
  }

  [[noreturn]] void Refuse(std::string_view why) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("layer {}: runner ascend, scheme {} (w13) and {} (w2) behind {}: "
                            "activation \"{}\" ({}): {}; take --moe-runner aiter",
                            config_.layer_id, GroupedMatmulModeName(mode13_),
                            GroupedMatmulModeName(mode2_), DispatchFormatName(format_),
                            config_.activation, config_.formula.entry.name, why));
  }

  const MoeRunnerConfig& config_;
  const ExpertKernel& w2_;
  DispatchFormat format_;
  GroupedMatmulMode mode13_, mode2_;
};

}  // namespace

const RowActivation& AscendActivation::object() const {
  SY_CHECK(component.has_value());
  return *component;
}

AscendActivation SelectAscendActivation(const MoeRunnerConfig& config, const ExpertKernel& w13,
                                        const ExpertKernel& w2, DispatchFormat format) {
  return Selection(config, w13, w2, format).Choose();
}

}  // namespace switchyard::moe
