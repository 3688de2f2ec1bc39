// Codes of 8 bits as bf16, which holds each of them exactly, looked up in a table of all
// magnitudes: fewer instructions than through f32. Compiled once per instruction set.
#if defined(SWITCHYARD_KERNELS_ATTENTION_BF16_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_KERNELS_ATTENTION_BF16_CODES_INL_H_
#undef SWITCHYARD_KERNELS_ATTENTION_BF16_CODES_INL_H_
#else
#define SWITCHYARD_KERNELS_ATTENTION_BF16_CODES_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <hwy/highway.h>

#include "kernels/e4m3_code.h"
#include "kernels/load-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Whether the CPU looks up 128 bytes at once, which the templates below assume.
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64 && HWY_NATIVE_DOT_BF16
constexpr bool kHasCodeTables = true;
#else
constexpr bool kHasCodeTables = false;
#endif

using Bytes = hn::Vec<hn::Repartition<uint8_t, DF>>;

// The two bytes of the bf16 of each magnitude of a code.
struct CodeTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
template <class T>
constexpr CodeTable MakeCodeTable() {
  CodeTable table{};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    float value = static_cast<float>(magnitude);
    if constexpr (hwy::IsSame<T, E4M3Code>()) {
      // Normal: (8 + fraction) * 2^(exponent - 10); subnormal: as if the exponent were 1.
      const int exponent = magnitude / 8;
      value = static_cast<float>(magnitude % 8 + (exponent > 0 ? 8 : 0)) / 1024.0f / kE4M3Unit;
      for (int i = exponent > 0 ? exponent : 1; i > 0; --i) value *= 2.0f;
    }
    const uint32_t bits = std::bit_cast<uint32_t>(value) >> 16;
    table.low[magnitude] = static_cast<uint8_t>(bits & 0xff);
    table.high[magnitude] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}
template <class T>
inline constexpr CodeTable kCodeTable = MakeCodeTable<T>();

// Where the bytes of a vector of pairs come from: from 0 on the low bytes of all codes, from 64 on
// the high ones.
struct PairOrder {
  alignas(64) uint8_t bytes[64];
};
// Word i is the codes first + i * step and first + i * step + between.
constexpr PairOrder MakePairOrder(size_t first, size_t step, size_t between) {
  PairOrder order{};
  for (size_t i = 0; i < 16; ++i) {
    const size_t lower = first + i * step;
    const size_t upper = lower + between;
    order.bytes[4 * i] = static_cast<uint8_t>(lower);
    order.bytes[4 * i + 1] = static_cast<uint8_t>(64 + lower);
    order.bytes[4 * i + 2] = static_cast<uint8_t>(upper);
    order.bytes[4 * i + 3] = static_cast<uint8_t>(64 + upper);
  }
  return order;
}
// Words of four codes that follow each other in a row of the cache.
inline constexpr PairOrder kLowerOfFour = MakePairOrder(0, 4, 1);
inline constexpr PairOrder kUpperOfFour = MakePairOrder(2, 4, 1);
// Half a vector of each of two rows.
inline constexpr PairOrder kLowerOfRows = MakePairOrder(0, 1, 32);
inline constexpr PairOrder kUpperOfRows = MakePairOrder(16, 1, 32);

// A vector of codes as two vectors of pairs of bf16, in the given orders. E4m3 codes as their value
// / kE4M3Unit; neither the int8 code -128 nor a NaN is known.
template <class T>
HWY_INLINE void PairsOfCodes(Bytes codes, const PairOrder& lower_order,
                             const PairOrder& upper_order, VF& lower, VF& upper) {
  const DF df;
  const hn::Repartition<uint8_t, DF> du;
  const hn::Repartition<int8_t, DF> di;
  const CodeTable& table = kCodeTable<T>;
  const Bytes sign = hn::Set(du, uint8_t{0x80});
  const Bytes magnitudes = hwy::IsSame<T, int8_t>()
                               ? hn::BitCast(du, hn::Abs(hn::BitCast(di, codes)))
                               : hn::AndNot(sign, codes);
  const auto look_up = [&](const uint8_t* from) HWY_ATTR {
    return hn::TwoTablesLookupLanes(du, hn::Load(du, from), hn::Load(du, from + 64),
                                    hn::IndicesFromVec(du, magnitudes));
  };
  const Bytes low = look_up(table.low);
  const Bytes high = hn::OrAnd(look_up(table.high), codes, sign);
  const auto order = [&](const PairOrder& bytes) HWY_ATTR {
    const auto indices = hn::IndicesFromVec(du, hn::Load(du, bytes.bytes));
    return hn::BitCast(df, hn::TwoTablesLookupLanes(du, low, high, indices));
  };
  lower = order(lower_order);
  upper = order(upper_order);
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
