#include "model/rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

constexpr double kMaxFactor = 1e6;
constexpr size_t kMaxPositions = size_t{1} << 30;

// The stretch that keeps attention as sharp as it was; 1 for no stretch.
double YarnMscale(double scale, double mscale) {
  return scale <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

void ParseYarn(ConfigReader& scaling, RopeConfig& rope) {
  rope.original_max_positions =
      scaling.Count("original_max_position_embeddings", 1, kMaxPositions, rope.max_positions);
  const double ratio =
      static_cast<double>(rope.max_positions) / static_cast<double>(rope.original_max_positions);
  rope.factor = scaling.Number("factor", 1e-3, kMaxFactor, ratio);
  rope.beta_fast = scaling.Number("beta_fast", 1e-6, kMaxFactor, 32.0);
  rope.beta_slow = scaling.Number("beta_slow", 1e-6, kMaxFactor, 1.0);
  rope.truncate = scaling.Flag("truncate", true);
  const double mscale = scaling.Number("mscale", 0.0, kMaxFactor, 0.0);
  const double mscale_all_dim = scaling.Number("mscale_all_dim", 0.0, kMaxFactor, 0.0);
  const double inferred =
      mscale != 0 && mscale_all_dim != 0
          ? YarnMscale(rope.factor, mscale) / YarnMscale(rope.factor, mscale_all_dim)
          : YarnMscale(rope.factor, 1.0);
  rope.attention_factor = scaling.Number("attention_factor", 0.0, kMaxFactor, inferred);
  rope.mscale_all_dim = mscale_all_dim;
}

void ParseLlama3(ConfigReader& scaling, RopeConfig& rope) {
  rope.factor = scaling.Number("factor", 1e-3, kMaxFactor);
  rope.low_freq_factor = scaling.Number("low_freq_factor", 1e-6, kMaxFactor);
  rope.high_freq_factor = scaling.Number("high_freq_factor", 1e-6, kMaxFactor);
  rope.original_max_positions = scaling.Count("original_max_position_embeddings", 1, kMaxPositions);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.Refuse("high_freq_factor", "it must be larger than low_freq_factor");
  }
}

void ParseLongrope(ConfigReader& scaling, RopeConfig& rope, size_t config_original) {
  rope.original_max_positions =
      scaling.Count("original_max_position_embeddings", 2, kMaxPositions,
                    config_original != 0 ? config_original : rope.max_positions);
  rope.short_factors = scaling.Numbers("short_factor", 1e-6, kMaxFactor);
  rope.long_factors = scaling.Numbers("long_factor", 1e-6, kMaxFactor);
  for (const auto& [name, factors] :
       {std::pair{"short_factor", &rope.short_factors}, {"long_factor", &rope.long_factors}}) {
    if (factors->size() != rope.rotary_dim / 2) {
      scaling.Refuse(name, fmt::format("it must have {} numbers, one for each pair of a head",
                                       rope.rotary_dim / 2));
    }
  }
  const double ratio =
      static_cast<double>(rope.max_positions) / static_cast<double>(rope.original_max_positions);
  rope.factor = scaling.Number("factor", 1e-3, kMaxFactor, ratio);
  const double inferred =
      rope.factor <= 1.0
          ? 1.0
          : std::sqrt(1.0 + std::log(rope.factor) /
                                std::log(static_cast<double>(rope.original_max_positions)));
  rope.attention_factor = scaling.Number("attention_factor", 0.0, kMaxFactor, inferred);
}

// 1 below `low`, 0 above `high`, linear between, for pair i: how much of the unstretched frequency
// yarn keeps.
double YarnKeep(double low, double high, size_t i) {
  if (low == high) high += 0.001;
  return 1.0 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
}

// The pair at which a full turn happens `rotations` times over the original length.
double YarnCorrectionDim(const RopeConfig& config, double rotations) {
  return static_cast<double>(config.rotary_dim) *
         std::log(static_cast<double>(config.original_max_positions) /
                  (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(config.theta));
}

std::vector<double> BaseFrequencies(double theta, size_t rotary_dim) {
  std::vector<double> frequencies(rotary_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] =
        1.0 / std::pow(theta, static_cast<double>(2 * i) / static_cast<double>(rotary_dim));
  }
  return frequencies;
}

void StretchYarn(const RopeConfig& config, std::vector<double>& frequencies) {
  double low = YarnCorrectionDim(config, config.beta_fast);
  double high = YarnCorrectionDim(config, config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rotary_dim) - 1.0);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double keep = YarnKeep(low, high, i);
    frequencies[i] = frequencies[i] / config.factor * (1.0 - keep) + frequencies[i] * keep;
  }
}

void StretchLlama3(const RopeConfig& config, std::vector<double>& frequencies) {
  const auto original = static_cast<double>(config.original_max_positions);
  for (double& frequency : frequencies) {
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength < original / config.high_freq_factor) continue;
    if (wavelength > original / config.low_freq_factor) {
      frequency /= config.factor;
      continue;
    }
    const double smooth = (original / wavelength - config.low_freq_factor) /
                          (config.high_freq_factor - config.low_freq_factor);
    frequency = (1.0 - smooth) * frequency / config.factor + smooth * frequency;
  }
}

}  // namespace

