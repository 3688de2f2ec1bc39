#include "kernels/panels/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/panels/rows.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/load-inl.h"
#include "kernels/panels/scratch.h"
#include "kernels/panels/values.h"
#include "kernels/quantize/quantize.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

bool HasPairs() { return HWY_NATIVE_DOT_BF16 != 0; }

using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using VU = hn::Vec<DU>;

// ToBF16 of each lane, its bits in the upper half. By integers: some instruction sets take
// subnormals for 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V RoundedBits(D du, V bits) {
  const auto sign_off = hn::Set(du, 0x7fffffffu);
  const auto upper = hn::Set(du, 0xffff0000u);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto is_nan = hn::Gt(hn::And(bits, sign_off), hn::Set(du, 0x7f800000u));
  return hn::And(hn::IfThenElse(is_nan, quiet, rounded), upper);
}

// Pairs in the order of 16-bit codes: all words of two vectors of columns.
//
//   x  0 1 2 3 | 4 5 6 7 | ..   ->   words {0, 2} {1, 3} | {4, 6} {5, 7} | ..
template <class D>
HWY_INLINE void PairVectors(D du, const float* HWY_RESTRICT x, uint32_t* HWY_RESTRICT out) {
  const hn::RepartitionToWide<D> du64;
  const hn::RebindToFloat<D> df;
  const auto rounded = [&](const float* from) HWY_ATTR {
    return hn::BitCast(du64, RoundedBits(du, hn::BitCast(du, hn::LoadU(df, from))));
  };
  const auto low = rounded(x);
  const auto high = rounded(x + hn::Lanes(du));
  const auto first = hn::BitCast(du, hn::ConcatEven(du64, high, low));
  const auto second = hn::BitCast(du, hn::ConcatOdd(du64, high, low));
  hn::StoreU(hn::Or(hn::ShiftRight<16>(first), second), du, out);
}

// n is a multiple of 4.
void PairWords(const float* HWY_RESTRICT x, size_t n, uint32_t* HWY_RESTRICT out) {
  const DU du;
  const size_t step = 2 * hn::Lanes(du);
  size_t k = 0;
  for (; k + step <= n; k += step) PairVectors(du, x + k, out + k / 2);
  for (; k < n; k += 4) {
    const auto bits = [&](size_t i) { return uint32_t{ToBF16(x[k + i]).bits}; };
    out[k / 2] = bits(0) | bits(2) << 16;
    out[k / 2 + 1] = bits(1) | bits(3) << 16;
  }
}

// sums[s] = the sum of the values of segment s, in the order of the columns, rounded to bf16 before
// if the products see them so. Four segments at a time, a lane for each.
template <bool kRounds>
HWY_INLINE void ValueSums(const float* HWY_RESTRICT x, size_t segment, size_t segments,
                          float* HWY_RESTRICT sums) {
  const hn::FixedTag<float, 4> d4;
  const hn::RebindToUnsigned<decltype(d4)> du4;
  const auto load = [&](const float* from) HWY_ATTR {
    const auto v = hn::LoadU(d4, from);
    if constexpr (kRounds) {
      return hn::BitCast(d4, RoundedBits(du4, hn::BitCast(du4, v)));
    } else {
      return v;
    }
  };
  size_t s = 0;
  for (; s + 4 <= segments; s += 4) {
    const float* from = x + s * segment;
    auto sum = hn::Zero(d4);
    for (size_t k = 0; k < segment; k += 4, from += 4) {
      const auto a = load(from);
      const auto b = load(from + segment);
      const auto c = load(from + 2 * segment);
      const auto d = load(from + 3 * segment);
      // Columns of the 4 x 4 block.
      const auto ac_low = hn::InterleaveLower(d4, a, c);
      const auto bd_low = hn::InterleaveLower(d4, b, d);
      const auto ac_high = hn::InterleaveUpper(d4, a, c);
      const auto bd_high = hn::InterleaveUpper(d4, b, d);
      sum = hn::Add(sum, hn::InterleaveLower(d4, ac_low, bd_low));
      sum = hn::Add(sum, hn::InterleaveUpper(d4, ac_low, bd_low));
      sum = hn::Add(sum, hn::InterleaveLower(d4, ac_high, bd_high));
      sum = hn::Add(sum, hn::InterleaveUpper(d4, ac_high, bd_high));
    }
    hn::StoreU(sum, d4, sums + s);
  }
  for (; s < segments; ++s) {
    float sum = 0;
    for (size_t k = s * segment; k < (s + 1) * segment; ++k)
      sum += kRounds ? ToFloat(ToBF16(x[k])) : x[k];
    sums[s] = sum;
  }
}
void SumsOfF32(const float* x, size_t segment, size_t segments, float* sums) {
  ValueSums<false>(x, segment, segments, sums);
}
void SumsOfBF16(const float* x, size_t segment, size_t segments, float* sums) {
  ValueSums<true>(x, segment, segments, sums);
}

