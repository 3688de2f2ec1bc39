#include "kernels/panels/pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/panels/pack.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/panels/grid.h"
#include "kernels/panels/pack_blocks-inl.h"
#include "kernels/panels/pack_grid-inl.h"
#include "switchyard/core/macros.h"

#ifndef SWITCHYARD_KERNELS_PANELS_PACK_SOURCE_
#define SWITCHYARD_KERNELS_PANELS_PACK_SOURCE_

namespace switchyard::kernels {

// The rows of a panel and where they go. Missing rows repeat the first one, and are set to zero
// when all else is done.
struct PanelSource {
  const PanelFormat& format;
  const PanelLayout& layout;
  DType dtype;
  size_t n;  // columns
  std::array<const uint8_t*, kPanelRows> rows;
  std::byte* out;

  uint32_t* Unit(size_t i) const { return reinterpret_cast<uint32_t*>(out + layout.UnitAt(i)); }
  // Number `i` of a field, `bytes` each.
  uint8_t* Number(const PanelField& field, size_t i, size_t bytes) const {
    return reinterpret_cast<uint8_t*>(out) + layout.NumberAt(field, i, bytes);
  }
};

}  // namespace switchyard::kernels
#endif  // SWITCHYARD_KERNELS_PANELS_PACK_SOURCE_

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Blocks of ggml, each kElements elements in kBytes bytes, by the function of one block.
template <size_t kElements, size_t kBytes, class Pack>
HWY_INLINE void EachPanelBlock(const PanelSource& from, const Pack& pack) {
  const PanelLayout& layout = from.layout;
  const auto step = [&](const PanelField& field, size_t bytes) {  // from block to block
    return field.count * kElements / layout.slice_cols * kPanelRows * bytes;
  };
  const size_t scale_step = step(layout.scales, ScaleBytes(from.format.scales));
  const size_t offset_step = step(layout.offsets, OffsetBytes(from.format));
  const size_t d_step = step(layout.d, 2);
  const size_t num_blocks = (from.n + kElements - 1) / kElements;
  const size_t slice_blocks = layout.slice_cols / kElements;
  std::array<const uint8_t*, kPanelRows> rows = from.rows;
  for (size_t first = 0; first < num_blocks; first += slice_blocks) {
    auto* slice = reinterpret_cast<uint8_t*>(from.Unit(first * kElements / kUnitCols));
    slice -= layout.units_at;
    const size_t blocks = std::min(slice_blocks, num_blocks - first);
    for (size_t i = 0; i < blocks; ++i) {
      uint8_t* unit = slice + layout.units_at + i * kElements / kUnitCols * layout.unit_bytes;
      pack(rows.data(),
           BlockOut{reinterpret_cast<uint32_t*>(unit), slice + layout.scales.at + i * scale_step,
                    slice + layout.offsets.at + i * offset_step, slice + layout.d.at + i * d_step,
                    slice + layout.dmin.at + i * d_step});
      for (const uint8_t*& row : rows) row += kBytes;
    }
  }
}

// Codes in units of kUnitWords words, by the function of one unit.
template <size_t kUnitWords, class Store>
HWY_INLINE void EachPanelUnit(const PanelSource& from, const Store& store) {
  // A cache line of each row at a time: rows that lie a power of two apart have room for few lines.
  constexpr size_t kLineWords = 16;
  constexpr size_t kLineBytes = kLineWords * sizeof(uint32_t);
  constexpr size_t kLineUnits = kLineWords / kUnitWords;
  constexpr size_t kLineCols = kLineUnits * kUnitCols;
  const size_t num_units = from.layout.cols / kUnitCols;
  Word words[kLineWords];
  for (size_t unit = 0, at = 0; unit < num_units; unit += kLineUnits, at += kLineBytes) {
    const size_t first = unit * kUnitCols;
    if (first + kLineCols <= from.n) {
      LoadWords<kLineWords>(from.rows.data(), at, words);
    } else {
      uint8_t last[kPanelRows][kLineBytes] = {};
      const uint8_t* rows[kPanelRows];
      const size_t count = from.n > first ? from.n - first : 0;
      const size_t bytes = BytesOf(from.dtype, count);
      for (size_t r = 0; r < kPanelRows; ++r) {
        if (count != 0) std::memcpy(last[r], from.rows[r] + at, bytes);
        if (kUnitWords == 4 && count % 2 == 1) last[r][bytes - 1] &= 15;
        rows[r] = last[r];
      }
      LoadWords<kLineWords>(rows, 0, words);
    }
    const size_t units = std::min(kLineUnits, num_units - unit);
    for (size_t u = 0; u < units; ++u) store(words + u * kUnitWords, from.Unit(unit + u));
  }
}

// f32: word k of a unit is element k.
void PackFloats(const PanelSource& from) {
  for (size_t k = 0; k < from.layout.cols; k += kUnitCols) {
    uint32_t* unit = from.Unit(k / kUnitCols);
    const size_t count = from.n > k ? std::min(kUnitCols, from.n - k) : 0;
    if (count < kUnitCols) std::memset(unit, 0, kUnitCols * kWordBytes);
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* row = from.rows[r] + k * sizeof(float);
      for (size_t i = 0; i < count; ++i)
        std::memcpy(unit + i * kPanelRows + r, row + i * sizeof(float), sizeof(float));
    }
  }
}

