#include "replay/write_outputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "switchyard/core/macros.h"
#include "switchyard/model/safetensors.h"

namespace switchyard::replay {
namespace {

struct Packed {
  DType dtype;
  std::vector<std::byte> bytes;
};

template <typename T>
Packed PackAs(DType dtype, const std::vector<double>& values) {
  Packed packed{dtype, std::vector<std::byte>(values.size() * sizeof(T))};
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = static_cast<T>(values[i]);
    std::memcpy(packed.bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return packed;
}

// As T, or as f64 if a value is no T.
template <typename T>
Packed PackInts(DType dtype, const std::vector<double>& values) {
  constexpr auto kLowest = static_cast<double>(std::numeric_limits<T>::min());
  constexpr auto kHighest = static_cast<double>(std::numeric_limits<T>::max());
  const bool fits = std::all_of(values.begin(), values.end(), [&](double v) {
    return v >= kLowest && v <= kHighest && v == std::floor(v);
  });
  return fits ? PackAs<T>(dtype, values) : PackAs<double>(DType::kF64, values);
}

Packed Pack(DType expected, const std::vector<double>& values) {
  switch (expected) {
    case DType::kI64:
    case DType::kI32: return PackInts<int32_t>(DType::kI32, values);
    case DType::kI8: return PackInts<int8_t>(expected, values);
    case DType::kU8:
    case DType::kF8E4M3: return PackInts<uint8_t>(expected, values);
    default: return PackAs<float>(DType::kF32, values);
  }
}

}  // namespace

void WriteOutputs(const std::filesystem::path& path, const CaseFile& file, const Outputs& outputs) {
  std::vector<Packed> packed;
  packed.reserve(outputs.size());  // the views below point into it
  std::vector<NamedTensor> tensors;
  for (const auto& [name, computed] : outputs) {
    size_t count = 0;
    SY_CHECK(computed.shape.NumElements(count) && count == computed.values.size());
    const DType expected = file.Has(name) ? file.View(name).dtype : DType::kF32;
    packed.push_back(Pack(expected, computed.values));
    tensors.push_back({name, {packed.back().bytes.data(), packed.back().dtype, computed.shape}});
  }
  WriteSafetensors(path, tensors);
}

}  // namespace switchyard::replay