// The bits of the largest magnitude of a group. NaN has more of them than infinity, infinity more
// than all else.
HWY_INLINE int32_t MostBits(const float* HWY_RESTRICT x, size_t n) {
  const DF df;
  const DI di;
  auto most = hn::Zero(di);
  for (size_t i = 0; i < n; i += hn::Lanes(df))
    most = hn::Max(most, hn::BitCast(di, hn::Abs(hn::LoadU(df, x + i))));
  return hn::ReduceMax(di, most);
}

// Codes of groups of `group` values, a multiple of 32, and their scales, each `copies` times. As
// many groups at a time as a vector has lanes for their divisions.
void FastGroups(const float* HWY_RESTRICT x, size_t group, size_t groups, size_t copies,
                int8_t* HWY_RESTRICT codes, float* HWY_RESTRICT scales) {
  const DF df;
  const DI di;
  const hn::Rebind<int8_t, DF> d8;
  const size_t lanes = hn::Lanes(df);
  const VF largest_code = hn::Set(df, 127.0f);
  const auto infinity = hn::Set(di, 0x7f800000);
  HWY_ALIGN int32_t most[HWY_MAX_LANES_D(DI)] = {};
  HWY_ALIGN float scale[HWY_MAX_LANES_D(DF)];
  HWY_ALIGN float factor[HWY_MAX_LANES_D(DF)];
  for (size_t first = 0; first < groups; first += lanes) {
    const size_t count = HWY_MIN(lanes, groups - first);
    for (size_t g = 0; g < count; ++g) most[g] = MostBits(x + (first + g) * group, group);
    const auto bits = hn::Load(di, most);
    const VF amax = hn::BitCast(df, bits);
    const auto is_number = hn::RebindMask(df, hn::Lt(bits, infinity));
    const VF s = hn::Div(amax, largest_code);
    hn::Store(hn::IfThenElse(is_number, s, hn::BitCast(df, hn::Set(di, 0x7fc00000))), df, scale);
    // The inverse of the smallest amax overflows; its codes are 0 and so is what they stand for.
    const VF inverse = hn::Div(largest_code, amax);
    const auto is_finite = hn::RebindMask(df, hn::Lt(hn::BitCast(di, inverse), infinity));
    const auto is_usable = hn::And(is_finite, hn::Gt(s, hn::Zero(df)));
    hn::Store(hn::IfThenElseZero(is_usable, inverse), df, factor);
    for (size_t g = 0; g < count; ++g) {
      std::fill_n(scales + (first + g) * copies, copies, scale[g]);
      int8_t* out = codes + (first + g) * group;
      if (most[g] >= 0x7f800000) {
        std::memset(out, 0, group);
        continue;
      }
      const float* from = x + (first + g) * group;
      const VF f = hn::Set(df, factor[g]);
      for (size_t i = 0; i < group; i += lanes) {
        const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, from + i), f));
        hn::StoreU(hn::DemoteTo(d8, rounded), d8, out + i);
      }
    }
  }
}

