// Random numbers of the tests: one seed a run, printed at its start. The seed is fixed, so that a
// run says something about the change and not about the dice; SWITCHYARD_TEST_SEED sets another
// one, or "random" draws it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

namespace switchyard::testing {

inline uint64_t TestSeed() {
  static const uint64_t seed = [] {
    const char* from_env = std::getenv("SWITCHYARD_TEST_SEED");
    if (from_env == nullptr) return uint64_t{20};
    if (std::string_view(from_env) == "random") return uint64_t{std::random_device{}()};
    return uint64_t{std::strtoull(from_env, nullptr, 10)};
  }();
  return seed;
}

// An engine of its own for each `stream`, so that tests do not depend on each other's order.
inline std::mt19937_64 MakeRandom(uint64_t stream = 0) {
  return std::mt19937_64(TestSeed() * 1000003 + stream);
}

inline std::vector<float> RandomFloats(std::mt19937_64& random, size_t count, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace switchyard::testing
