// Random numbers that depend on a seed and a position only, so that threads do not matter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::moe {

// 64 mixed bits. Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), once per argument.
inline uint64_t RandomBits(uint64_t seed, size_t row, size_t column) {
  const auto mix = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  return mix(mix(mix(seed) ^ row) ^ column);
}

// The logit that "fake" routing puts in the place of a real one: uniform in [5, 10).
inline float FakeLogit(uint64_t seed, size_t token, size_t expert) {
  constexpr float kUnit = 1.0f / static_cast<float>(1 << 24);
  return 5.0f + 5.0f * (static_cast<float>(RandomBits(seed, token, expert) >> 40) * kUnit);
}

}  // namespace switchyard::moe
