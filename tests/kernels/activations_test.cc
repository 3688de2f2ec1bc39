// Every activation of the table against its scalar form, on every instruction set. A line that is
// added to activations.def is tested here without a line of test code.
#include "kernels/activations/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "switchyard/core/dtype.h"
#include "testing/errors.h"
#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::kernels {
namespace {

using testing::GuardedBuffer;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

// Around the lanes of every target (4, 8 and 16).
const std::vector<size_t> kSizes = {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 192, 1000, 2880};

// No limits, those of models, and ones that random values often reach.
const std::vector<ActivationParams> kParams = {
    {},
    {.alpha = 1.702f, .clamp_limit = 7.0f, .swiglu_limit = 10.0f},
    {.alpha = 4.0f, .clamp_limit = 2.0f, .swiglu_limit = 1.5f}};

// How far a row's value may be from the scalar form.
//
// Longest chain: two exponentials or a hyperbolic tangent (4 units in the last place, by Highway's
// tests) and a dozen operations, 24 roundings of 2^-24. The argument of an exponential is rounded
// up to 4 times before, which counts as often as the argument is large: at most
// max(|alpha g|, g^2, 16), and 104, where the exponential ends. Results below the smallest normal
// number (2^-126) lose bits, before a multiplication by `up` or by a limit.
double Bound(const ActivationEntry& activation, const ActivationParams& params, double gate,
             double up, double expected) {
  const double argument =
      std::min(104.0, std::max({16.0, std::abs(params.alpha * gate), gate * gate}));
  double relative = (24 + 4 * argument) * 0x1p-24;
  // On the edge between two bf16 numbers both forms may round apart.
  if (activation.name == "silu_rounded") relative += 0x1p-7;
  const double small = 0x1p-126 * (1 + std::abs(up)) * (1 + std::abs(params.alpha));
  return relative * std::abs(expected) + small;
}

// One value of a row, wherever it came from.
void ExpectLikeScalar(const ActivationEntry& activation, const ActivationParams& params, float gate,
                      float up, float out) {
  if (!activation.is_gated) up = 0;
  const double expected = activation.scalar(gate, up, params);
  const auto where = [&] {
    return ::testing::Message() << activation.name << "(" << gate << ", " << up << ") alpha "
                                << params.alpha << " limits " << params.clamp_limit << " "
                                << params.swiglu_limit << ": " << out << ", expected " << expected;
  };
  // The factor of `up` is too small for f32 (core/activation.h).
  if (std::isinf(up) && std::abs(activation.scalar(gate, 1.0, params)) < 0x1p-126) return;
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(out)) << where();
  } else if (std::isinf(out)) {
    EXPECT_GE(std::abs(expected), kMax * (1 - 0x1p-10)) << where();
    EXPECT_EQ(std::signbit(out), std::signbit(expected)) << where();
  } else if (std::abs(expected) > kMax * (1 + 0x1p-10)) {
    EXPECT_TRUE(std::isinf(out)) << where();
  } else {
    EXPECT_LE(std::abs(out - expected), Bound(activation, params, gate, up, expected)) << where();
  }
}

// Calls body(activation, params) for every pair on every instruction set.
template <typename Body>
void ForEachActivation(const Body& body) {
  testing::ForEachTarget([&] {
    for (const ActivationEntry& activation : AllActivations()) {
      SCOPED_TRACE(activation.name);
      for (const ActivationParams& params : kParams) body(activation, params);
    }
  });
}

TEST(Activations, MatchTheirScalarFormsAtEverySize) {
  auto random = testing::MakeRandom(23);
  ForEachActivation([&](const ActivationEntry& activation, const ActivationParams& params) {
    for (size_t n : kSizes) {
      for (float scale : {1.0f, 6.0f}) {
        GuardedBuffer<float> gate(testing::RandomFloats(random, n, scale));
        GuardedBuffer<float> up(testing::RandomFloats(random, n, scale));
        GuardedBuffer<float> out(n);
        activation.f32(gate.data(), up.data(), n, params, out.data());
        for (size_t i = 0; i < n; ++i) ExpectLikeScalar(activation, params, gate[i], up[i], out[i]);
      }
    }
  });
}

