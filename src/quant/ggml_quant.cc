#include "quant/ggml_quant.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard::quant {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxHalf = 65504.0f;

// Steps that are tried on each side of the obvious one, as changes of the number of steps in the
// range. Twice as many, twice as dense, take twice the time for 0.5 % less error.
constexpr int kTries = 3;
constexpr float kTryStep = 0.3f;

// Below this an element is 0 whatever the format: no scale in f16 reaches it.
constexpr float kNothing = 0x1p-100f;

// To nearest, for |x| < 2^22; unlike the library's functions it becomes two vector instructions.
float Round(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 x 2^23
  return (x + kShift) - kShift;
}

// A sum in eight lanes: the order is fixed, and the compiler can add several at once.
template <size_t kN, class Term>
float Sum(const Term& term) {
  static_assert(kN % 8 == 0);
  float lanes[8] = {};
  for (size_t i = 0; i < kN; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += term(i + lane);
  }
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

template <size_t kN>
float LargestMagnitude(const float* x) {
  float lanes[8] = {};
  for (size_t i = 0; i < kN; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) {
      const float magnitude = std::fabs(x[i + lane]);
      lanes[lane] = magnitude > lanes[lane] ? magnitude : lanes[lane];
    }
  }
  return *std::max_element(lanes, lanes + 8);
}

// The elements of a block times a power of two that brings the largest near 1, so that squares
// neither overflow nor vanish.
template <size_t kN>
class Block {
 public:
  explicit Block(const float* x) {
    const float largest = LargestMagnitude<kN>(x);
    if (largest < kNothing) return;
    exponent_ = std::ilogb(largest);
    const auto factor = static_cast<float>(std::ldexp(1.0, -exponent_));
    for (size_t i = 0; i < kN; ++i) y[i] = x[i] * factor;
  }

  // `scale` in the units of x as f16, and `scale` as that f16 gives it. A scale that is not 0 stays
  // so as long as its least value may help.
  F16 Half(float& scale) const {
    const double exact = std::ldexp(static_cast<double>(scale), exponent_);
    const F16 half = ToF16(static_cast<float>(
        std::clamp(exact, -static_cast<double>(kMaxHalf), static_cast<double>(kMaxHalf))));
    scale = static_cast<float>(std::ldexp(static_cast<double>(ToFloat(half)), -exponent_));
    return half;
  }

  // The same for a scale that codes are multiplied with once more: rounds away from 0.
  F16 OuterHalf(float& scale) const {
    const float wanted = scale;
    const F16 half = Half(scale);
    if (wanted == 0 || scale != 0) return half;
    const F16 least{static_cast<uint16_t>(std::signbit(wanted) ? 0x8001u : 1u)};
    scale = static_cast<float>(std::ldexp(static_cast<double>(ToFloat(least)), -exponent_));
    return least;
  }

  int exponent() const { return exponent_; }

  float y[kN] = {};

 private:
  int exponent_ = 0;
};

