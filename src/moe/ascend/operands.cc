#include "switchyard/moe/ascend/operands.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels/decode/decode.h"
#include "quant/matrix.h"
#include "quant/packing.h"
#include "switchyard/core/error.h"

namespace switchyard::moe::ascend {

struct CanonicalWeights::Impl {
  explicit Impl(std::vector<quant::QuantMatrix> matrices) : bank(std::move(matrices)) {}

  quant::MatrixBank bank;
  std::vector<float> bias;  // [E, N]
  std::vector<const float*> bias_of;
  std::vector<int32_t> int_bias;  // [E, N]
  std::vector<const int32_t*> int_bias_of;
};

namespace {

// The most that a checksum's own rounding may account for.
constexpr double kScaleBiasTolerance = 1e-2;

// One tensor of a prefix, with what its errors say.
struct Operand {
  const TensorView& view;
  std::string name;  // "layer 3: w13 weight_scale"

  bool present() const { return view.data != nullptr; }
  [[noreturn]] void Refuse(const std::string& what) const {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", name, what));
  }
  [[noreturn]] void RefuseShape(const std::string& expected) const {
    Refuse(fmt::format("expected {}, found {} {}", expected, DTypeName(view.dtype),
                       view.shape.ToString()));
  }
  // Elements from `first` on, `count` of them.
  template <typename T>
  std::span<const T> Elements(size_t first, size_t count) const {
    return {reinterpret_cast<const T*>(view.data) + first, count};
  }
};

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// [E, N], perhaps with an axis of 1.
bool IsPerChannel(const TensorView& view, size_t experts, size_t n) {
  return view.shape.rank() >= 2 && view.shape[0] == experts && view.NumElements() == experts * n;
}

// Reads the operands of one prefix, an expert at a time.
class Importer {
 public:
  Importer(GroupedMatmulMode mode, const AscendOperands& operands, std::string_view name,
           size_t layer_id)
      : mode_(mode),
        transposed_(operands.transposed),
        prefix_(fmt::format("layer {}: {} ({})", layer_id, name, GroupedMatmulModeName(mode))),
        weight_{operands.weight, prefix_ + " weight"},
        scale_{operands.weight_scale, prefix_ + " weight_scale"},
        offset_{operands.weight_offset, prefix_ + " weight_offset"} {
    if (!weight_.present()) weight_.Refuse("is missing");
    if (weight_.view.shape.rank() != 3) weight_.RefuseShape("three dimensions");
    experts_ = weight_.view.shape[0];
    FindSizes();
    FindScales();
  }

  size_t experts() const { return experts_; }
  size_t rows() const { return n_; }

  std::vector<quant::QuantMatrix> Matrices() const {
    std::vector<quant::QuantMatrix> matrices;
    for (size_t e = 0; e < experts_; ++e) {
      matrices.push_back(quant::QuantMatrix::Make(format_, n_, k_));
      FillCodes(e, matrices.back());
      FillScales(e, matrices.back());
    }
    return matrices;
  }

 private:
  bool IsInt4() const {
    return mode_ == GroupedMatmulMode::kW4A8Int || mode_ == GroupedMatmulMode::kW4A4Int ||
           (mode_ == GroupedMatmulMode::kW4A16 && !eight_bit_);
  }
  bool IsFp4() const {
    return mode_ == GroupedMatmulMode::kW4A8MxFp4 || mode_ == GroupedMatmulMode::kW4A4MxFp4;
  }
  bool IsMx() const { return IsFp4() || mode_ == GroupedMatmulMode::kMxFp8; }

  // N and K from the weight, and the type of the canonical codes.
  void FindSizes() {
    const DType dtype = weight_.view.dtype;
    const size_t a = weight_.view.shape[1];
    const size_t b = weight_.view.shape[2];
    n_ = transposed_ ? b : a;
    k_ = transposed_ ? a : b;
    switch (mode_) {
      case GroupedMatmulMode::kUnquantized:
        if (!IsFloat(dtype)) weight_.RefuseShape("f32, f16 or bf16");
        format_.dtype = dtype;
        return;
      case GroupedMatmulMode::kW8A8:
        if (dtype != DType::kI8) weight_.RefuseShape("i8");
        format_.dtype = DType::kI8;
        return;
      case GroupedMatmulMode::kMxFp8:
        if (dtype != DType::kF8E4M3) weight_.RefuseShape("e4m3");
        format_.dtype = DType::kF8E4M3;
        return;
      case GroupedMatmulMode::kW4A8MxFp4:
      case GroupedMatmulMode::kW4A4MxFp4:
        if (dtype != DType::kU8 && dtype != DType::kI8) weight_.RefuseShape("bytes of two e2m1");
        format_.dtype = DType::kF4E2M1;
        k_ *= 2;
        return;
      case GroupedMatmulMode::kW4A16:
        eight_bit_ = dtype == DType::kI8 && scale_.present() && transposed_ &&
                     scale_.view.shape.rank() == 3 && scale_.view.shape[2] == b;
        format_.dtype = eight_bit_ ? DType::kU8 : DType::kU4;
        if (eight_bit_) return;
        break;
      case GroupedMatmulMode::kW4A8Int:
      case GroupedMatmulMode::kW4A4Int: format_.dtype = DType::kI4; break;
    }
    FindInt4Sizes(dtype);
  }

