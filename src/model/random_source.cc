#include "model/random_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "kernels/convert/convert.h"
#include "kernels/decode/decode.h"
#include "quant/ggml_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/small_floats.h"
#include "switchyard/model/shapes.h"

namespace switchyard {
namespace {

constexpr size_t kAlignment = 64;
// Primes, so that rows of a matrix start at different places of the pattern.
constexpr size_t kPatternElements = 1056509;
constexpr size_t kPatternBlocks = 521;
constexpr float kDeviation = 0.02f;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}
bool Contains(std::span<const DType> dtypes, DType dtype) {
  return std::ranges::find(dtypes, dtype) != dtypes.end();
}

bool IsRouter(std::string_view name) {
  return name.ends_with(".gate.weight") || name.ends_with(".router.weight");
}
bool IsScale(std::string_view name) { return Contains(name, "scale"); }

// Deviation of random codes, in units of a code: large enough for the rounding not to matter, small
// enough for few to reach the end of the range.
float CodeDeviation(DType codes) {
  switch (codes) {
    case DType::kI8:
    case DType::kF8E4M3: return 32.0f;
    case DType::kU4: return 2.5f;
    case DType::kF4E2M1: return 2.56f;
    default: return 1.0f;
  }
}

// NVFP4: the scale of a block, and the reciprocal of the scale of all.
constexpr float kNvfp4Scale = 64.0f;
constexpr float kNvfp4Reciprocal = 8192.0f;

std::vector<float> NormalValues(size_t count, float deviation) {
  std::mt19937 random(1234);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = deviation * normal(random);
  return values;
}

// One code of 8 or 4 bits; of kU4 around 8.
uint8_t CodeOf(DType codes, float value) {
  switch (codes) {
    case DType::kI8:
      return static_cast<uint8_t>(
          static_cast<int8_t>(std::clamp(std::round(value), -127.f, 127.f)));
    case DType::kF8E4M3: return EncodeE4M3(value);
    case DType::kU4: return static_cast<uint8_t>(std::clamp(std::round(value) + 8, 0.f, 15.f));
    default: break;
  }
  SY_CHECK(codes == DType::kF4E2M1);
  return EncodeE2M1(value, MxRounding::kHalfToEven);
}

// Random bytes for a type without an encoder here; the scale d of every block is set so that the
// weights have the deviation.
void FillWithBlocks(DType dtype, float deviation, std::vector<std::byte>& bytes) {
  std::mt19937 random(1234);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
  const size_t block_bytes = DTypeBlockBytes(dtype);
  const auto set_scales = [&](float d) {
    const uint16_t bits = ToF16(d).bits;
    for (size_t at = 0; at < bytes.size(); at += block_bytes) {
      std::byte* block = bytes.data() + at;
      if (dtype == DType::kGgmlIq1M) {  // four bits of it above each of four words of scales
        for (size_t i = 0; i < 4; ++i) {
          std::byte& high = block[block_bytes - 8 + 2 * i + 1];
          high = (high & std::byte{15}) | static_cast<std::byte>(((bits >> (4 * i)) & 15u) << 4);
        }
        continue;
      }
      const bool is_last = dtype == DType::kGgmlTq10 || dtype == DType::kGgmlTq20;
      std::memcpy(block + (is_last ? block_bytes - sizeof(bits) : 0), &bits, sizeof(bits));
    }
  };
  set_scales(1.0f);
  std::vector<float> values(bytes.size() / block_bytes * DTypeBlock(dtype));
  kernels::DecodeRow({.dtype = dtype, .q = bytes.data(), .n = values.size()}, values.data());
  double squares = 0;
  for (float value : values) squares += double{value} * value;
  set_scales(deviation /
             static_cast<float>(std::sqrt(squares / static_cast<double>(values.size()))));
}

// All types of plain matrices, floats first.
std::vector<DType> AllMatrixDTypes() {
  std::vector<DType> dtypes(kFloatDTypes.begin(), kFloatDTypes.end());
  for (auto type = static_cast<size_t>(kFirstGgmlBlock);
       type <= static_cast<size_t>(kLastGgmlBlock); ++type)
    dtypes.push_back(static_cast<DType>(type));
  return dtypes;
}

}  // namespace

RandomSource::RandomSource(const RandomScheme& scheme, const ModelConfig& config)
    : scheme_(scheme), has_mxfp4_banks_(HasMxfp4Banks(scheme, config)) {}

RandomSource::RandomSource(const RandomScheme& scheme, const ModelConfig& config,
                           size_t total_bytes, ThreadPool& pool)
    : RandomSource(scheme, config) {
  pool_ = &pool;
  memory_ = std::make_shared<MappedMemory>(total_bytes, "random weights");
}

