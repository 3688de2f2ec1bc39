// Kind "qlayer": hidden states, routing and quantised weights to the layer's output, weight-only
// (out.y_plain) or with the scheme's activation quantisation (out.y_sim).
#include <fmt/format.h>

#include <memory>

#include "quant/packing.h"
#include "replay/layer_case.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

// A bank of one prefix with what was made for it: imported matrices, rounded scales.
struct StoredBank {
  moe::ExpertBank bank;
  std::vector<std::unique_ptr<quant::QuantMatrix>> matrices;
  std::vector<BF16> scales;
};

class BankReader {
 public:
  BankReader(const KindInput& input, const LayerCase& layer, std::string prefix, size_t n, size_t k)
      : file_(input.file),
        scheme_(input.file.Text("scheme")),
        prefix_(std::move(prefix)),
        experts_(layer.num_experts()),
        n_(n),
        k_(k),
        group_(input.file.SizeOr("group", 0)) {}

  StoredBank Read() const {
    if (scheme_ == "awq_int4" || scheme_ == "wna16_int4" || scheme_ == "modelslim_w4a8" ||
        scheme_ == "modelslim_w4a4" || scheme_ == "quark_int4fp8")
      return Imported();
    StoredBank stored{AsStored(), {}, {}};
    if (scheme_ == "modelslim_w8a8") RoundScales(stored);
    return stored;
  }

 private:
  std::string Name(std::string_view what) const { return fmt::format("w.{}_{}", prefix_, what); }

  // Elements of an expert's part of a tensor [E, ...].
  template <typename T>
  std::span<const T> Part(std::string_view what, size_t expert) const {
    const TensorView view = file_.View(Name(what));
    if (view.shape.rank() == 0 || view.shape[0] != experts_ || DTypeBytes(view.dtype) != sizeof(T))
      file_.Corrupt(fmt::format("tensor {} must have {} experts of {}-byte elements", Name(what),
                                experts_, sizeof(T)));
    const size_t count = view.NumElements() / experts_;
    return {reinterpret_cast<const T*>(view.data) + expert * count, count};
  }

  // Formats that are used as they lie in the file.
  MatrixFormat Format() const {
    MatrixFormat format;
    format.scale_rows = 1;
    format.scale_cols = k_;
    if (scheme_ == "int8_w8a8" || scheme_ == "modelslim_w8a8") {
      format.dtype = DType::kI8;
    } else if (scheme_ == "fp8_channel") {
      format.dtype = DType::kF8E4M3;
    } else if (scheme_ == "fp8_tensor") {
      format.dtype = DType::kF8E4M3;
      format.scale_rows = n_;
    } else if (scheme_ == "fp8_block") {
      format.dtype = DType::kF8E4M3;
      format.scale_rows = format.scale_cols = 128;
    } else if (scheme_ == "mxfp4" || scheme_ == "mxfp8") {
      format.dtype = scheme_ == "mxfp4" ? DType::kF4E2M1 : DType::kF8E4M3;
      format.scale_dtype = DType::kF8E8M0;
      format.scale_cols = 32;
    } else {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("case {}: unknown scheme \"{}\"", file_.name(), scheme_));
    }
    return format;
  }

  moe::ExpertBank AsStored() const {
    moe::ExpertBank bank;
    bank.format = Format();
    bank.rows = n_;
    bank.cols = k_;
    const size_t scales =
        quant::CeilDiv(n_, bank.format.scale_rows) * quant::CeilDiv(k_, bank.format.scale_cols);
    const bool e8m0 = bank.format.scale_dtype == DType::kF8E8M0;
    for (size_t e = 0; e < experts_; ++e) {
      const std::span<const uint8_t> codes = Part<uint8_t>("q", e);
      const std::span<const std::byte> scale =
          e8m0 ? std::as_bytes(Part<uint8_t>("scale", e)) : std::as_bytes(Part<float>("scale", e));
      if (codes.size() != BytesOf(bank.format.dtype, n_ * k_) ||
          scale.size() != scales * DTypeBytes(bank.format.scale_dtype))
        file_.Corrupt(fmt::format("tensors {} and {} do not fit a {} matrix [{}, {}]", Name("q"),
                                  Name("scale"), scheme_, n_, k_));
      bank.data.push_back(reinterpret_cast<const std::byte*>(codes.data()));
      bank.scale.push_back(scale.data());
    }
    return bank;
  }

  // ModelSlim's loader rounds the scales of W8A8 to bf16.
  void RoundScales(StoredBank& stored) const {
    for (float scale : file_.F32(Name("scale"))) stored.scales.push_back(ToBF16(scale));
    stored.bank.format.scale_dtype = DType::kBF16;
    for (size_t e = 0; e < experts_; ++e)
      stored.bank.scale[e] = reinterpret_cast<const std::byte*>(stored.scales.data() + e * n_);
  }

  quant::QuantMatrix Import(size_t expert) const {
    const std::string name = Name("q");
    const quant::PackedShape shape{name, n_, k_, group_};
    if (scheme_ == "awq_int4")
      return quant::ImportAwq(shape, {Part<int32_t>("q", expert), Part<int32_t>("zeros", expert),
                                      quant::RawScales::Of(Part<F16>("scale", expert))});
    if (scheme_ == "wna16_int4")
      return quant::ImportWna16(shape, Part<int32_t>("q", expert),
                                {DType::kBF16, std::as_bytes(Part<BF16>("scale", expert))});
    const std::span<const float> channel = Part<float>("scale", expert);
    if (scheme_ == "quark_int4fp8")
      return quant::ImportQuarkInt4(shape, Part<int32_t>("q", expert),
                                    {DType::kF32, std::as_bytes(channel)});
    const size_t stored_rows = file_.View(name).shape[1];
    if (!file_.Has(Name("scale_second")))
      return quant::ImportPairedRows(shape, stored_rows, Part<int8_t>("q", expert),
                                     {DType::kF32, std::as_bytes(channel)});
    const std::vector<F16> combined =
        quant::CombineGroupScales(channel, Part<float>("scale_second", expert));
    return quant::ImportPairedRows(shape, stored_rows, Part<int8_t>("q", expert),
                                   {DType::kF16, std::as_bytes(std::span(combined))});
  }

  StoredBank Imported() const {
    StoredBank stored;
    for (size_t e = 0; e < experts_; ++e) {
      stored.matrices.push_back(std::make_unique<quant::QuantMatrix>(Import(e)));
      const quant::QuantMatrix& matrix = *stored.matrices.back();
      stored.bank.data.push_back(matrix.data.data());
      stored.bank.scale.push_back(matrix.scale.data());
      if (matrix.format.has_zero) stored.bank.zero.push_back(matrix.zero.data());
      stored.bank.format = matrix.format;
      stored.bank.stride = matrix.stride;
      stored.bank.scale_stride = matrix.scale_stride;
    }
    stored.bank.rows = n_;
    stored.bank.cols = k_;
    return stored;
  }

  const CaseFile& file_;
  std::string scheme_, prefix_;
  size_t experts_, n_, k_, group_;
};