float Inverse(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

// q = the codes of (y - min) * inverse, in [low, high].
template <size_t kN>
void Codes(const float* y, float inverse, float min, float low, float high, float* q) {
  for (size_t i = 0; i < kN; ++i)
    q[i] = Round(std::min(std::max((y[i] - min) * inverse, low), high));
}

// Squared error of y against scale * q + min.
template <size_t kN>
float ErrorOf(const float* y, const float* q, float scale, float min) {
  return Sum<kN>([&](size_t i) {
    const float e = y[i] - (scale * q[i] + min);
    return e * e;
  });
}

template <size_t kN>
float Largest(const float* y) {
  float largest = 0;
  for (size_t i = 0; i < kN; ++i) largest = std::fabs(y[i]) > std::fabs(largest) ? y[i] : largest;
  return largest;
}

// The scale, of either sign, with which codes in [low, high] come closest to y. `code_of(inverse,
// q)` writes what the codes stand for.
template <size_t kN, class CodeOf>
float FitScale(const float* y, float low, float high, float step, const CodeOf& code_of) {
  const float largest = Largest<kN>(y);
  if (std::fabs(largest) < 1e-30f) return 0;
  float best_gain = 0;
  float best = 0;
  float q[kN];
  for (float end : {low, high}) {
    for (int t = -kTries; t <= kTries; ++t) {
      code_of((end + static_cast<float>(t) * step) / largest, q);
      const float yq = Sum<kN>([&](size_t i) { return y[i] * q[i]; });
      const float qq = Sum<kN>([&](size_t i) { return q[i] * q[i]; });
      // The error is |y|^2 - yq^2 / qq where the scale is the best one, yq / qq.
      if (qq > 0 && yq * yq > best_gain * qq) {
        best_gain = yq * yq / qq;
        best = yq / qq;
      }
    }
  }
  return best;
}

template <size_t kN>
float FitIntegers(const float* y, float low, float high) {
  return FitScale<kN>(y, low, high, kTryStep,
                      [&](float inverse, float* q) { Codes<kN>(y, inverse, 0, low, high, q); });
}

// value = scale * q + min, q from 0 to some largest code.
struct Line {
  float scale = 0;
  float min = 0;
};

// The best line through (q, y); min is kept at most 0 if it has to be.
template <size_t kN>
Line LeastSquares(const float* y, const float* q, bool min_is_negative) {
  constexpr auto kCount = static_cast<float>(kN);
  const float sq = Sum<kN>([&](size_t i) { return q[i]; });
  const float sqq = Sum<kN>([&](size_t i) { return q[i] * q[i]; });
  const float sy = Sum<kN>([&](size_t i) { return y[i]; });
  const float syq = Sum<kN>([&](size_t i) { return y[i] * q[i]; });
  const float determinant = kCount * sqq - sq * sq;
  const Line from_zero{sqq > 0 ? syq / sqq : 0, 0};
  // All codes are one: a constant.
  if (determinant <= 0) return min_is_negative && sy > 0 ? from_zero : Line{0, sy / kCount};
  Line line{(kCount * syq - sq * sy) / determinant, (sqq * sy - sq * syq) / determinant};
  if (min_is_negative && line.min > 0) line = from_zero;
  line.scale = std::max(line.scale, 0.0f);
  return line;
}

template <size_t kN>
Line FitLine(const float* y, float top, bool min_is_negative) {
  float low = *std::min_element(y, y + kN);
  const float high = *std::max_element(y, y + kN);
  if (min_is_negative) low = std::min(low, 0.0f);
  if (high - low < 1e-30f) return {0, low};
  Line best;
  float best_error = kInfinity;
  float q[kN];
  for (int t = -kTries; t <= kTries; ++t) {
    const float step = (high - low) / (top + static_cast<float>(t) * kTryStep);
    Codes<kN>(y, 1.0f / step, low, 0, top, q);
    const Line line = LeastSquares<kN>(y, q, min_is_negative);
    const float error = ErrorOf<kN>(y, q, line.scale, line.min);
    if (error >= best_error) continue;
    best_error = error;
    best = line;
  }
  return best;
}

uint8_t Byte(float code) { return static_cast<uint8_t>(static_cast<int>(code)); }

uint8_t* PutHalf(uint8_t* out, F16 half) {
  std::memcpy(out, &half.bits, sizeof(half.bits));
  return out + sizeof(half.bits);
}

// 32 codes of 4 bits: the first 16 in the low nibbles.
void PutNibbles(const uint8_t* codes, uint8_t* out) {
  for (size_t i = 0; i < 16; ++i)
    out[i] = static_cast<uint8_t>((codes[i] & 15u) | (codes[16 + i] & 15u) << 4);
}

void PutHighBits(const uint8_t* codes, uint8_t* out) {
  std::fill(out, out + 4, uint8_t{0});
  for (size_t i = 0; i < 32; ++i)
    out[i / 8] = static_cast<uint8_t>(out[i / 8] | (codes[i] >> 4 & 1u) << (i % 8));
}

// Q4_0, Q5_0: one scale, codes around the middle.
template <int kBits>
void EncodeCentred(const float* x, uint8_t* out) {
  constexpr float kHalf = 1 << (kBits - 1);
  const Block<32> block(x);
  float scale = FitIntegers<32>(block.y, -kHalf, kHalf - 1);
  out = PutHalf(out, block.Half(scale));
  float q[32];
  Codes<32>(block.y, Inverse(scale), 0, -kHalf, kHalf - 1, q);
  uint8_t codes[32];
  for (size_t i = 0; i < 32; ++i) codes[i] = Byte(q[i] + kHalf);
  if constexpr (kBits == 5) {
    PutHighBits(codes, out);
    out += 4;
  }
  PutNibbles(codes, out);
}

// Q4_1, Q5_1: a scale and an offset.
template <int kBits>
void EncodeLine(const float* x, uint8_t* out) {
  constexpr float kTop = (1 << kBits) - 1;
  const Block<32> block(x);
  Line line = FitLine<32>(block.y, kTop, false);
  out = PutHalf(out, block.Half(line.scale));
  out = PutHalf(out, block.Half(line.min));
  float q[32];
  Codes<32>(block.y, Inverse(line.scale), line.min, 0, kTop, q);
  uint8_t codes[32];
  for (size_t i = 0; i < 32; ++i) codes[i] = Byte(q[i]);
  if constexpr (kBits == 5) {
    PutHighBits(codes, out);
    out += 4;
  }
  PutNibbles(codes, out);
}

void EncodeQ80(const float* x, uint8_t* out) {
  const Block<32> block(x);
  float scale = std::fabs(Largest<32>(block.y)) / 127.0f;
  out = PutHalf(out, block.Half(scale));
  float q[32];
  Codes<32>(block.y, Inverse(scale), 0, -127, 127, q);
  for (size_t i = 0; i < 32; ++i) out[i] = Byte(q[i]);
}

// Increasing values and the index of the one that is nearest.
constexpr std::array<float, 16> kIq4Values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};