// One tensor for each expert, or banks where the scheme has them, and an untied head.
bool RandomSource::Has(std::string_view name) const {
  if (name.ends_with("gate_up_proj_blocks") || name.ends_with("gate_up_proj_scales"))
    return has_mxfp4_banks_;
  if (name.ends_with("experts.gate_proj")) return IsGgmlBlock(scheme_.dtype);
  if (name.ends_with("k_b_proj.weight")) return scheme_.rules.empty();
  return !Contains(name, "gate_up_proj") && !Contains(name, "block_sparse_moe") &&
         !Contains(name, "inv_freq");
}

std::span<const DType> RandomSource::matrix_dtypes() const {
  static const std::vector<DType> kDTypes = AllMatrixDTypes();
  return kDTypes;
}

DType RandomSource::TypeOf(std::string_view name, const Shape& shape,
                           std::span<const DType> allowed) const {
  if (IsScale(name) && Contains(allowed, scheme_.scale_dtype)) return scheme_.scale_dtype;
  if (IsGgmlBlock(scheme_.dtype)) {
    if (IsRouter(name) || !Contains(allowed, scheme_.dtype)) return DType::kF32;
    const size_t cols = shape[shape.rank() - 1];
    const size_t block = DTypeBlock(scheme_.dtype);
    if (cols % block == 0) return scheme_.dtype;
    if (name.ends_with("k_b_proj.weight") && cols % DTypeBlock(DType::kGgmlQ80) == 0)
      return DType::kGgmlQ80;
    std::vector<std::string_view> others;
    for (std::string_view other : RandomSchemes()) {
      const DType dtype = FindRandomScheme(other).dtype;
      if (IsGgmlBlock(dtype) && cols % DTypeBlock(dtype) == 0) others.push_back(other);
    }
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "tensor {}: {} inputs are no multiple of the block of {} of scheme {}{}", name, cols,
            block, scheme_.name,
            others.empty() ? "" : fmt::format("; those of {} fit", fmt::join(others, ", "))));
  }
  return Contains(allowed, scheme_.dtype) ? scheme_.dtype : allowed.front();
}

// Everything that a scheme stores beside plain floats; the model keeps a copy of its own.
bool RandomSource::IsShared(std::string_view name, DType dtype) const {
  return scheme_.repacks && (!IsFloat(dtype) || IsScale(name));
}

RandomSource::Pattern RandomSource::Constant(DType dtype, float value) const {
  const auto of = [](const auto& x) {
    Pattern pattern;
    pattern.unit = sizeof(x);
    pattern.bytes.resize(sizeof(x) * 256);
    for (size_t i = 0; i < 256; ++i)
      std::memcpy(pattern.bytes.data() + i * sizeof(x), &x, sizeof(x));
    return pattern;
  };
  switch (dtype) {
    case DType::kF32: return of(value);
    case DType::kF16: return of(ToF16(value));
    case DType::kBF16: return of(ToBF16(value));
    case DType::kF8E4M3: return of(EncodeE4M3(value));
    case DType::kU8:
    case DType::kF8E8M0: return of(static_cast<uint8_t>(127 + std::lround(std::log2(value))));
    default: break;
  }
  SY_CHECK(dtype == DType::kI32);  // zero points
  return of(scheme_.zeros);
}

RandomSource::Pattern RandomSource::Normal(DType dtype, float deviation) const {
  Pattern pattern;
  if (IsFloat(dtype)) {
    pattern.unit = DTypeBytes(dtype);
    pattern.bytes.resize(kPatternElements * pattern.unit);
    const std::vector<float> values = NormalValues(kPatternElements, deviation);
    kernels::ConvertFromF32(values.data(), values.size(), dtype, pattern.bytes.data());
    return pattern;
  }
  if (IsGgmlBlock(dtype)) {
    pattern.unit = DTypeBlockBytes(dtype);
    pattern.bytes.resize(kPatternBlocks * pattern.unit);
    if (!quant::CanEncodeGgml(dtype)) {
      FillWithBlocks(dtype, deviation, pattern.bytes);
      return pattern;
    }
    const size_t block = DTypeBlock(dtype);
    const std::vector<float> values = NormalValues(kPatternBlocks * block, deviation);
    pool_->Run(kPatternBlocks, [&](size_t i, size_t) {
      quant::EncodeGgmlRow(dtype, std::span(values).subspan(i * block, block),
                           std::span(pattern.bytes).subspan(i * pattern.unit, pattern.unit));
    });
    return pattern;
  }
  // Codes: bytes, or nibbles in bytes or in words.
  pattern.unit = DTypeBytes(dtype);
  pattern.bytes.resize(kPatternElements / pattern.unit * pattern.unit);
  const bool is_paired = DTypeBits(scheme_.codes) == 4;
  const std::vector<float> values =
      NormalValues(pattern.bytes.size() * (is_paired ? 2 : 1), deviation);
  for (size_t i = 0; i < pattern.bytes.size(); ++i) {
    pattern.bytes[i] =
        static_cast<std::byte>(is_paired ? CodeOf(scheme_.codes, values[2 * i]) |
                                               CodeOf(scheme_.codes, values[2 * i + 1]) << 4
                                         : CodeOf(scheme_.codes, values[i]));
  }
  return pattern;
}

