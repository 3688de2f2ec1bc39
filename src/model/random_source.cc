#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "kernels/convert/convert.h"
#include "model/tensor_source.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

constexpr size_t kPatternElements = (size_t{1} << 20) + 7919;  // odd, so that copies do not line up
constexpr size_t kAlignment = 64;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

RandomSource::RandomSource(DType dtype, size_t total_bytes, ThreadPool& pool)
    : dtype_(dtype),
      pool_(pool),
      memory_(std::make_shared<MappedMemory>(total_bytes, "random weights")),
      pattern_(std::make_shared<MappedMemory>(2 * kPatternElements * DTypeBytes(dtype),
                                              "a pattern of random weights")) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("random weights of type {} are not supported", DTypeName(dtype)));
  }
  std::mt19937 random(1234);
  std::normal_distribution<float> normal;
  std::vector<float> values(kPatternElements);
  for (float& value : values) value = normal(random);
  kernels::ConvertFromF32(values.data(), values.size(), dtype, pattern_->data());
  for (float& value : values) value *= 0.02f;
  kernels::ConvertFromF32(values.data(), values.size(), dtype,
                          pattern_->data() + kPatternElements * DTypeBytes(dtype));
}

// One tensor per expert, and an untied head.
bool RandomSource::Has(std::string_view name) const {
  return name.find("gate_up_proj") == std::string_view::npos &&
         name.find("block_sparse_moe") == std::string_view::npos &&
         name.find("inv_freq") == std::string_view::npos && !name.ends_with("experts.gate_proj");
}

TensorView RandomSource::Take(std::string_view name, const Shape& shape, std::span<const DType>) {
  size_t count = 0;
  SY_CHECK(shape.NumElements(count));
  const size_t element = DTypeBytes(dtype_);
  const size_t bytes = count * element;
  SY_CHECK(used_ + RoundUp(bytes) <= memory_->size());
  std::byte* data = memory_->data() + used_;
  used_ += RoundUp(bytes);
  if (shape.rank() == 1) {  // norms
    const std::vector<float> ones(count, 1.0f);
    kernels::ConvertFromF32(ones.data(), count, dtype_, data);
    return {data, dtype_, shape};
  }
  const bool unit = name.find("embed_tokens") != std::string_view::npos;
  const std::byte* pattern = pattern_->data() + (unit ? 0 : kPatternElements * element);
  const size_t start = std::hash<std::string_view>{}(name) % kPatternElements;
  constexpr size_t kElementsPerTask = size_t{1} << 20;
  // Workers write (and so place) the pages in parallel.
  pool_.Run((count + kElementsPerTask - 1) / kElementsPerTask, [&](size_t task, size_t) {
    const size_t end = std::min(count, (task + 1) * kElementsPerTask);
    for (size_t i = task * kElementsPerTask; i < end;) {
      const size_t at = (start + i) % kPatternElements;
      const size_t n = std::min(end - i, kPatternElements - at);
      std::memcpy(data + i * element, pattern + at * element, n * element);
      i += n;
    }
  });
  return {data, dtype_, shape};
}

}  // namespace switchyard