template <size_t kValues>
void NearestOf(const std::array<float, kValues>& values, const float (&x)[32],
               int32_t (&index)[32]) {
  std::fill(index, index + 32, 0);
  for (size_t v = 1; v < kValues; ++v) {
    const float middle = 0.5f * (values[v - 1] + values[v]);
    for (size_t i = 0; i < 32; ++i) index[i] += static_cast<int32_t>(x[i] > middle);
  }
}

void EncodeIq4Nl(const float* x, uint8_t* out) {
  const Block<32> block(x);
  int32_t index[32];
  const auto find = [&](float inverse) {
    float scaled[32];
    for (size_t i = 0; i < 32; ++i) scaled[i] = block.y[i] * inverse;
    NearestOf(kIq4Values, scaled, index);
  };
  // A change of 4 in 127 moves the ends about as far as kTryStep does in 8.
  float scale = FitScale<32>(block.y, -127, 113, 4.0f, [&](float inverse, float* q) {
    find(inverse);
    for (size_t i = 0; i < 32; ++i) q[i] = kIq4Values[static_cast<size_t>(index[i])];
  });
  out = PutHalf(out, block.Half(scale));
  find(Inverse(scale));
  uint8_t codes[32];
  for (size_t i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(index[i]);
  PutNibbles(codes, out);
}

// MXFP4: the exponent is one of those around log2(largest / 6).
void EncodeMxFp4(const float* x, uint8_t* out) {
  constexpr std::array<float, 8> kMagnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const Block<32> block(x);
  float best_error = kInfinity;
  uint8_t codes[32];
  const int highest = block.exponent() - 1;  // the largest is in [1, 2) here, 4 to 8 times 2^-2
  for (int exponent = highest - 2; exponent <= highest; ++exponent) {
    const int biased = std::clamp(exponent + 127, 0, 254);
    const auto scale = static_cast<float>(std::ldexp(1.0, biased - 127 - block.exponent()));
    const int32_t top = biased < 253 ? 7 : 5;  // 2^126 times 4 is infinite
    float scaled[32];
    for (size_t i = 0; i < 32; ++i) scaled[i] = std::fabs(block.y[i]) / scale;
    int32_t index[32];
    NearestOf(kMagnitudes, scaled, index);
    uint8_t tried[32];
    float q[32];
    for (size_t i = 0; i < 32; ++i) {
      index[i] = std::min(index[i], top);
      const bool minus = block.y[i] < 0 && index[i] != 0;
      const float magnitude = kMagnitudes[static_cast<size_t>(index[i])];
      q[i] = minus ? -magnitude : magnitude;
      tried[i] = static_cast<uint8_t>(index[i] | (minus ? 8 : 0));
    }
    const float error = ErrorOf<32>(block.y, q, scale, 0);
    if (error >= best_error) continue;
    best_error = error;
    std::copy(tried, tried + 32, codes);
    out[0] = static_cast<uint8_t>(biased);
  }
  PutNibbles(codes, out + 1);
}

constexpr size_t kSuper = 256;  // elements of a block of the K types

// A block of the K types in floats: codes of elements, and of the scales of its runs.
template <size_t kRun>
struct SuperBlock {
  static constexpr size_t kRuns = kSuper / kRun;

  float low = 0, high = 0;            // of the codes of elements
  F16 d_half{}, dmin_half{};          // as they are written,
  float d_value = 0, dmin_value = 0;  // and in the units of Block
  float scale_code[kRuns] = {};
  float min_code[kRuns] = {};
  float q[kSuper] = {};
  float error = kInfinity;

  // Gives run r the codes of (scale, min) if they are better than what it had, `run_error`.
  void TryRun(const float* y, size_t r, float scale, float min, float& run_error) {
    float tried[kRun];
    const float step = d_value * scale;
    const float offset = -dmin_value * min;
    Codes<kRun>(y + r * kRun, Inverse(step), offset, low, high, tried);
    const float found = ErrorOf<kRun>(y + r * kRun, tried, step, offset);
    if (found >= run_error) return;
    run_error = found;
    scale_code[r] = scale;
    min_code[r] = min;
    std::copy(tried, tried + kRun, q + r * kRun);
  }
};

// How often the scales of a block are fitted to its codes anew.
constexpr int kRefinements = 2;

// Q2_K, Q4_K, Q5_K: (d * scale code) * q - dmin * min code.
template <size_t kRun>
SuperBlock<kRun> FitSuperLine(const Block<kSuper>& block, float top, float top_scale) {
  constexpr size_t kRuns = SuperBlock<kRun>::kRuns;
  float scales[kRuns];
  float mins[kRuns];
  for (size_t r = 0; r < kRuns; ++r) {
    const Line line = FitLine<kRun>(block.y + r * kRun, top, true);
    scales[r] = line.scale;
    mins[r] = -line.min;
  }
  float d = *std::max_element(scales, scales + kRuns) / top_scale;
  float dmin = *std::max_element(mins, mins + kRuns) / top_scale;
  SuperBlock<kRun> best;
  for (int round = 0; round < kRefinements; ++round) {
    SuperBlock<kRun> tried;
    tried.high = top;
    tried.d_half = block.OuterHalf(d);
    tried.dmin_half = block.OuterHalf(dmin);
    tried.d_value = d;
    tried.dmin_value = dmin;
    tried.error = 0;
    for (size_t r = 0; r < kRuns; ++r) {
      float run_error = kInfinity;
      const float scale = Round(std::min(scales[r] * Inverse(d), top_scale));
      const float min = Round(std::min(mins[r] * Inverse(dmin), top_scale));
      for (float s : {scale, scale - 1, scale + 1}) {
        if (s < 0 || s > top_scale) continue;
        for (float m : {min, min - 1, min + 1}) {
          if (m >= 0 && m <= top_scale) tried.TryRun(block.y, r, s, m, run_error);
        }
      }
      tried.error += run_error;
    }
    if (tried.error >= best.error) break;
    best = tried;
    // Least squares for d and dmin, the codes being what they are.
    float aa = 0, ab = 0, bb = 0, ya = 0, yb = 0;
    for (size_t r = 0; r < kRuns; ++r) {
      const float* y = block.y + r * kRun;
      const float* q = best.q + r * kRun;
      const float s = best.scale_code[r];
      const float m = best.min_code[r];
      const float sum_q = Sum<kRun>([&](size_t i) { return q[i]; });
      aa += s * s * Sum<kRun>([&](size_t i) { return q[i] * q[i]; });
      ab -= s * m * sum_q;
      bb += m * m * static_cast<float>(kRun);
      ya += s * Sum<kRun>([&](size_t i) { return y[i] * q[i]; });
      yb -= m * Sum<kRun>([&](size_t i) { return y[i]; });
    }
    const float determinant = aa * bb - ab * ab;
    if (determinant > 0) {
      d = std::max((bb * ya - ab * yb) / determinant, 0.0f);
      dmin = std::max((aa * yb - ab * ya) / determinant, 0.0f);
    } else if (aa > 0) {
      d = std::max(ya / aa, 0.0f);
    }
  }
  return best;
}

// Q3_K, Q6_K: (d * scale code) * q, both of either sign. The largest scale takes the code
// `low_scale`, which has no opposite.
template <size_t kRun>
SuperBlock<kRun> FitSuperCentred(const Block<kSuper>& block, float low, float low_scale) {
  constexpr size_t kRuns = SuperBlock<kRun>::kRuns;
  const float high = -low - 1;
  const float high_scale = -low_scale - 1;
  float scales[kRuns];
  float largest = 0;
  for (size_t r = 0; r < kRuns; ++r) {
    scales[r] = FitIntegers<kRun>(block.y + r * kRun, low, high);
    if (std::fabs(scales[r]) > std::fabs(largest)) largest = scales[r];
  }
  float d = largest / low_scale;
  SuperBlock<kRun> best;
  for (int round = 0; round < kRefinements; ++round) {
    SuperBlock<kRun> tried;
    tried.low = low;
    tried.high = high;
    tried.d_half = block.OuterHalf(d);
    tried.d_value = d;
    tried.error = 0;
    for (size_t r = 0; r < kRuns; ++r) {
      float run_error = kInfinity;
      const float scale = Round(std::min(std::max(scales[r] * Inverse(d), low_scale), high_scale));
      for (float s : {scale, scale - 1, scale + 1}) {
        if (s >= low_scale && s <= high_scale) tried.TryRun(block.y, r, s, 0, run_error);
      }
      tried.error += run_error;
    }
    if (tried.error >= best.error) break;
    best = tried;
    float aa = 0, ya = 0;
    for (size_t r = 0; r < kRuns; ++r) {
      const float* y = block.y + r * kRun;
      const float* q = best.q + r * kRun;
      const float s = best.scale_code[r];
      aa += s * s * Sum<kRun>([&](size_t i) { return q[i] * q[i]; });
      ya += s * Sum<kRun>([&](size_t i) { return y[i] * q[i]; });
    }
    if (aa > 0) d = ya / aa;
  }
  return best;
}

// Bits [shift, shift + bits) of the codes of all 256 elements, in runs of `kRow` bytes: the first
// run in the lowest bits, the next ones above, then the next bytes.
template <size_t kRow>
void PutRuns(const uint8_t* codes, unsigned shift, unsigned bits, uint8_t* out) {
  const size_t runs = 8 / bits;
  std::fill(out, out + kSuper / runs, uint8_t{0});
  const unsigned mask = (1u << bits) - 1;
  for (size_t i = 0; i < kSuper; ++i) {
    const size_t run = i / kRow;
    uint8_t& byte = out[run / runs * kRow + i % kRow];
    const unsigned part = (static_cast<unsigned>(codes[i]) >> shift) & mask;
    byte = static_cast<uint8_t>(byte | part << (run % runs * bits));
  }
}

void ToBytes(const float* q, float offset, uint8_t* codes) {
  for (size_t i = 0; i < kSuper; ++i) codes[i] = Byte(q[i] + offset);
}

// The 6-bit scales and mins of Q4_K and Q5_K in 12 bytes.
void PutScalesAndMins(const float* scales, const float* mins, uint8_t* out) {
  for (size_t k = 0; k < 4; ++k) {
    const unsigned s = Byte(scales[k]), s_far = Byte(scales[4 + k]);
    const unsigned m = Byte(mins[k]), m_far = Byte(mins[4 + k]);
    out[k] = static_cast<uint8_t>(s | (s_far >> 4) << 6);
    out[4 + k] = static_cast<uint8_t>(m | (m_far >> 4) << 6);
    out[8 + k] = static_cast<uint8_t>((s_far & 15u) | (m_far & 15u) << 4);
  }
}

void EncodeQ2K(const float* x, uint8_t* out) {
  const SuperBlock<16> fit = FitSuperLine<16>(Block<kSuper>(x), 3, 15);
  for (size_t r = 0; r < 16; ++r)
    out[r] = static_cast<uint8_t>(Byte(fit.scale_code[r]) | Byte(fit.min_code[r]) << 4);
  uint8_t codes[kSuper];
  ToBytes(fit.q, 0, codes);
  PutRuns<32>(codes, 0, 2, out + 16);
  PutHalf(PutHalf(out + 80, fit.d_half), fit.dmin_half);
}

void EncodeQ3K(const float* x, uint8_t* out) {
  const SuperBlock<16> fit = FitSuperCentred<16>(Block<kSuper>(x), -4, -32);
  uint8_t codes[kSuper];
  ToBytes(fit.q, 4, codes);
  PutRuns<32>(codes, 2, 1, out);
  PutRuns<32>(codes, 0, 2, out + 32);
  uint8_t* scales = out + 96;
  std::fill(scales, scales + 12, uint8_t{0});
  for (size_t r = 0; r < 16; ++r) {
    const unsigned code = Byte(fit.scale_code[r] + 32);
    uint8_t& low = scales[r % 8];
    uint8_t& high = scales[8 + r % 4];
    low = static_cast<uint8_t>(low | (code & 15u) << (r / 8 * 4));
    high = static_cast<uint8_t>(high | (code >> 4) << (r / 4 * 2));
  }
  PutHalf(out + 108, fit.d_half);
}

void EncodeQ4K(const float* x, uint8_t* out) {
  const SuperBlock<32> fit = FitSuperLine<32>(Block<kSuper>(x), 15, 63);
  PutHalf(PutHalf(out, fit.d_half), fit.dmin_half);
  PutScalesAndMins(fit.scale_code, fit.min_code, out + 4);
  uint8_t codes[kSuper];
  ToBytes(fit.q, 0, codes);
  PutRuns<32>(codes, 0, 4, out + 16);
}

void EncodeQ5K(const float* x, uint8_t* out) {
  const SuperBlock<32> fit = FitSuperLine<32>(Block<kSuper>(x), 31, 63);
  PutHalf(PutHalf(out, fit.d_half), fit.dmin_half);
  PutScalesAndMins(fit.scale_code, fit.min_code, out + 4);
  uint8_t codes[kSuper];
  ToBytes(fit.q, 0, codes);
  PutRuns<32>(codes, 4, 1, out + 16);
  PutRuns<32>(codes, 0, 4, out + 48);
}

void EncodeQ6K(const float* x, uint8_t* out) {
  const SuperBlock<16> fit = FitSuperCentred<16>(Block<kSuper>(x), -32, -128);
  uint8_t codes[kSuper];
  ToBytes(fit.q, 32, codes);
  PutRuns<64>(codes, 0, 4, out);
  PutRuns<32>(codes, 4, 2, out + 128);
  for (size_t r = 0; r < 16; ++r) out[192 + r] = Byte(fit.scale_code[r]);
  PutHalf(out + 208, fit.d_half);
}

using EncodeBlock = void (*)(const float* x, uint8_t* out);

// nullptr if there is none.
EncodeBlock EncoderOf(DType dtype) {
  switch (dtype) {
    case DType::kGgmlQ40: return &EncodeCentred<4>;
    case DType::kGgmlQ41: return &EncodeLine<4>;
    case DType::kGgmlQ50: return &EncodeCentred<5>;
    case DType::kGgmlQ51: return &EncodeLine<5>;
    case DType::kGgmlQ80: return &EncodeQ80;
    case DType::kGgmlQ2K: return &EncodeQ2K;
    case DType::kGgmlQ3K: return &EncodeQ3K;
    case DType::kGgmlQ4K: return &EncodeQ4K;
    case DType::kGgmlQ5K: return &EncodeQ5K;
    case DType::kGgmlQ6K: return &EncodeQ6K;
    case DType::kGgmlIq4Nl: return &EncodeIq4Nl;
    case DType::kGgmlMxFp4: return &EncodeMxFp4;
    default: return nullptr;
  }
}

}  // namespace

bool CanEncodeGgml(DType dtype) { return EncoderOf(dtype) != nullptr; }

void EncodeGgmlRow(DType dtype, std::span<const float> x, std::span<std::byte> out) {
  const EncodeBlock encode = EncoderOf(dtype);
  if (encode == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("there is no encoder for {}", DTypeName(dtype)));
  }
  const size_t block = DTypeBlock(dtype);
  SY_CHECK_EQ(x.size() % block, 0u);
  SY_CHECK_EQ(out.size(), BytesOf(dtype, x.size()));
  const auto not_finite =
      std::find_if(x.begin(), x.end(), [](float value) { return !std::isfinite(value); });
  if (not_finite != x.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} cannot hold {} (element {} of a row of {})", DTypeName(dtype),
                            *not_finite, not_finite - x.begin(), x.size()));
  }
  auto* bytes = reinterpret_cast<uint8_t*>(out.data());
  for (size_t i = 0; i < x.size(); i += block, bytes += DTypeBlockBytes(dtype))
    encode(x.data() + i, bytes);
}

}  // namespace switchyard::quant
