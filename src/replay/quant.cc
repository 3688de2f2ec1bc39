// Kind "quant": one operation on numbers each: quantise, pack or dequantise.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "kernels/decode/decode.h"
#include "model/config_reader.h"
#include "quant/act_quant.h"
#include "quant/expert_matmul.h"
#include "quant/packing.h"
#include "quant/weight_quant.h"
#include "replay/case.h"
#include "switchyard/core/error.h"

namespace switchyard::replay {
namespace {

class QuantCase {
 public:
  explicit QuantCase(const KindInput& input) : file_(input.file), context_(input.context) {}

  KindOutput Run() {
    const std::string op = file_.Text("op");
    for (const auto& [name, run] : kOps) {
      if (name != op) continue;
      (this->*run)();
      return std::move(output_);
    }
    throw Error(ErrorCode::kUnsupported,
                fmt::format("case {}: unknown operation {}", file_.name(), QuoteForMessage(op)));
  }

 private:
  // A float tensor of two axes, as rows.
  struct Matrix {
    std::vector<float> values;
    size_t rows, cols;
    ConstRows View() const { return ConstRows(values.data(), rows, cols); }
  };

  Shape ShapeOf(std::string_view tensor, size_t rank) const {
    const Shape shape = file_.View(tensor).shape;
    if (shape.rank() != rank) {
      file_.Corrupt(fmt::format("tensor \"{}\" has shape {}, expected {} axes", tensor,
                                shape.ToString(), rank));
    }
    return shape;
  }
  Matrix ReadMatrix(std::string_view tensor) const {
    const Shape shape = ShapeOf(tensor, 2);
    return {file_.F32(tensor), shape[0], shape[1]};
  }
  std::span<const uint8_t> Bytes(std::string_view tensor, DType dtype) const {
    const TensorView view = file_.View(tensor);
    if (view.dtype != dtype) {
      file_.Corrupt(fmt::format("tensor \"{}\" has dtype {}, expected {}", tensor,
                                DTypeName(view.dtype), DTypeName(dtype)));
    }
    return {reinterpret_cast<const uint8_t*>(view.data), view.NumBytes()};
  }
  MxScaleRule ScaleRule() const {
    const std::string rule = file_.Text("scale_rule");
    if (rule == "ceil") return MxScaleRule::kCeil;
    if (rule != "ocp_floor") Unknown("scale_rule", rule);
    return MxScaleRule::kOcpFloor;
  }
  MxRounding Rounding() const {
    const std::string rounding = file_.Text("rounding");
    if (rounding == "half_to_zero") return MxRounding::kHalfToZero;
    if (rounding != "nearest_even") Unknown("rounding", rounding);
    return MxRounding::kHalfToEven;
  }
  [[noreturn]] void Unknown(std::string_view key, const std::string& value) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("case {}: unknown {} {}", file_.name(), key, QuoteForMessage(value)));
  }

  template <typename Range>
  void Put(const char* name, const Shape& shape, const Range& values) {
    output_.outputs[name] = {shape, {values.begin(), values.end()}};
  }

  // Codes and scales of quantised rows: integers as such, floats as their bytes.
  void PutRows(const QuantRows& rows, size_t scale_rank) {
    std::vector<double> codes, scales;
    const size_t bytes = BytesOf(rows.dtype, rows.cols);
    for (size_t i = 0; i < rows.rows; ++i) {
      for (size_t k = 0; k < bytes; ++k) {
        const DType dtype = rows.dtype == DType::kI8 ? DType::kI8 : DType::kU8;
        codes.push_back(kernels::CodeAt(dtype, rows.Row(i), k));
      }
    }
    const bool one_scale = rows.scale_stride == 0;
    const size_t num_scales = one_scale ? 1 : rows.rows * rows.scale_stride;
    for (size_t i = 0; i < num_scales; ++i) {
      scales.push_back(rows.scale_dtype == DType::kF8E8M0
                           ? kernels::CodeAt(DType::kU8, rows.scale, i)
                           : double{kernels::ScaleAt(rows.scale_dtype, rows.scale, i)});
    }
    Put("out.q", {rows.rows, bytes}, codes);
    if (one_scale) {
      Put("out.scale", {1}, scales);
    } else if (scale_rank == 1) {
      Put("out.scale", {rows.rows}, scales);
    } else {
      Put("out.scale", {rows.rows, rows.scale_stride}, scales);
    }
  }

