#include <algorithm>

#include "kernels/panels/grid.h"
#include "kernels/panels/panel.h"

namespace switchyard::kernels {
namespace {

constexpr size_t kLine = 64;

size_t ToLines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

PanelFormat Codebook(PanelCodes codes, uint8_t bias, size_t group) {
  return {codes,     PanelValues::kLinear, bias, PanelScales::kSuperOdd, PanelOffsets::kNone, group,
          kSuperCols};
}

size_t UnitBytes(PanelCodes codes) {
  if (codes == PanelCodes::kTernary) return kTernaryWords * kWordBytes / kSuperUnits;
  if (IsGrid(codes)) return GridOf(codes).super_bytes() / kSuperUnits;
  return UnitWords(codes) * kWordBytes;
}

// Formats of ggml: blocks with their scales inside.
std::optional<PanelFormat> GgmlPanels(DType dtype) {
  using C = PanelCodes;
  using V = PanelValues;
  using S = PanelScales;
  using O = PanelOffsets;
  switch (dtype) {
    case DType::kGgmlQ40: return PanelFormat{C::kBits4, V::kLinear, 8, S::kF16, O::kNone, 32, 32};
    case DType::kGgmlQ41: return PanelFormat{C::kBits4, V::kLinear, 0, S::kF16, O::kF16, 32, 32};
    case DType::kGgmlQ50: return PanelFormat{C::kBits5, V::kLinear, 16, S::kF16, O::kNone, 32, 32};
    case DType::kGgmlQ51: return PanelFormat{C::kBits5, V::kLinear, 0, S::kF16, O::kF16, 32, 32};
    case DType::kGgmlQ80: return PanelFormat{C::kBytes, V::kLinear, 128, S::kF16, O::kNone, 32, 32};
    case DType::kGgmlIq4Nl: return PanelFormat{C::kBits4, V::kIq4Nl, 0, S::kF16, O::kNone, 32, 32};
    case DType::kGgmlMxFp4: return PanelFormat{C::kBits4, V::kE2M1, 0, S::kE8M0, O::kNone, 32, 32};
    case DType::kGgmlQ2K:
      return PanelFormat{C::kBits2, V::kLinear, 0, S::kSuperU4, O::kSuperMin, 16, 256};
    case DType::kGgmlQ3K:
      return PanelFormat{C::kBits3, V::kLinear, 4, S::kSuperI8, O::kNone, 16, 256};
    case DType::kGgmlQ4K:
      return PanelFormat{C::kBits4, V::kLinear, 0, S::kSuperU8, O::kSuperMin, 32, 256};
    case DType::kGgmlQ5K:
      return PanelFormat{C::kBits5, V::kLinear, 0, S::kSuperU8, O::kSuperMin, 32, 256};
    case DType::kGgmlQ6K:
      return PanelFormat{C::kBits6, V::kLinear, 32, S::kSuperI8, O::kNone, 16, 256};
    case DType::kGgmlIq4Xs:
      return PanelFormat{C::kBits4, V::kIq4Nl, 0, S::kSuperI8, O::kNone, 32, 256};
    case DType::kGgmlIq3S: return Codebook(C::kIq3S, kSignedBias, 32);
    case DType::kGgmlIq3Xxs: return Codebook(C::kIq3Xxs, kSignedBias, 32);
    case DType::kGgmlIq2S: return Codebook(C::kIq2S, kSignedBias, 16);
    case DType::kGgmlIq2Xs: return Codebook(C::kIq2Xs, kSignedBias, 16);
    case DType::kGgmlIq2Xxs: return Codebook(C::kIq2Xxs, kSignedBias, 32);
    case DType::kGgmlIq1S: return Codebook(C::kIq1, kIq1Bias, 32);
    case DType::kGgmlIq1M: return Codebook(C::kIq1, kIq1Bias, 16);
    case DType::kGgmlTq10:
      return PanelFormat{C::kTernary, V::kLinear, 1, S::kF16, O::kNone, 256, 256};
    case DType::kGgmlTq20:
      return PanelFormat{C::kBits2, V::kLinear, 1, S::kF16, O::kNone, 256, 256};
    default: return {};
  }
}

// Codes without their scales.
std::optional<PanelFormat> CodePanels(const MatrixFormat& format) {
  PanelFormat panels;
  switch (format.dtype) {
    case DType::kI8:
      panels.codes = PanelCodes::kBytes;
      panels.bias = 128;
      return panels;
    case DType::kU8: panels.codes = PanelCodes::kBytes; return panels;
    case DType::kI4:
      panels.codes = PanelCodes::kBits4;
      panels.bias = 8;
      return panels;
    case DType::kU4: panels.codes = PanelCodes::kBits4; return panels;
    case DType::kF4E2M1:
      panels.codes = PanelCodes::kBits4;
      panels.values = PanelValues::kE2M1;
      return panels;
    case DType::kF8E4M3: panels.codes = PanelCodes::kE4M3; return panels;
    default: return {};
  }
}

std::optional<PanelScales> FieldOf(DType scale_dtype) {
  switch (scale_dtype) {
    case DType::kF16: return PanelScales::kF16;
    case DType::kBF16: return PanelScales::kBF16;
    case DType::kF32: return PanelScales::kF32;
    case DType::kF8E8M0: return PanelScales::kE8M0;
    case DType::kF8E4M3: return PanelScales::kE4M3;
    default: return {};
  }
}

}  // namespace

std::optional<PanelFormat> FindPanelFormat(const MatrixFormat& format, size_t cols) {
  if (cols == 0 || format.has_column_groups) return {};
  if (IsGgmlBlock(format.dtype)) return GgmlPanels(format.dtype);
  if (format.dtype == DType::kBF16 || format.dtype == DType::kF16 || format.dtype == DType::kF32) {
    if (format.is_quantized()) return {};
    PanelFormat panels;
    panels.codes = format.dtype == DType::kBF16  ? PanelCodes::kBF16
                   : format.dtype == DType::kF16 ? PanelCodes::kF16
                                                 : PanelCodes::kF32;
    return panels;
  }
  std::optional<PanelFormat> panels = CodePanels(format);
  if (!panels || !format.is_quantized()) return {};
  if (format.scale_cols >= cols) {  // whole rows, whatever their type
    if (format.has_zero) return {};
    panels->scales = PanelScales::kRow;
    return panels;
  }
  const bool is_whole_units = format.scale_cols % kUnitCols == 0;
  if (!is_whole_units && format.scale_cols != 16) return {};
  panels->group = format.scale_cols;
  if (format.scale_rows % kPanelRows == 0 && is_whole_units) {
    if (format.has_zero || format.has_tensor_scale) return {};
    panels->scales = PanelScales::kGrid;
    panels->block = panels->group;
    return panels;
  }
  const std::optional<PanelScales> field = FieldOf(format.scale_dtype);
  if (format.scale_rows != 1 || !field) return {};
  if (format.has_tensor_scale && field != PanelScales::kE4M3) return {};
  panels->scales = *field;
  if (format.has_zero) panels->offsets = PanelOffsets::kZero;
  panels->block = std::max<size_t>(panels->group, kUnitCols);
  return panels;
}

namespace {

// At most kSuperCols, which is whole groups of activations too, but whole groups and blocks.
size_t SliceCols(const PanelFormat& format, size_t cols) {
  const size_t step = std::max(format.group, format.block);
  return std::min(std::max<size_t>(kSuperCols / step, 1) * step, cols);
}

}  // namespace

PanelLayout LayoutOf(const PanelFormat& format, size_t cols) {
  PanelLayout layout;
  layout.cols = (cols + format.block - 1) / format.block * format.block;
  layout.groups = format.group == 0 ? 0 : layout.cols / format.group;
  switch (format.scales) {
    case PanelScales::kRow: layout.header_bytes = kPanelRows * sizeof(float); break;
    case PanelScales::kGrid: layout.header_bytes = ToLines(layout.groups * sizeof(float)); break;
    case PanelScales::kE4M3: layout.header_bytes = kLine; break;
    default: break;
  }
  const bool has_fields = ScaleBytes(format.scales) != 0;
  layout.slice_cols = has_fields ? SliceCols(format, layout.cols) : layout.cols;
  const auto field = [&](size_t count, size_t bytes) {
    const PanelField at{layout.units_at, count};
    layout.units_at += ToLines(count * kPanelRows * bytes);
    return at;
  };
  const size_t groups = has_fields ? layout.slice_cols / format.group : 0;
  const size_t supers = IsSuper(format.scales) ? layout.slice_cols / kSuperCols : 0;
  layout.scales =
      field(groups / (format.scales == PanelScales::kSuperOdd ? 2 : 1), ScaleBytes(format.scales));
  layout.offsets = field(groups, OffsetBytes(format));
  if (format.scales == PanelScales::kSuperU4) layout.offsets = layout.scales;
  layout.d = field(supers, 2);
  layout.dmin = field(format.offsets == PanelOffsets::kSuperMin ? supers : 0, 2);
  layout.unit_bytes = UnitBytes(format.codes);
  layout.slice_bytes = layout.units_at + layout.slice_units() * layout.unit_bytes;
  layout.panel_bytes =
      layout.SliceAt(layout.num_slices() - 1) + layout.units_at +
      (layout.num_units() - (layout.num_slices() - 1) * layout.slice_units()) * layout.unit_bytes;
  return layout;
}

size_t PanelMatrixBytes(const PanelFormat& format, size_t rows, size_t cols) {
  return NumPanels(rows) * LayoutOf(format, cols).panel_bytes;
}

}  // namespace switchyard::kernels