  void FindInt4Sizes(DType dtype) {
    const bool words = dtype == DType::kI32 && transposed_;
    if (!words && dtype != DType::kI8 && dtype != DType::kU8)
      weight_.RefuseShape("i32 [E, Kd, N/8], or bytes of two channels");
    n_ *= words ? 8 : 2;
    if (transposed_ && n_ % 8 != 0)
      weight_.Refuse(fmt::format("{} channels are no multiple of 8", n_));
  }

  // The grid, and that the scales fit it.
  void FindScales() {
    if (mode_ == GroupedMatmulMode::kUnquantized) {
      if (scale_.present()) scale_.Refuse("un-quantised weights have no scale");
      return;
    }
    if (!scale_.present()) scale_.Refuse("is missing");
    format_.scale_rows = 1;
    if (IsMx()) {
      FindMxScales();
      return;
    }
    const DType dtype = scale_.view.dtype;
    if (!IsFloat(dtype) && dtype != DType::kI64)
      scale_.RefuseShape("f32, f16, bf16 or the bits of f32 in i64");
    format_.scale_dtype = dtype == DType::kI64 ? DType::kF32 : dtype;
    const std::span<const size_t> dims = scale_.view.shape.dims();
    const bool per_channel = IsPerChannel(scale_.view, experts_, n_);
    const bool may_group =
        mode_ == GroupedMatmulMode::kW4A8Int || mode_ == GroupedMatmulMode::kW4A16;
    const bool grouped = dims.size() == 3 && dims[0] == experts_ && dims[2] == n_ && dims[1] != 0 &&
                         k_ % dims[1] == 0 && may_group;
    if (!per_channel && !grouped)
      scale_.RefuseShape(
          fmt::format("[{}, {}]{}", experts_, n_,
                      may_group ? fmt::format(" or [{}, {}/g, {}]", experts_, k_, n_) : ""));
    groups_ = per_channel ? 1 : dims[1];
    format_.scale_cols = std::max<size_t>(1, k_ / groups_);
    if (mode_ != GroupedMatmulMode::kW4A16) return;
    format_.has_zero = true;
    if (offset_.present() &&
        (!IsFloat(offset_.view.dtype) || offset_.view.shape != scale_.view.shape))
      offset_.RefuseShape(fmt::format("the shape of the scale, {}", scale_.view.shape.ToString()));
  }

  void FindMxScales() {
    const DType dtype = scale_.view.dtype;
    if (dtype != DType::kU8 && dtype != DType::kF8E8M0) scale_.RefuseShape("e8m0");
    format_.scale_dtype = DType::kF8E8M0;
    format_.scale_cols = 32;
    groups_ = quant::CeilDiv(k_, 32);
    const Shape pairs{experts_, k_ / 64, n_, 2};
    const Shape rows{experts_, n_, groups_};
    pairs_ = scale_.view.shape == pairs && k_ % 64 == 0;
    if (!pairs_ && (transposed_ || scale_.view.shape != rows))
      scale_.RefuseShape(fmt::format("{}, Kd a multiple of 64{}", pairs.ToString(),
                                     transposed_ ? "" : fmt::format("; or {}", rows.ToString())));
  }

  void FillCodes(size_t e, quant::QuantMatrix& matrix) const {
    if (IsInt4()) {
      FillInt4(e, matrix);
      return;
    }
    const size_t bytes = DTypeBytes(weight_.view.dtype);
    const size_t width = IsFp4() ? k_ / 2 : k_;  // elements of the file in a row
    const std::byte* from = weight_.view.data + e * n_ * width * bytes;
    const size_t row_bytes = BytesOf(format_.dtype, matrix.stride);
    for (size_t n = 0; n < n_; ++n) {
      std::byte* to = matrix.data.data() + n * row_bytes;
      for (size_t k = 0; k < width; ++k) {
        const size_t at = transposed_ ? k * n_ + n : n * width + k;
        std::memcpy(to + k * bytes, from + at * bytes, bytes);
      }
      // q - 128 of 8-bit W4A16 becomes q.
      for (size_t k = 0; eight_bit_ && k < width; ++k) to[k] ^= std::byte{0x80};
    }
  }