std::string_view RopeKindName(RopeConfig::Kind kind) {
  switch (kind) {
    case RopeConfig::Kind::kDefault: return "default";
    case RopeConfig::Kind::kLinear: return "linear";
    case RopeConfig::Kind::kDynamic: return "dynamic";
    case RopeConfig::Kind::kYarn: return "yarn";
    case RopeConfig::Kind::kLlama3: return "llama3";
    case RopeConfig::Kind::kLongrope: return "longrope";
  }
  return "?";
}

RopeConfig ParseRope(ConfigReader& config, size_t rotary_dim, size_t max_positions,
                     double default_theta) {
  RopeConfig rope;
  rope.rotary_dim = rotary_dim;
  rope.max_positions = max_positions;
  rope.theta = config.Number("rope_theta", 1.0001, 1e12, default_theta);
  const size_t config_original =
      config.Count("original_max_position_embeddings", 1, kMaxPositions, 0);
  for (std::string_view field : {"rope_scaling", "rope_parameters"}) {
    if (!config.Has(field)) {
      config.Ignore({field});
      continue;
    }
    ConfigReader scaling = config.Object(field);
    rope.theta = scaling.Number("rope_theta", 1.0001, 1e12, rope.theta);
    if (scaling.Number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
      scaling.Refuse("partial_rotary_factor", "this architecture rotates whole heads");
    }
    // "type" is the older spelling; when both are there they must agree.
    const std::string old_kind = scaling.Text("type", "");
    const std::string kind = scaling.Text("rope_type", old_kind.empty() ? "default" : old_kind);
    if (!old_kind.empty() && old_kind != kind) scaling.Refuse("type", "it contradicts rope_type");
    if (kind == "default") {
      rope.kind = RopeConfig::Kind::kDefault;
    } else if (kind == "linear") {
      rope.kind = RopeConfig::Kind::kLinear;
      rope.factor = scaling.Number("factor", 1e-3, kMaxFactor);
    } else if (kind == "dynamic") {
      rope.kind = RopeConfig::Kind::kDynamic;
      rope.factor = scaling.Number("factor", 1e-3, kMaxFactor);
      rope.original_max_positions = max_positions;
      if (rotary_dim <= 2) scaling.Refuse("rope_type", "dynamic needs heads of more than 2 values");
    } else if (kind == "yarn") {
      rope.kind = RopeConfig::Kind::kYarn;
      ParseYarn(scaling, rope);
    } else if (kind == "llama3") {
      rope.kind = RopeConfig::Kind::kLlama3;
      ParseLlama3(scaling, rope);
    } else if (kind == "longrope") {
      rope.kind = RopeConfig::Kind::kLongrope;
      ParseLongrope(scaling, rope, config_original);
    } else {
      scaling.Refuse(scaling.Has("rope_type") ? "rope_type" : "type",
                     "known kinds are default, linear, dynamic, yarn, llama3 and longrope");
    }
  }
  return rope;
}

bool FrequenciesDependOnSequence(const RopeConfig& config) {
  return config.kind == RopeConfig::Kind::kDynamic || config.kind == RopeConfig::Kind::kLongrope;
}

double YarnScoreScale(const RopeConfig& config) {
  if (config.kind != RopeConfig::Kind::kYarn || config.mscale_all_dim == 0) return 1.0;
  const double mscale = YarnMscale(config.factor, config.mscale_all_dim);
  return mscale * mscale;
}

std::vector<float> InverseFrequencies(const RopeConfig& config, size_t sequence_limit) {
  double theta = config.theta;
  if (config.kind == RopeConfig::Kind::kDynamic && sequence_limit > config.max_positions) {
    const auto dim = static_cast<double>(config.rotary_dim);
    const double stretch =
        static_cast<double>(sequence_limit) / static_cast<double>(config.max_positions);
    theta *= std::pow(config.factor * stretch - (config.factor - 1.0), dim / (dim - 2.0));
  }
  std::vector<double> frequencies = BaseFrequencies(theta, config.rotary_dim);
  switch (config.kind) {
    case RopeConfig::Kind::kDefault:
    case RopeConfig::Kind::kDynamic: break;
    case RopeConfig::Kind::kLinear:
      for (double& frequency : frequencies) frequency /= config.factor;
      break;
    case RopeConfig::Kind::kYarn: StretchYarn(config, frequencies); break;
    case RopeConfig::Kind::kLlama3: StretchLlama3(config, frequencies); break;
    case RopeConfig::Kind::kLongrope: {
      const bool is_long = sequence_limit > config.original_max_positions;
      const std::vector<double>& factors = is_long ? config.long_factors : config.short_factors;
      for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= factors[i];
      break;
    }
  }
  return {frequencies.begin(), frequencies.end()};
}

void RopeAngles(const RopeConfig& config, const std::vector<float>& inverse_frequencies,
                size_t position, float* cos, float* sin) {
  for (size_t i = 0; i < inverse_frequencies.size(); ++i) {
    // The product is rounded to f32 because the models were trained and are published with that
    // rounding.
    const float angle = static_cast<float>(position) * inverse_frequencies[i];
    cos[i] = static_cast<float>(std::cos(static_cast<double>(angle)) * config.attention_factor);
    sin[i] = static_cast<float>(std::sin(static_cast<double>(angle)) * config.attention_factor);
  }
}

}  // namespace switchyard