void PackCodes(const PanelSource& from) {
  switch (from.dtype) {
    case DType::kF32: return PackFloats(from);
    case DType::kGgmlQ40:
    case DType::kGgmlIq4Nl: return EachPanelBlock<32, 18>(from, PackQ40);
    case DType::kGgmlQ41: return EachPanelBlock<32, 20>(from, PackQ41);
    case DType::kGgmlQ50: return EachPanelBlock<32, 22>(from, PackQ50);
    case DType::kGgmlQ51: return EachPanelBlock<32, 24>(from, PackQ51);
    case DType::kGgmlQ80: return EachPanelBlock<32, 34>(from, PackQ80);
    case DType::kGgmlMxFp4: return EachPanelBlock<32, 17>(from, PackMxFp4);
    case DType::kGgmlQ2K: return EachPanelBlock<256, 84>(from, PackQ2K);
    case DType::kGgmlQ3K: return EachPanelBlock<256, 110>(from, PackQ3K);
    case DType::kGgmlQ4K: return EachPanelBlock<256, 144>(from, PackQ4K);
    case DType::kGgmlQ5K: return EachPanelBlock<256, 176>(from, PackQ5K);
    case DType::kGgmlQ6K: return EachPanelBlock<256, 210>(from, PackQ6K);
    case DType::kGgmlIq4Xs: return EachPanelBlock<256, 136>(from, PackIq4Xs);
    case DType::kGgmlIq3S: return EachPanelBlock<256, 110>(from, PackIq3S);
    case DType::kGgmlIq3Xxs: return EachPanelBlock<256, 98>(from, PackIq3Xxs);
    case DType::kGgmlIq2S: return EachPanelBlock<256, 82>(from, PackIq2S);
    case DType::kGgmlIq2Xs: return EachPanelBlock<256, 74>(from, PackIq2Xs);
    case DType::kGgmlIq2Xxs: return EachPanelBlock<256, 66>(from, PackIq2Xxs);
    case DType::kGgmlIq1S: return EachPanelBlock<256, 50>(from, PackIq1S);
    case DType::kGgmlIq1M: return EachPanelBlock<256, 56>(from, PackIq1M);
    case DType::kGgmlTq10: return EachPanelBlock<256, 54>(from, PackTq10);
    case DType::kGgmlTq20: return EachPanelBlock<256, 66>(from, PackTq20);
    case DType::kBF16:
    case DType::kF16: return EachPanelUnit<16>(from, StoreHalves);
    case DType::kI8:
    case DType::kU8:
    case DType::kF8E4M3: {
      const uint32_t flip = from.dtype == DType::kI8 ? 0x80808080u : 0;
      return EachPanelUnit<8>(
          from, [flip](const Word* q, uint32_t* out) HWY_ATTR { StoreCodeBytes(q, flip, out); });
    }
    case DType::kI4:
    case DType::kU4:
    case DType::kF4E2M1: {
      const uint32_t flip = from.dtype == DType::kI4 ? 0x88888888u : 0;
      return EachPanelUnit<4>(
          from, [flip](const Word* q, uint32_t* out) HWY_ATTR { StoreCodeNibbles(q, flip, out); });
    }
    default: SY_CHECK(false && "a dtype that has panels");
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

HWY_EXPORT(PackCodes);

float ScaleOfGroup(const CodeRow& row, size_t first) {
  return first < row.n ? ScaleOfColumn(row, first) : 0.0f;
}

void PackHeader(const PanelSource& to, std::span<const CodeRow> rows) {
  auto* header = reinterpret_cast<float*>(to.out);
  std::fill_n(header, to.layout.header_bytes / sizeof(float), 0.0f);
  switch (to.format.scales) {
    case PanelScales::kRow:
      for (size_t r = 0; r < rows.size(); ++r) header[r] = ScaleOfColumn(rows[r], 0);
      break;
    case PanelScales::kGrid:
      for (size_t i = 0; i < to.layout.groups; ++i)
        header[i] = ScaleOfGroup(rows[0], i * to.format.group);
      break;
    case PanelScales::kE4M3: header[0] = rows[0].tensor_scale; break;
    default: break;
  }
}

// The numbers of all groups, kBytes each, from arrays that the rows have for them.
template <size_t kBytes>
void PackField(const PanelSource& to, const std::array<const uint8_t*, kPanelRows>& from,
               const PanelField& field) {
  const size_t groups = to.layout.groups;
  constexpr size_t kGroupBytes = kBytes * kPanelRows;
  for (size_t i = 0; i < groups; ++i) {
    uint8_t* out = to.Number(field, i, kBytes);
    if (i * to.format.group >= to.n) {
      std::memset(out, 0, kGroupBytes);
      continue;
    }
    for (size_t r = 0; r < kPanelRows; ++r)
      std::memcpy(out + r * kBytes, from[r] + i * kBytes, kBytes);
  }
}

// Zeros where fields have no numbers: to the end of a cache line, and in a last slice of fewer
// columns.
void ClearFields(const PanelSource& to) {
  const PanelLayout& layout = to.layout;
  const bool has_odd_bytes = layout.slice_groups() % 2 == 1 &&
                             (ScaleBytes(to.format.scales) == 1 || OffsetBytes(to.format) == 1);
  for (size_t slice = 0; slice < layout.num_slices(); ++slice) {
    if (has_odd_bytes || (slice + 1) * layout.slice_cols > layout.cols)
      std::memset(to.out + layout.SliceAt(slice), 0, layout.units_at);
  }
}

// Scales and zero points of groups that the rows have beside their codes.
void PackFields(const PanelSource& to, std::span<const CodeRow> rows) {
  std::array<const uint8_t*, kPanelRows> from;
  const auto each_row = [&](auto field) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      const CodeRow& row = rows[r < rows.size() ? r : 0];
      from[r] = static_cast<const uint8_t*>(field(row));
    }
  };
  each_row([](const CodeRow& row) { return row.scale; });
  switch (ScaleBytes(to.format.scales)) {
    case 1: PackField<1>(to, from, to.layout.scales); break;
    case 2: PackField<2>(to, from, to.layout.scales); break;
    case 4: PackField<4>(to, from, to.layout.scales); break;
    default: break;
  }
  if (to.format.offsets != PanelOffsets::kZero) return;
  each_row([](const CodeRow& row) { return static_cast<const void*>(row.zero); });
  PackField<1>(to, from, to.layout.offsets);
}