  // Channels 2j and 2j + 1 share a byte in both layouts; a word is four bytes, lowest first.
  void FillInt4(size_t e, quant::QuantMatrix& matrix) const {
    const std::byte* from = weight_.view.data + e * n_ / 2 * k_;
    const int flip = mode_ == GroupedMatmulMode::kW4A16 ? 8 : 0;
    for (size_t n = 0; n < n_; ++n) {
      for (size_t k = 0; k < k_; ++k) {
        const size_t at = transposed_ ? k * (n_ / 2) + n / 2 : n / 2 * k_ + k;
        const int byte = std::to_integer<int>(from[at]);
        matrix.SetCode(n, k, (n % 2 == 0 ? byte & 15 : byte >> 4) ^ flip);
      }
    }
  }

  void FillScales(size_t e, quant::QuantMatrix& matrix) const {
    if (mode_ == GroupedMatmulMode::kUnquantized) return;
    const size_t first = e * groups_ * n_;
    if (IsMx()) {
      const std::span<const uint8_t> bytes = scale_.Elements<uint8_t>(first, groups_ * n_);
      const std::vector<uint8_t> rows = pairs_ ? quant::JoinScalePairs(scale_.name, bytes, n_)
                                               : std::vector<uint8_t>(bytes.begin(), bytes.end());
      std::memcpy(matrix.scale.data(), rows.data(), rows.size());
      return;
    }
    std::vector<float> scales(groups_ * n_);
    if (scale_.view.dtype == DType::kI64) {
      scales = quant::NarrowScaleBits(scale_.name, scale_.Elements<int64_t>(first, scales.size()));
    } else {
      for (size_t i = 0; i < scales.size(); ++i)
        scales[i] = kernels::ScaleAt(scale_.view.dtype, scale_.view.data, first + i);
    }
    for (size_t j = 0; j < groups_; ++j) {
      for (size_t n = 0; n < n_; ++n) {
        matrix.SetScale(n, j, scales[j * n_ + n]);
        if (format_.has_zero)
          matrix.zero[n * matrix.scale_stride + j] = std::byte{Zero(first + j * n_ + n)};
      }
    }
  }

  // (code - middle + offset) * scale = (code - (middle - offset)) * scale.
  uint8_t Zero(size_t at) const {
    const float middle = eight_bit_ ? 128.0f : 8.0f;
    const float offset =
        offset_.present() ? kernels::ScaleAt(offset_.view.dtype, offset_.view.data, at) : 0.0f;
    const float zero = middle - offset;
    if (!(zero >= 0.0f && zero <= 255.0f) || zero != std::floor(zero)) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}: offset {} at {} gives no whole zero point from 0 to 255",
                              offset_.name, offset, at));
    }
    return static_cast<uint8_t>(zero);
  }

  GroupedMatmulMode mode_;
  bool transposed_;
  std::string prefix_;
  Operand weight_, scale_, offset_;
  size_t experts_ = 0, n_ = 0, k_ = 0;
  size_t groups_ = 1;
  bool eight_bit_ = false;
  bool pairs_ = false;
  MatrixFormat format_;
};

std::span<const float> FloatBias(const Operand& bias, size_t experts, size_t n) {
  if (bias.view.dtype != DType::kF32 || !IsPerChannel(bias.view, experts, n))
    bias.RefuseShape(fmt::format("f32 [{}, {}]", experts, n));
  return bias.Elements<float>(0, experts * n);
}

void CheckScaleBias(const Operand& bias, const ExpertMatrices& w) {
  const std::span<const float> values = FloatBias(bias, w.num_experts(), w.rows);
  for (size_t e = 0; e < w.num_experts(); ++e) {
    const double deviation =
        quant::ScaleBiasDeviation(bias.name, w, e, values.subspan(e * w.rows, w.rows));
    if (deviation <= kScaleBiasTolerance) continue;
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: expert {}: differs from 8 * sum of the weights by {:.3g} of its "
                            "size; the weights or their scales are not those of this file",
                            bias.name, e, deviation));
  }
}

}  // namespace