  void QuantizeActivations(ActQuant how, size_t scale_rank) {
    const Matrix x = ReadMatrix("in.x");
    how.amax_floor = static_cast<float>(file_.NumberOr("eps", 0));
    PutRows(quant::QuantizeRows(context_, x.View(), how), scale_rank);
  }
  static ActQuant Of(ActQuantKind kind) {
    ActQuant how;
    how.kind = kind;
    return how;
  }

  void Int8PerToken() { QuantizeActivations(Of(ActQuantKind::kInt8Token), 1); }
  void Fp8PerToken() { QuantizeActivations(Of(ActQuantKind::kFp8Token), 1); }
  void Fp8PerTensor() { QuantizeActivations(Of(ActQuantKind::kFp8Tensor), 1); }
  void Fp8Static() {
    file_.View("in.scale", {1});
    ActQuant how = Of(ActQuantKind::kFp8TensorStatic);
    how.scale = file_.F32("in.scale")[0];
    QuantizeActivations(how, 1);
  }
  void Fp8PerTokenGroup() {
    ActQuant how = Of(ActQuantKind::kFp8Group);
    how.group = file_.Size("group");
    QuantizeActivations(how, 2);
  }
  void MxFp8() {
    ActQuant how = Of(ActQuantKind::kMxFp8);
    how.mx_rule = ScaleRule();
    QuantizeActivations(how, 2);
  }

  void MxFp4() {
    ActQuant how = Of(ActQuantKind::kMxFp4);
    how.mx_rule = ScaleRule();
    how.mx_rounding = Rounding();
    const Matrix x = ReadMatrix("in.x");
    const QuantRows rows = quant::QuantizeRows(context_, x.View(), how);
    PutRows(rows, 2);
    // The sign of a zero says nothing; the cases have it negative under one rounding and positive
    // under the other, whatever the sign of the value was.
    std::vector<double>& codes = output_.outputs["out.q"].values;
    const unsigned zero = how.mx_rounding == MxRounding::kHalfToZero ? 8 : 0;
    for (size_t i = 0; i < x.values.size(); ++i) {
      if (x.values[i] != 0.0f) continue;
      const size_t at = i / x.cols * BytesOf(rows.dtype, x.cols) + i % x.cols / 2;
      const auto byte = static_cast<unsigned>(codes[at]);
      codes[at] = i % x.cols % 2 == 0 ? (byte & 0xf0u) | zero : (byte & 0x0fu) | (zero << 4);
    }
    std::vector<float> values(x.values.size());
    quant::DequantizeRows(context_, rows, Rows(values.data(), x.rows, x.cols));
    Put("out.dequant", {x.rows, x.cols}, values);
  }

  void Fp8BlockWeight() {
    const auto& config = file_.config();
    const auto block = config.find("block");
    if (block == config.end() || !block->is_array() || block->size() != 2 ||
        !(*block)[0].is_number_unsigned() || !(*block)[1].is_number_unsigned()) {
      file_.Corrupt("\"block\" of the config is not a list of two sizes");
    }
    const Matrix w = ReadMatrix("in.w");
    quant::QuantMatrix matrix = quant::QuantizeMatrix(
        w.View(),
        quant::WeightQuant::Fp8Block((*block)[0].get<size_t>(), (*block)[1].get<size_t>()));
    const auto* codes = reinterpret_cast<const uint8_t*>(matrix.data.data());
    Put("out.q", {w.rows, w.cols}, std::span(codes, matrix.data.size()));
    PutScales({matrix.grid_rows(), matrix.scale_stride}, matrix);
    PutValues("out.dequant", std::move(matrix), false);
  }

  void PutScales(const Shape& shape, const quant::QuantMatrix& matrix) {
    std::vector<double> scales;
    for (size_t i = 0; i < matrix.grid_rows() * matrix.scale_stride; ++i) {
      scales.push_back(double{kernels::ScaleAt(matrix.format.scale_dtype, matrix.scale.data(), i)});
    }
    Put("out.scale", shape, scales);
  }

  // The values of a matrix [N, K], or transposed.
  void PutValues(const char* name, quant::QuantMatrix matrix, bool transposed) {
    const size_t rows = matrix.rows;
    const size_t cols = matrix.cols;
    std::vector<quant::QuantMatrix> one;
    one.push_back(std::move(matrix));
    const quant::MatrixBank bank(std::move(one));
    std::vector<double> values(rows * cols);
    for (size_t n = 0; n < rows; ++n) {
      for (size_t k = 0; k < cols; ++k) {
        values[transposed ? k * rows + n : n * cols + k] =
            quant::MatrixElement(bank.View(), 0, n, k);
      }
    }
    Put(name, transposed ? Shape{cols, rows} : Shape{rows, cols}, values);
  }