// By name: what a tensor is for follows from how producers call it.
RandomSource::Pattern& RandomSource::PatternOf(std::string_view name, const Shape& shape,
                                               DType dtype) {
  const float scale = kDeviation / CodeDeviation(scheme_.codes);
  const auto find = [&](const char* use, const std::function<Pattern()>& make) -> Pattern& {
    const auto [found, is_new] = patterns_.try_emplace({use, dtype});
    if (is_new) found->second = make();
    return found->second;
  };
  if (name.ends_with("global_scale"))
    return find("global scales", [&] { return Constant(dtype, kNvfp4Reciprocal); });
  if (IsScale(name)) {
    return find("scales",
                [&] { return Constant(dtype, dtype == DType::kF8E4M3 ? kNvfp4Scale : scale); });
  }
  if (name.ends_with("zeros")) return find("zeros", [&] { return Constant(dtype, 0); });
  if (name.ends_with("bias")) return find("biases", [&] { return Constant(dtype, 0); });
  if (shape.rank() == 1) return find("norms", [&] { return Constant(dtype, 1); });
  if (Contains(name, "embed_tokens")) return find("embedding", [&] { return Normal(dtype, 1); });
  if (IsFloat(dtype) || IsGgmlBlock(dtype))
    return find("weights", [&] { return Normal(dtype, kDeviation); });
  return find("codes", [&] { return Normal(dtype, CodeDeviation(scheme_.codes)); });
}

const std::byte* RandomSource::ShareBytes(Pattern& pattern, size_t start, size_t bytes) const {
  const size_t needed = start + bytes;
  if (pattern.shared.empty() || pattern.shared.back().size() < needed) {
    const size_t longer = pattern.shared.empty() ? 0 : 2 * pattern.shared.back().size();
    std::vector<std::byte>& memory =
        pattern.shared.emplace_back(std::max(longer, needed + pattern.bytes.size()));
    Fill(pattern, 0, memory.size(), memory.data());
  }
  return pattern.shared.back().data() + start;
}

void RandomSource::Fill(const Pattern& pattern, size_t start, size_t bytes, std::byte* to) const {
  constexpr size_t kBytesPerTask = size_t{1} << 21;
  const size_t period = pattern.bytes.size();
  // Workers write (and so place) the pages in parallel.
  pool_->Run((bytes + kBytesPerTask - 1) / kBytesPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(bytes, (task + 1) * kBytesPerTask);
    for (size_t i = task * kBytesPerTask; i < end;) {
      const size_t at = (start + i) % period;
      const size_t n = std::min(end - i, period - at);
      std::memcpy(to + i, pattern.bytes.data() + at, n);
      i += n;
    }
  });
}

TensorView RandomSource::Take(std::string_view name, const Shape& shape,
                              std::span<const DType> allowed) {
  size_t count = 0;
  SY_CHECK(shape.NumElements(count));
  const DType dtype = TypeOf(name, shape, allowed);
  const size_t bytes = BytesOf(dtype, count);
  tensor_bytes_ += bytes;
  const bool is_shared = IsShared(name, dtype);
  const size_t offset = memory_bytes_;
  if (!is_shared) memory_bytes_ += RoundUp(bytes);
  if (!has_data()) return {nullptr, dtype, shape};
  Pattern& pattern = PatternOf(name, shape, dtype);
  const size_t units = pattern.bytes.size() / pattern.unit;
  const size_t start = std::hash<std::string_view>{}(name) % units * pattern.unit;
  if (is_shared) return {ShareBytes(pattern, start, bytes), dtype, shape};
  SY_CHECK(memory_bytes_ <= memory_->size());
  Fill(pattern, start, bytes, memory_->data() + offset);
  return {memory_->data() + offset, dtype, shape};
}

}  // namespace switchyard