CanonicalWeights::CanonicalWeights(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CanonicalWeights::CanonicalWeights(CanonicalWeights&&) noexcept = default;
CanonicalWeights& CanonicalWeights::operator=(CanonicalWeights&&) noexcept = default;
CanonicalWeights::~CanonicalWeights() = default;

ExpertMatrices CanonicalWeights::View() const {
  ExpertMatrices view = impl_->bank.View();
  view.bias = impl_->bias_of;
  return view;
}

std::span<const int32_t* const> CanonicalWeights::int_bias() const { return impl_->int_bias_of; }

CanonicalWeights ImportOperands(GroupedMatmulMode mode, const AscendOperands& operands,
                                std::string_view name, size_t layer_id) {
  const Importer importer(mode, operands, name, layer_id);
  auto impl = std::make_unique<CanonicalWeights::Impl>(importer.Matrices());
  const std::string prefix =
      fmt::format("layer {}: {} ({})", layer_id, name, GroupedMatmulModeName(mode));
  const size_t experts = importer.experts();
  const size_t n = importer.rows();
  Operand bias{operands.weight_bias, prefix + " weight_bias"};
  const Operand scale_bias{operands.scale_bias, prefix + " scale_bias"};
  if (scale_bias.present() && mode == GroupedMatmulMode::kW8A8 &&
      scale_bias.view.dtype == DType::kI32) {
    if (!IsPerChannel(scale_bias.view, experts, n))
      scale_bias.RefuseShape(fmt::format("i32 [{}, {}]", experts, n));
    const std::span<const int32_t> values = scale_bias.Elements<int32_t>(0, experts * n);
    impl->int_bias.assign(values.begin(), values.end());
    for (size_t e = 0; e < experts; ++e) impl->int_bias_of.push_back(impl->int_bias.data() + e * n);
    return CanonicalWeights(std::move(impl));
  }
  if (scale_bias.present() && mode == GroupedMatmulMode::kW4A8Int)
    CheckScaleBias(scale_bias, impl->bank.View());
  const bool takes_scale_bias = scale_bias.present() && mode != GroupedMatmulMode::kW4A8Int;
  const Operand& taken = takes_scale_bias ? scale_bias : bias;
  if (taken.present()) {
    const std::span<const float> values = FloatBias(taken, experts, n);
    impl->bias.assign(values.begin(), values.end());
    for (size_t e = 0; e < experts; ++e) impl->bias_of.push_back(impl->bias.data() + e * n);
  }
  return CanonicalWeights(std::move(impl));
}

W4A4Packing W4A4PackingOf(const Settings& settings) {
  return settings.GetFlag("moe-w4a4-new-packing") ? W4A4Packing::kNew : W4A4Packing::kOld;
}

CanonicalWeights ImportW4A4Checkpoint(W4A4Packing packing, const TensorView& weight,
                                      const TensorView& scale, std::string_view name,
                                      size_t layer_id) {
  const std::string prefix = fmt::format("layer {}: {} (W4A4 int)", layer_id, name);
  const Operand weight_operand{weight, prefix + " weight"};
  const Operand scale_operand{scale, prefix + " weight_scale"};
  if (weight.shape.rank() != 3 || weight.dtype != DType::kI8)
    weight_operand.RefuseShape("i8 [E, N, K] or [E, N/2, K]");
  const Shape& scale_shape = scale.shape;
  const bool is_column =
      scale_shape.rank() == 2 || (scale_shape.rank() == 3 && scale_shape[2] == 1);
  if (!is_column || scale.dtype != DType::kF32 || scale_shape[0] != weight.shape[0])
    scale_operand.RefuseShape(fmt::format("f32 [{}, N, 1]", weight.shape[0]));
  const size_t n = scale_shape[1];
  const size_t k = weight.shape[2];
  const bool is_new = packing == W4A4Packing::kNew;
  const size_t stored = is_new ? n / 2 : n;
  if (weight.shape[1] != stored || (is_new && n % 2 != 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: expected [{}, {}, {}] in the {} packing of {} channels, found {}; "
                            "is this the other packing? SGLANG_NPU_W4A4_NEW_PACKING (setting "
                            "moe-w4a4-new-packing) is {}",
                            weight_operand.name, weight.shape[0], stored, k, is_new ? "new" : "old",
                            n, weight.shape.ToString(), is_new ? 1 : 0));
  }
  std::vector<quant::QuantMatrix> matrices;
  for (size_t e = 0; e < weight.shape[0]; ++e) {
    const quant::PackedShape shape{weight_operand.name, n, k, 0};
    const std::span<const int8_t> codes =
        weight_operand.Elements<int8_t>(e * stored * k, stored * k);
    const quant::RawScales scales{DType::kF32,
                                  {scale.data + e * n * sizeof(float), n * sizeof(float)}};
    matrices.push_back(is_new ? quant::ImportPairedRows(shape, stored, codes, scales)
                              : quant::ImportInt4Bytes(shape, stored, codes, scales));
  }
  return CanonicalWeights(std::make_unique<CanonicalWeights::Impl>(std::move(matrices)));
}

}  // namespace switchyard::moe::ascend