// What models meet is a gate within a few units: every f32 exponent and a fine grid.
TEST(Activations, MatchTheirScalarFormsOnAGrid) {
  std::vector<float> gate;
  for (int i = -4000; i <= 4000; ++i) gate.push_back(static_cast<float>(i) * 0.005f);
  for (int e = -149; e < 128; ++e) {
    for (float sign : {1.0f, -1.0f}) gate.push_back(sign * std::ldexp(1.37f, e));
  }
  ForEachActivation([&](const ActivationEntry& activation, const ActivationParams& params) {
    const std::vector<float> up(gate.size(), 1.25f);
    std::vector<float> out(gate.size());
    activation.f32(gate.data(), up.data(), gate.size(), params, out.data());
    for (size_t i = 0; i < gate.size(); ++i)
      ExpectLikeScalar(activation, params, gate[i], up[i], out[i]);
  });
}

// The error function is ours: within 2e-7 |x| of the f64 form, where most libraries' f32 forms are.
TEST(Activations, GeluIsTheErrorFunctionForm) {
  testing::ForEachTarget([] {
    const ActivationEntry& gelu = FindActivation("gelu_plain");
    for (int i = -160000; i <= 160000; ++i) {
      const float x = static_cast<float>(i) * 1e-4f;
      float y = 0;
      gelu.f32(&x, nullptr, 1, {}, &y);
      const double expected = 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      ASSERT_LE(std::abs(y - expected), 2e-7 * std::abs(x)) << x;
    }
  });
}

TEST(Activations, FarEndsAreWhatTheScalarFormGives) {
  std::vector<float> ends = {0.0f, kNaN};
  for (float end : {1e-45f, 1e-40f, 1.17549435e-38f, 14.4f, 15.0f, 87.0f, 88.8f, 103.9f, 104.1f,
                    178.0f, 200.0f, 1e4f, 1e10f, 1e30f, kMax, kInfinity}) {
    ends.push_back(end);
    ends.push_back(-end);
  }
  ForEachActivation([&](const ActivationEntry& activation, const ActivationParams& params) {
    for (float up : ends) {
      const std::vector<float> ups(ends.size(), up);
      std::vector<float> out(ends.size());
      activation.f32(ends.data(), ups.data(), ends.size(), params, out.data());
      for (size_t i = 0; i < ends.size(); ++i)
        ExpectLikeScalar(activation, params, ends[i], up, out[i]);
    }
  });
}

// -inf is where a masked or overflowed product ends: every gate closes or is bounded there.
TEST(Activations, AnInfiniteNegativeGateGivesTheLimit) {
  ForEachActivation([](const ActivationEntry& activation, const ActivationParams& params) {
    const float gate = -kInfinity;
    const float up = 3.0f;
    float out = 1;
    activation.f32(&gate, &up, 1, params, &out);
    EXPECT_EQ(out, 0.0f);
    EXPECT_EQ(activation.scalar(gate, up, params), 0.0);
  });
}

TEST(Activations, BitsDoNotDependOnThePlaceInTheRow) {
  auto random = testing::MakeRandom(24);
  ForEachActivation([&](const ActivationEntry& activation, const ActivationParams& params) {
    constexpr size_t kCount = 53;  // three vectors of 16 lanes and a tail
    const std::vector<float> gate = testing::RandomFloats(random, kCount, 5.0f);
    const std::vector<float> up = testing::RandomFloats(random, kCount);
    std::vector<float> whole(kCount);
    activation.f32(gate.data(), up.data(), kCount, params, whole.data());
    for (size_t begin = 0; begin < kCount; ++begin) {
      for (size_t n : {size_t{1}, std::min<size_t>(19, kCount - begin)}) {
        std::vector<float> part(n);
        activation.f32(gate.data() + begin, up.data() + begin, n, params, part.data());
        ASSERT_EQ(std::memcmp(part.data(), whole.data() + begin, n * sizeof(float)), 0)
            << begin << " " << n;
      }
    }
  });
}