// Our scheme for the names of the case: format and activation quantisation together.
std::string SchemeName(const CaseFile& file) {
  std::string scheme = file.Text("scheme");
  const std::string act = file.Text("act_quant");
  if (scheme == "fp8_tensor") return act == "fp8_tensor_static" ? "fp8_tensor_static" : scheme;
  if (scheme == "mxfp4" && act != "none") return act == "mxfp8" ? "mxfp4_w4a8" : "mxfp4_w4a4";
  if (scheme == "int8_w8a8" || scheme == "modelslim_w8a8") return "w8a8_int8";
  if (scheme == "modelslim_w4a8") return "w4a8_int";
  if (scheme == "modelslim_w4a4") return "w4a4_int";
  if (scheme == "awq_int4") return "awq";
  if (scheme == "wna16_int4") return "wna16";
  return scheme;
}

void ReadActQuant(const CaseFile& file, const std::string& scale, ActQuant& act) {
  if (file.HasConfig("mx_scale_rule"))
    act.mx_rule =
        file.Text("mx_scale_rule") == "ceil" ? MxScaleRule::kCeil : MxScaleRule::kOcpFloor;
  if (file.HasConfig("mx_rounding"))
    act.mx_rounding = file.Text("mx_rounding") == "half_to_zero" ? MxRounding::kHalfToZero
                                                                 : MxRounding::kHalfToEven;
  if (file.Has(scale)) {
    file.View(scale, {1});
    act.scale = file.F32(scale)[0];
  }
}

}  // namespace

KindOutput ReplayQLayer(const KindInput& input) {
  const CaseFile& file = input.file;
  const LayerCase layer(input);
  const size_t h = layer.hidden_size();
  const size_t i = layer.intermediate_size();
  const size_t w13_rows = layer.config().runner.is_gated ? 2 * i : i;
  StoredBank w13 = BankReader(input, layer, "w13", w13_rows, h).Read();
  StoredBank w2 = BankReader(input, layer, "w2", h, i).Read();
  ReadActQuant(file, "w.a13_scale", w13.bank.act);
  ReadActQuant(file, "w.a2_scale", w2.bank.act);
  moe::MoeLayerConfig config = layer.config();
  config.scheme_w13 = config.scheme_w2 = SchemeName(file);
  const bool quantized = input.options.activation_quant && file.Text("act_quant") != "none";
  KindOutput output;
  std::vector<double> y =
      layer.Run(input, config, layer.Weights(w13.bank, w2.bank), output.skipped);
  output.outputs[quantized ? "out.y_sim" : "out.y_plain"] = {{layer.num_tokens(), h}, std::move(y)};
  return output;
}

}  // namespace switchyard::replay