  void AwqDequant() {
    const Shape packed = ShapeOf("in.qweight", 2);
    const size_t k = packed[0];
    const size_t n = packed[1] * 8;
    const std::span<const uint8_t> scale_bytes = Bytes("in.scales", DType::kF16);
    const std::vector<int32_t> qweight = file_.I32("in.qweight");
    const std::vector<int32_t> qzeros = file_.I32("in.qzeros");
    PutValues("out.w",
              quant::ImportAwq({file_.name(), n, k, file_.Size("group")},
                               {qweight, qzeros, {DType::kF16, std::as_bytes(scale_bytes)}}),
              true);
  }

  void QuarkInt4Pack() {
    const Matrix w = ReadMatrix("in.w");
    const quant::QuantMatrix matrix =
        quant::QuantizeMatrix(w.View(), quant::WeightQuant::Int4Channel());
    Put("out.q", {w.rows, w.cols}, quant::ExportInt4Bytes(matrix));
    Put("out.packed", {w.rows, w.cols / 8}, quant::ExportQuarkInt4(matrix));
    PutScales({w.rows}, matrix);
  }

  void NpuInt4Pack() {
    const Shape shape = ShapeOf("in.q", 3);
    const std::span<const uint8_t> bytes = Bytes("in.q", DType::kI8);
    const size_t experts = shape[0];
    const size_t per_expert = shape[1] * shape[2];
    const std::vector<float> scales(shape[1], 1.0f);
    std::vector<double> packed;
    for (size_t e = 0; e < experts; ++e) {
      const auto* codes = reinterpret_cast<const int8_t*>(bytes.data()) + e * per_expert;
      const quant::QuantMatrix matrix = quant::ImportInt4Bytes(
          {file_.name(), shape[1], shape[2], 0}, shape[1], {codes, per_expert},
          {DType::kF32, std::as_bytes(std::span(scales))});
      std::ranges::copy(quant::ExportPairedRows(matrix), std::back_inserter(packed));
    }
    Put("out.packed", {experts, shape[1] / 2, shape[2]}, packed);
  }

  void Int4UnpackOffset8() {
    const Shape shape = ShapeOf("in.packed", 2);
    const std::vector<float> scales(shape[0], 1.0f);
    Put("out.q", {shape[0], shape[1] * 8},
        quant::ExportInt4Bytes(
            quant::ImportWna16({file_.name(), shape[0], shape[1] * 8, 0}, file_.I32("in.packed"),
                               {DType::kF32, std::as_bytes(std::span(scales))})));
  }

  void NvFp4Dequant() {
    const Shape shape = ShapeOf("in.q", 2);
    PutValues("out.w",
              quant::ImportNvFp4({file_.name(), shape[0], shape[1] * 2, 0},
                                 Bytes("in.q", DType::kU8), Bytes("in.scale", DType::kF8E4M3),
                                 static_cast<float>(file_.Number("global_scale"))),
              false);
  }

  using Op = void (QuantCase::*)();
  static const std::array<std::pair<std::string_view, Op>, 13> kOps;

  const CaseFile& file_;
  ExecContext& context_;
  KindOutput output_;
};

constexpr std::array<std::pair<std::string_view, QuantCase::Op>, 13> QuantCase::kOps = {{
    {"int8_per_token", &QuantCase::Int8PerToken},
    {"fp8_per_token", &QuantCase::Fp8PerToken},
    {"fp8_per_tensor", &QuantCase::Fp8PerTensor},
    {"fp8_static", &QuantCase::Fp8Static},
    {"fp8_per_token_group", &QuantCase::Fp8PerTokenGroup},
    {"fp8_block_weight", &QuantCase::Fp8BlockWeight},
    {"mxfp4", &QuantCase::MxFp4},
    {"mxfp8", &QuantCase::MxFp8},
    {"awq_dequant", &QuantCase::AwqDequant},
    {"quark_int4_pack", &QuantCase::QuarkInt4Pack},
    {"npu_int4_pack", &QuantCase::NpuInt4Pack},
    {"int4_unpack_offset8", &QuantCase::Int4UnpackOffset8},
    {"nvfp4_dequant", &QuantCase::NvFp4Dequant},
}};

}  // namespace

KindOutput ReplayQuant(const KindInput& input) { return QuantCase(input).Run(); }

}  // namespace switchyard::replay
