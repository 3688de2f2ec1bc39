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

// x rounded to bf16, its bits in the upper half.
HWY_INLINE uint32_t RoundedBits(float x) { return static_cast<uint32_t>(ToBF16(x).bits) << 16; }

// Pairs in the order of 16-bit codes. n is a multiple of 4.
//
//   x  0 1 2 3 | 4 5 6 7 | ..   ->   words {0, 2} {1, 3} | {4, 6} {5, 7} | ..
void PairWords(const float* HWY_RESTRICT x, size_t n, uint32_t* HWY_RESTRICT out) {
  for (size_t k = 0; k < n; k += 4) {
    out[k / 2] = RoundedBits(x[k]) >> 16 | RoundedBits(x[k + 2]);
    out[k / 2 + 1] = RoundedBits(x[k + 1]) >> 16 | RoundedBits(x[k + 3]);
  }
}

// One group of kFastGroup values: returns its scale.
float FastGroup(const float* HWY_RESTRICT x, int8_t* HWY_RESTRICT codes) {
  const DF df;
  const hn::Rebind<int8_t, DF> d8;
  const size_t lanes = hn::Lanes(df);
  VF most = hn::Zero(df);
  VF invalid = hn::Zero(df);  // NaN once an element is NaN or infinite
  for (size_t i = 0; i < kFastGroup; i += lanes) {
    const VF v = hn::LoadU(df, x + i);
    most = hn::Max(most, hn::Abs(v));
    invalid = hn::MulAdd(v, hn::Zero(df), invalid);
  }
  if (!(hn::ReduceSum(df, invalid) == 0.0f)) {
    std::memset(codes, 0, kFastGroup);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float amax = hn::ReduceMax(df, most);
  const float scale = amax / 127.0f;
  const float inverse = scale > 0.0f ? 127.0f / amax : 0.0f;
  // The inverse of the smallest amax overflows; its codes are 0 and so is what they stand for.
  const VF factor = hn::Set(df, std::isfinite(inverse) ? inverse : 0.0f);
  for (size_t i = 0; i < kFastGroup; i += lanes) {
    const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, x + i), factor));
    hn::StoreU(hn::DemoteTo(d8, rounded), d8, codes + i);
  }
  return scale;
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
HWY_EXPORT(FastGroup);
HWY_EXPORT(Starts);

size_t ToLines(size_t bytes) { return (bytes + 63) / 64 * 64; }

float* Floats(std::byte* at) { return reinterpret_cast<float*>(at); }

// kInt8: what is left when the codes are there.
void FinishInt8(const PanelRowLayout& layout, std::byte* out) {
  const auto* codes = reinterpret_cast<const int8_t*>(out);
  auto* starts = reinterpret_cast<int32_t*>(out + layout.starts_at);
  if (layout.has_starts) {
    HWY_DYNAMIC_DISPATCH(Starts)(codes, layout.segment, layout.segments, layout.bias, starts);
  }
  if (!layout.has_sums) return;
  const size_t per_group = layout.segments / layout.groups;
  const float* scales = Floats(out + layout.scales_at);
  for (size_t g = 0; g < layout.groups; ++g) {
    float sum = 0;
    for (size_t s = g * per_group; s < (g + 1) * per_group; ++s) {
      int32_t part = 0;
      HWY_DYNAMIC_DISPATCH(Starts)(codes + s * layout.segment, layout.segment, 1, -1, &part);
      sum += layout.has_scales ? static_cast<float>(part) * scales[s] : static_cast<float>(part);
    }
    Floats(out + layout.sums_at)[g] = sum;
  }
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
void SumGroups(const PanelRowLayout& layout, const float* x, std::byte* out) {
  const bool rounds = layout.path == PanelPath::kBF16;
  const size_t per_group = layout.segments / layout.groups;
  for (size_t g = 0; g < layout.groups; ++g) {
    float total = 0;
    for (size_t s = g * per_group; s < (g + 1) * per_group; ++s) {
      float sum = 0;
      const size_t end = std::min(layout.cols, (s + 1) * layout.segment);
      for (size_t k = s * layout.segment; k < end; ++k)
        sum += rounds ? ToFloat(ToBF16(x[k])) : x[k];
      total += layout.has_scales ? sum * Floats(out + layout.scales_at)[s] : sum;
    }
    Floats(out + layout.sums_at)[g] = total;
  }
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
  layout.has_scales = act_group != 0 || (path == PanelPath::kInt8 && format.group != 0);
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
  if (layout.has_sums) SumGroups(layout, x, out);
}

void PackScaledRow(const PanelRowLayout& layout, const float* codes, const float* scales,
                   size_t act_group, std::byte* out) noexcept {
  PackWords(layout, codes, out);
  for (size_t s = 0; s < layout.segments; ++s) {
    const size_t first = s * layout.segment;
    Floats(out + layout.scales_at)[s] = first < layout.cols ? scales[first / act_group] : 0.0f;
  }
  if (layout.has_sums) SumGroups(layout, codes, out);
}

void PackInt8Row(const PanelRowLayout& layout, const int8_t* codes, std::byte* out) noexcept {
  if (layout.cols != 0) std::memcpy(out, codes, layout.cols);
  std::memset(out + layout.cols, 0, layout.padded_cols - layout.cols);
  if (layout.has_scales) std::fill_n(Floats(out + layout.scales_at), layout.segments, 1.0f);
  FinishInt8(layout, out);
}

void PackFastRow(const PanelRowLayout& layout, const float* x, std::byte* out) noexcept {
  auto* codes = reinterpret_cast<int8_t*>(out);
  float* scales = Floats(out + layout.scales_at);
  const size_t per_group = kFastGroup / layout.segment;  // segments that share a scale
  for (size_t k = 0; k < layout.padded_cols; k += kFastGroup) {
    float group[kFastGroup] = {};
    const bool is_whole = k + kFastGroup <= layout.cols;
    if (!is_whole && k < layout.cols) std::copy_n(x + k, layout.cols - k, group);
    const float* values = is_whole ? x + k : group;
    const float scale = HWY_DYNAMIC_DISPATCH(FastGroup)(values, codes + k);
    for (size_t s = 0; s < per_group; ++s) scales[k / layout.segment + s] = scale;
  }
  FinishInt8(layout, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