TEST(Activations, TheOutputMayBeAnInput) {
  auto random = testing::MakeRandom(25);
  ForEachActivation([&](const ActivationEntry& activation, const ActivationParams& params) {
    for (size_t n : kSizes) {
      GuardedBuffer<float> gate(testing::RandomFloats(random, n, 3.0f));
      GuardedBuffer<float> up(testing::RandomFloats(random, n));
      std::vector<float> apart(n);
      activation.f32(gate.data(), up.data(), n, params, apart.data());
      GuardedBuffer<float> in_gate(n);
      std::copy_n(gate.data(), n, in_gate.data());
      activation.f32(in_gate.data(), up.data(), n, params, in_gate.data());
      EXPECT_TRUE(std::equal(apart.begin(), apart.end(), in_gate.data())) << "out is gate, " << n;
      activation.f32(gate.data(), up.data(), n, params, up.data());
      EXPECT_TRUE(std::equal(apart.begin(), apart.end(), up.data())) << "out is up, " << n;
    }
  });
}

TEST(Activations, WithoutAGateUpMayBeNull) {
  testing::ForEachTarget([] {
    for (const ActivationEntry& activation : AllActivations()) {
      if (activation.is_gated) continue;
      for (size_t n : kSizes) {
        const std::vector<float> x(n, 1.5f);
        std::vector<float> out(n);
        activation.f32(x.data(), nullptr, n, {}, out.data());
        for (float value : out) ExpectLikeScalar(activation, {}, 1.5f, 0.0f, value);
      }
    }
  });
}

TEST(Activations, SiluRoundedRoundsBeforeTheProduct) {
  auto random = testing::MakeRandom(26);
  const std::vector<float> gate = testing::RandomFloats(random, 1000, 3.0f);
  const std::vector<float> ones(1000, 1.0f);
  const std::vector<float> up = testing::RandomFloats(random, 1000);
  testing::ForEachTarget([&] {
    std::vector<float> silu(1000), rounded(1000), product(1000);
    FindActivation("silu_plain").f32(gate.data(), nullptr, 1000, {}, silu.data());
    FindActivation("silu_rounded").f32(gate.data(), ones.data(), 1000, {}, rounded.data());
    FindActivation("silu_rounded").f32(gate.data(), up.data(), 1000, {}, product.data());
    for (size_t i = 0; i < 1000; ++i) {
      EXPECT_EQ(rounded[i], ToFloat(ToBF16(silu[i])));
      EXPECT_EQ(product[i], rounded[i] * up[i]);
    }
  });
}

// Hand-computed corners of the formulas, which the comparison of two forms cannot see.
TEST(Activations, ClampsAreWhereTheContractPutsThem) {
  const auto value = [](std::string_view name, float gate, float up,
                        const ActivationParams& params) {
    float out = 0;
    FindActivation(name).f32(&gate, &up, 1, params, &out);
    return out;
  };
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  const ActivationParams limits{.alpha = 2.0f, .clamp_limit = 3.0f, .swiglu_limit = 3.0f};
  testing::ForEachTarget([&] {
    // A gate of 100 ends at the limit after SiLU, at SiLU of the limit before it.
    EXPECT_FLOAT_EQ(value("swiglu_step", 100, 5, limits), 9.0f);
    EXPECT_NEAR(value("swiglu_limit", 100, -5, limits), silu(3) * -3, 1e-5);
    // The gate has no lower limit.
    EXPECT_NEAR(value("swiglu_limit", -4, 1, limits), silu(-4), 1e-6);
    EXPECT_NEAR(value("swiglu_oai", 100, -9, limits), 3 / (1 + std::exp(-6)) * (-3 + 1), 1e-5);
    EXPECT_NEAR(value("swiglu_oai", -4, 0.5, limits), -4 / (1 + std::exp(8)) * 1.5, 1e-6);
    EXPECT_NEAR(value("situ", 1, 6, limits),
                2 * std::tanh(0.5) / (1 + std::exp(-1)) * 3 * std::tanh(2), 1e-6);
    EXPECT_NEAR(value("situ", 1, 6, {.alpha = 2.0f}), 2 * std::tanh(0.5) / (1 + std::exp(-1)) * 6,
                1e-6);
    EXPECT_EQ(value("relu2", -3, 0, {}), 0.0f);
    EXPECT_EQ(value("relu2", 3, 0, {}), 9.0f);
  });
}

TEST(Activations, AnUnknownNameIsRefusedWithTheKnownOnes) {
  testing::ExpectError(ErrorCode::kNotFound, {"did you mean \"silu\"", "swiglu_oai"},
                       [] { FindActivation("sillu"); });
}

}  // namespace
}  // namespace switchyard::kernels
