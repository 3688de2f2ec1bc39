#include "moe/oracle/fake_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "switchyard/core/small_floats.h"

namespace switchyard::moe {
namespace {

float AbsMax(std::span<const double> values) {
  float amax = 0;
  for (double value : values) amax = std::max(amax, std::fabs(static_cast<float>(value)));
  return amax;
}

// One NaN or infinity makes the scale of its group NaN, and so all values of the group.
bool IsPoisoned(std::span<double> values) {
  const auto is_finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
  if (std::all_of(values.begin(), values.end(), is_finite)) return false;
  std::fill(values.begin(), values.end(), std::numeric_limits<double>::quiet_NaN());
  return true;
}

// Integers from -low to high, scale amax / high. Values are multiplied by its reciprocal, as
// kernels do: a quotient would fall to the other side of some boundaries.
void FakeInteger(std::span<double> values, float low, float high, float floor) {
  if (IsPoisoned(values)) return;
  const float amax = std::max(AbsMax(values), floor);
  const float scale = amax / high;
  const float reciprocal = high / amax;
  for (double& value : values) {
    const float code =
        std::clamp(std::nearbyint(static_cast<float>(value) * reciprocal), -low, high);
    value = double{code} * double{scale};
  }
}

void FakeInt8Static(std::span<double> values, float scale, float offset) {
  const float reciprocal = 1.0f / scale;
  for (double& value : values) {
    const float scaled = static_cast<float>(value) * reciprocal + offset;
    // There is no code for NaN: it becomes code 0.
    const float code =
        std::isnan(scaled) ? 0.0f : std::clamp(std::nearbyint(scaled), -128.0f, 127.0f);
    value = (double{code} - double{offset}) * double{scale};
  }
}

void FakeE4M3(std::span<double> values, float scale) {
  for (double& value : values) {
    const float scaled = std::clamp(static_cast<float>(value) / scale, -kE4M3Max, kE4M3Max);
    value = double{DecodeE4M3(EncodeE4M3(scaled))} * double{scale};
  }
}

// e4m3 with a scale of its own.
void FakeE4M3Group(std::span<double> values, const ActQuant& how, float floor) {
  if (IsPoisoned(values)) return;
  const float scale = std::max(AbsMax(values), floor) / kE4M3Max;
  FakeE4M3(values, how.power_of_two_scale ? std::exp2(std::ceil(std::log2(scale))) : scale);
}

// 2^e of an MX block, e by the rule in force.
double MxScale(std::span<const double> values, MxScaleRule rule, float largest, int emax) {
  const float amax = AbsMax(values);
  if (amax == 0) return 1.0;
  int exponent;
  if (rule != MxScaleRule::kCeil) {
    exponent = std::ilogb(amax);
    // Rounded to one bit of mantissa, what is from 1.75 on becomes 2.
    if (rule == MxScaleRule::kEven && std::ldexp(double{amax}, -exponent) >= 1.75) ++exponent;
    exponent -= emax;
  } else {
    exponent = static_cast<int>(std::ceil(std::log2(double{amax} / double{largest})));
  }
  return std::ldexp(1.0, std::clamp(exponent, -127, 127));
}

void FakeMx(std::span<double> values, const ActQuant& how) {
  const bool fp8 = how.kind == ActQuantKind::kMxFp8;
  for (size_t first = 0; first < values.size(); first += 32) {
    const std::span<double> block =
        values.subspan(first, std::min<size_t>(32, values.size() - first));
    if (IsPoisoned(block)) continue;
    const double scale = MxScale(block, how.mx_rule, fp8 ? kE4M3Max : kE2M1Max, fp8 ? 8 : 2);
    for (double& value : block) {
      const auto scaled = static_cast<float>(static_cast<float>(value) / scale);
      const float code =
          fp8 ? DecodeE4M3(EncodeE4M3(scaled)) : DecodeE2M1(EncodeE2M1(scaled, how.mx_rounding));
      value = double{code} * scale;
    }
  }
}

void FakeRow(const ActQuant& how, std::span<double> row) {
  const float floor = how.amax_floor != 0 ? how.amax_floor : 1e-10f;
  switch (how.kind) {
    case ActQuantKind::kNone:
    case ActQuantKind::kFp8Tensor: return;  // the latter is not a matter of one row
    case ActQuantKind::kInt8Token: return FakeInteger(row, 127, 127, floor);
    case ActQuantKind::kInt4Token: return FakeInteger(row, 8, 7, floor);
    case ActQuantKind::kInt8Static: return FakeInt8Static(row, how.scale, how.offset);
    case ActQuantKind::kFp8Token: return FakeE4M3Group(row, how, floor);
    case ActQuantKind::kFp8TensorStatic: return FakeE4M3(row, how.scale);
    case ActQuantKind::kFp8Group:
      for (size_t first = 0; first < row.size(); first += how.group) {
        FakeE4M3Group(row.subspan(first, std::min(how.group, row.size() - first)), how, floor);
      }
      return;
    case ActQuantKind::kMxFp8:
    case ActQuantKind::kMxFp4: return FakeMx(row, how);
  }
}

}  // namespace

void FakeQuantize(const ActQuant& how, std::vector<std::vector<double>>& rows) {
  if (how.kind == ActQuantKind::kFp8Tensor) {
    // What is not finite counts for no scale and becomes NaN.
    float amax = how.amax_floor != 0 ? how.amax_floor : 1e-12f;
    for (std::vector<double>& row : rows) {
      for (double& value : row) {
        if (!std::isfinite(static_cast<float>(value)))
          value = std::numeric_limits<double>::quiet_NaN();
      }
      amax = std::max(amax, AbsMax(row));
    }
    for (std::vector<double>& row : rows) FakeE4M3(row, amax / kE4M3Max);
    return;
  }
  for (std::vector<double>& row : rows) FakeRow(how, row);
}

}  // namespace switchyard::moe