// starts[s] = -bias * sum of the codes of segment s.
void Starts(const int8_t* HWY_RESTRICT codes, size_t segment, size_t segments, int32_t bias,
            int32_t* HWY_RESTRICT starts) {
  using D8 = hn::CappedTag<int8_t, 16>;
  const D8 d8;
  const hn::Repartition<int16_t, D8> d16;
  const hn::Repartition<int32_t, D8> d32;
  for (size_t s = 0; s < segments; ++s, codes += segment) {
    auto sum = hn::Zero(d32);
    for (size_t i = 0; i < segment; i += hn::Lanes(d8)) {
      const auto v = hn::LoadU(d8, codes + i);
      const auto even_odd = hn::Add(hn::PromoteLowerTo(d16, v), hn::PromoteUpperTo(d16, v));
      sum = hn::Add(sum, hn::WidenMulPairwiseAdd(d32, even_odd, hn::Set(d16, 1)));
    }
    starts[s] = -bias * hn::ReduceSum(d32, sum);
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

HWY_EXPORT(HasPairs);
HWY_EXPORT(PairWords);
HWY_EXPORT(SumsOfF32);
HWY_EXPORT(SumsOfBF16);
HWY_EXPORT(FastGroups);
HWY_EXPORT(Starts);

size_t ToLines(size_t bytes) { return (bytes + 63) / 64 * 64; }

float* Floats(std::byte* at) { return reinterpret_cast<float*>(at); }

// Groups of several segments, which have scales of their own.
bool HasScaledSums(const PanelRowLayout& layout) {
  return layout.has_scales && layout.segments != layout.groups;
}

constexpr size_t kSumsAtOnce = 64;

// The sums of groups from those of their segments: sums_of(first, count, sums) writes the latter.
template <class SumsOf>
void SumGroups(const PanelRowLayout& layout, std::byte* out, const SumsOf& sums_of) {
  const size_t per_group = layout.segments / layout.groups;
  const float* scales = Floats(out + layout.scales_at);
  float* totals = Floats(out + layout.sums_at);
  float sums[kSumsAtOnce];
  float total = 0;
  size_t in_group = 0;
  for (size_t first = 0; first < layout.segments; first += kSumsAtOnce) {
    const size_t count = std::min(kSumsAtOnce, layout.segments - first);
    sums_of(first, count, sums);
    for (size_t s = 0; s < count; ++s) {
      total += HasScaledSums(layout) ? sums[s] * scales[first + s] : sums[s];
      if (++in_group < per_group) continue;
      *totals++ = total;
      total = 0;
      in_group = 0;
    }
  }
}

// kInt8: what is left when the codes are there.
void FinishInt8(const PanelRowLayout& layout, std::byte* out) {
  const auto* codes = reinterpret_cast<const int8_t*>(out);
  auto* starts = reinterpret_cast<int32_t*>(out + layout.starts_at);
  if (layout.has_starts) {
    HWY_DYNAMIC_DISPATCH(Starts)(codes, layout.segment, layout.segments, layout.bias, starts);
  }
  if (!layout.has_sums) return;
  SumGroups(layout, out, [&](size_t first, size_t count, float* sums) {
    int32_t parts[kSumsAtOnce];
    HWY_DYNAMIC_DISPATCH(Starts)
    (codes + first * layout.segment, layout.segment, count, -1, parts);
    for (size_t s = 0; s < count; ++s) sums[s] = static_cast<float>(parts[s]);
  });
}

// The words of values, zeros behind them.
void PackWords(const PanelRowLayout& layout, const float* x, std::byte* out) {
  if (layout.path == PanelPath::kF32) {
    std::memcpy(out, x, layout.cols * sizeof(float));
    std::memset(out + layout.cols * sizeof(float), 0,
                (layout.padded_cols - layout.cols) * sizeof(float));
    return;
  }
  auto* words = reinterpret_cast<uint32_t*>(out);
  const size_t whole = layout.cols / 4 * 4;
  HWY_DYNAMIC_DISPATCH(PairWords)(x, whole, words);
  std::memset(words + whole / 2, 0, (layout.padded_cols - whole) * 2);
  if (whole == layout.cols) return;
  float last[4] = {};
  std::copy_n(x + whole, layout.cols - whole, last);
  HWY_DYNAMIC_DISPATCH(PairWords)(last, 4, words + whole / 2);
}

// Sums of the values that the products see.
void SumValues(const PanelRowLayout& layout, const float* x, std::byte* out) {
  const auto sums_of = layout.path == PanelPath::kBF16 ? HWY_DYNAMIC_POINTER(SumsOfBF16)
                                                       : HWY_DYNAMIC_POINTER(SumsOfF32);
  const size_t whole = layout.cols / layout.segment;  // the row may end inside a segment
  SumGroups(layout, out, [&](size_t first, size_t count, float* sums) {
    const size_t inside = std::clamp(whole, first, first + count) - first;
    sums_of(x + first * layout.segment, layout.segment, inside, sums);
    std::fill(sums + inside, sums + count, 0.0f);
    if (inside == count || first + inside > whole) return;
    const size_t rest = (first + inside) * layout.segment;
    if (rest < layout.cols) sums_of(x + rest, layout.cols - rest, 1, sums + inside);
  });
}

}  // namespace

bool HasPanelBF16() { return HWY_DYNAMIC_DISPATCH(HasPairs)(); }

bool TakesPath(const PanelFormat& format, PanelPath path) {
  const bool is_wide = format.codes == PanelCodes::kF16 || format.codes == PanelCodes::kF32;
  const bool is_float =
      is_wide || format.codes == PanelCodes::kBF16 || format.codes == PanelCodes::kE4M3;
  switch (path) {
    case PanelPath::kInt8: return !is_float;
    case PanelPath::kBF16: return !is_wide && HasPanelBF16();
    case PanelPath::kF32: return true;
  }
  return false;
}

size_t FastGroupOf(const PanelFormat& format) {
  const bool fits =
      format.group == 0 || kFastGroup % format.group == 0 || format.group % kFastGroup == 0;
  return fits ? kFastGroup : kUnitCols;
}

PanelRowLayout RowLayoutOf(const PanelFormat& format, size_t cols, PanelPath path,
                           size_t act_group) {
  PanelRowLayout layout;
  layout.path = path;
  layout.cols = cols;
  layout.padded_cols = LayoutOf(format, cols).cols;
  const size_t whole = std::max<size_t>(layout.padded_cols, 1);
  const size_t own = act_group == 0 ? whole : act_group;
  // Weights without groups take those of the activations, cut to what divides the padded row.
  const size_t cut = act_group == 0 ? whole : std::gcd(std::gcd(own, whole), kMaxOwnSegment);
  const size_t group = format.group == 0 ? cut : format.group;
  layout.segment = std::min(own, group);
  layout.groups = layout.padded_cols / group;
  layout.segments = layout.padded_cols / layout.segment;
  layout.has_scales = act_group != 0;
  // Segments share a scale only inside what is unpacked at a time.
  const bool shares = act_group != 0 && kMaxOwnSegment % own == 0 && own > layout.segment;
  layout.scale_segments = shares ? own / layout.segment : 1;
  layout.has_sums = format.offsets != PanelOffsets::kNone;
  if (path == PanelPath::kInt8) {
    layout.bias = ByteBias(format);
    layout.has_starts = true;
  }
  const size_t bytes_per_col = path == PanelPath::kInt8 ? 1 : path == PanelPath::kBF16 ? 2 : 4;
  size_t at = ToLines(layout.padded_cols * bytes_per_col);
  const auto part = [&](bool is_there, size_t count) {
    const size_t start = at;
    if (is_there) at += ToLines(count * 4);
    return start;
  };
  layout.scales_at = part(layout.has_scales, layout.segments);
  layout.starts_at = part(layout.has_starts, layout.segments);
  layout.sums_at = part(layout.has_sums, layout.groups);
  // An odd number of cache lines: records that follow each other must not meet in one set of the
  // first-level cache, where all rows of a tile are read side by side.
  layout.bytes = at / 64 % 2 == 0 ? at + 64 : at;
  return layout;
}

void PackFloatRow(const PanelRowLayout& layout, const float* x, std::byte* out) noexcept {
  PackWords(layout, x, out);
  if (layout.has_sums) SumValues(layout, x, out);
}

void PackScaledRow(const PanelRowLayout& layout, const float* codes, const float* scales,
                   size_t act_group, std::byte* out) noexcept {
  PackWords(layout, codes, out);
  for (size_t s = 0; s < layout.segments; ++s) {
    const size_t first = s * layout.segment;
    Floats(out + layout.scales_at)[s] = first < layout.cols ? scales[first / act_group] : 0.0f;
  }
  if (layout.has_sums) SumValues(layout, codes, out);
}

void PackInt8Row(const PanelRowLayout& layout, const int8_t* codes, std::byte* out) noexcept {
  if (layout.cols != 0) std::memcpy(out, codes, layout.cols);
  std::memset(out + layout.cols, 0, layout.padded_cols - layout.cols);
  FinishInt8(layout, out);
}

void PackFastRow(const PanelRowLayout& layout, const float* x, std::byte* out) noexcept {
  auto* codes = reinterpret_cast<int8_t*>(out);
  float* scales = Floats(out + layout.scales_at);
  const size_t group = layout.scale_segments * layout.segment;
  const size_t whole = layout.cols / group;
  HWY_DYNAMIC_DISPATCH(FastGroups)(x, group, whole, layout.scale_segments, codes, scales);
  for (size_t k = whole * group; k < layout.padded_cols; k += group) {
    const size_t count = std::min(group, layout.padded_cols - k);
    float last[kFastGroup] = {};
    if (k < layout.cols) std::copy_n(x + k, std::min(count, layout.cols - k), last);
    HWY_DYNAMIC_DISPATCH(FastGroups)
    (last, count, 1, count / layout.segment, codes + k, scales + k / layout.segment);
  }
  FinishInt8(layout, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