// Word i of a unit whose codes are all of value 0, or 0 if there is no such code.
uint32_t ZeroWord(const PanelFormat& format, size_t i) {
  if (format.values != PanelValues::kLinear) return 0;
  const uint32_t bias = format.bias;
  const auto bits = [](uint32_t code) { return code * 0xffffffffu; };
  const auto pairs = [](uint32_t code) { return code * 0x55555555u; };
  const auto nibbles = [](uint32_t code) { return code * 0x11111111u; };
  switch (format.codes) {
    case PanelCodes::kBits2: return pairs(bias);
    case PanelCodes::kBits3: return i < 2 ? pairs(bias & 3) : bits(bias >> 2);
    case PanelCodes::kBits4: return nibbles(bias);
    case PanelCodes::kBits5: return i < 4 ? nibbles(bias & 15) : bits(bias >> 4);
    case PanelCodes::kBits6: return i < 4 ? nibbles(bias & 15) : pairs(bias >> 4);
    case PanelCodes::kBytes: return bias * 0x01010101u;
    default: return 0;
  }
}

// Rows first.. become 0.
void ClearRows(const PanelSource& to, size_t first) {
  const PanelLayout& layout = to.layout;
  const size_t num_rows = kPanelRows - first;
  // Of super-blocks the scale alone: their codes lie in no words of one row, or have no 0.
  const size_t num_units = LiesBySupers(to.format.codes) ? 0 : layout.cols / kUnitCols;
  for (size_t i = 0; i < num_units; ++i) {
    for (size_t w = 0; w < UnitWords(to.format.codes); ++w)
      std::fill_n(to.Unit(i) + w * kPanelRows + first, num_rows, ZeroWord(to.format, w));
  }
  const auto clear = [&](const PanelField& field, size_t cols, size_t bytes) {
    const size_t count = bytes == 0 ? 0 : layout.cols / cols;
    for (size_t i = 0; i < count; ++i)
      std::memset(to.Number(field, i, bytes) + first * bytes, 0, num_rows * bytes);
  };
  const PanelFormat& format = to.format;
  clear(layout.scales, layout.scales.count == 0 ? 1 : layout.slice_cols / layout.scales.count,
        ScaleBytes(format.scales));
  clear(layout.offsets, std::max<size_t>(format.group, 1), OffsetBytes(format));
  clear(layout.d, kSuperCols, IsSuper(format.scales) ? 2 : 0);
  clear(layout.dmin, kSuperCols, format.offsets == PanelOffsets::kSuperMin ? 2 : 0);
}

}  // namespace

void PackPanel(const PanelFormat& format, const PanelLayout& layout, std::span<const CodeRow> rows,
               std::byte* out) noexcept {
  SY_DCHECK(!rows.empty() && rows.size() <= kPanelRows && rows[0].n <= layout.cols);
  PanelSource source{format, layout, rows[0].dtype, rows[0].n, {}, out};
  for (size_t r = 0; r < kPanelRows; ++r)
    source.rows[r] = static_cast<const uint8_t*>(rows[r < rows.size() ? r : 0].q);
  PackHeader(source, rows);
  ClearFields(source);
  // Blocks of ggml bring their scales, and K is whole blocks.
  if (!IsGgmlBlock(source.dtype)) PackFields(source, rows);
  HWY_DYNAMIC_DISPATCH(PackCodes)(source);
  if (rows.size() < kPanelRows) ClearRows(source, rows.size());
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
