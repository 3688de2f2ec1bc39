#include "model/value_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>

#include "switchyard/core/small_floats.h"
#include "switchyard/model/checkpoint.h"

namespace switchyard {
namespace {

void Count(float value, size_t index, bool is_scale, ValueFindings& found) {
  const bool is_negative = is_scale && value < 0.0f && std::isfinite(value);
  if (std::isfinite(value) && !is_negative) {
    if (is_scale && value == 0.0f) ++found.zero;
    return;
  }
  if (!found.any()) {
    found.first_index = index;
    found.first_value = value;
  }
  if (std::isnan(value)) {
    ++found.nan;
  } else if (is_negative) {
    ++found.negative;
  } else {
    ++found.inf;
  }
}

float FloatAt(const TensorView& view, size_t i) {
  if (view.dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, view.data + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, view.data + i * sizeof(bits), sizeof(bits));
  return view.dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}

ValueFindings ScanFloats(const TensorView& view) {
  const BadValues bad = ScanForBadValues(view);
  ValueFindings found;
  found.nan = bad.nan;
  found.inf = bad.inf;
  if (!bad.any()) return found;
  found.first_index = bad.first_index;
  found.first_value = FloatAt(view, bad.first_index);
  return found;
}

// The codes from `least` on, sign aside, are NaN or infinite. One pass counts, which compilers
// vectorise; a second one looks where there is something to see.
ValueFindings ScanFp8(const TensorView& view, uint8_t least, float (*decode)(uint8_t)) {
  const size_t count = view.NumElements();
  const auto* codes = reinterpret_cast<const uint8_t*>(view.data);
  size_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad += (codes[i] & 0x7fu) >= least ? 1 : 0;
  ValueFindings found;
  for (size_t i = 0; i < count && bad > 0; ++i) {
    if ((codes[i] & 0x7fu) >= least) Count(decode(codes[i]), i, false, found);
  }
  return found;
}

// An f32 and an f16 need not be aligned in a file; these read bytes.
float ScaleAt(const TensorView& view, size_t i) {
  if (IsFloat(view.dtype)) return FloatAt(view, i);
  const auto code = std::to_integer<uint8_t>(view.data[i]);
  return view.dtype == DType::kF8E4M3 ? DecodeE4M3(code) : DecodeE8M0(code);
}

ValueFindings ScanScales(const TensorView& view) {
  ValueFindings found;
  const size_t count = view.NumElements();
  for (size_t i = 0; i < count; ++i) Count(ScaleAt(view, i), i, true, found);
  return found;
}

// Where the f16 scales and offsets of a block lie. IQ1_M scatters the bits of its one over four
// words, MXFP4 has a power of two.
struct BlockScales {
  std::array<uint8_t, 2> at{};
  uint8_t count = 0;
};

BlockScales ScalesOfBlock(DType dtype) {
  switch (dtype) {
    case DType::kGgmlQ40:
    case DType::kGgmlQ50:
    case DType::kGgmlQ80:
    case DType::kGgmlIq4Nl:
    case DType::kGgmlIq4Xs:
    case DType::kGgmlIq3S:
    case DType::kGgmlIq3Xxs:
    case DType::kGgmlIq2S:
    case DType::kGgmlIq2Xs:
    case DType::kGgmlIq2Xxs:
    case DType::kGgmlIq1S: return {{0}, 1};
    case DType::kGgmlQ41:
    case DType::kGgmlQ51:
    case DType::kGgmlQ4K:
    case DType::kGgmlQ5K: return {{0, 2}, 2};
    case DType::kGgmlQ2K: return {{80, 82}, 2};
    case DType::kGgmlQ3K: return {{108}, 1};
    case DType::kGgmlQ6K: return {{208}, 1};
    case DType::kGgmlTq10: return {{52}, 1};
    case DType::kGgmlTq20: return {{64}, 1};
    default: return {};
  }
}

uint32_t U16At(const std::byte* bytes) {
  return std::to_integer<uint32_t>(bytes[0]) | std::to_integer<uint32_t>(bytes[1]) << 8;
}

// The top nibbles of the last four words of a block.
float ScaleOfIq1M(const std::byte* block) {
  constexpr size_t kScales = 48;
  uint32_t bits = 0;
  for (size_t i = 0; i < 4; ++i) bits |= (U16At(block + kScales + 2 * i) >> 12) << (4 * i);
  return ToFloat(F16{static_cast<uint16_t>(bits)});
}

// Whether any of the f16 that lie `step` bytes apart is NaN or infinite.
bool HasBadF16(const std::byte* first, size_t step, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) most = std::max(most, U16At(first + i * step) & 0x7c00u);
  return most == 0x7c00u;
}

// Of most types one quick pass looks; a second one counts where there is something to see.
ValueFindings ScanBlocks(const TensorView& view) {
  const size_t block = DTypeBlock(view.dtype), block_bytes = DTypeBlockBytes(view.dtype);
  const size_t count = view.NumElements() / block;
  const BlockScales scales = ScalesOfBlock(view.dtype);
  ValueFindings found;
  bool is_bad = scales.count == 0;
  for (size_t s = 0; s < scales.count; ++s)
    is_bad = is_bad || HasBadF16(view.data + scales.at[s], block_bytes, count);
  if (!is_bad) return found;
  for (size_t b = 0; b < count; ++b) {
    const std::byte* bytes = view.data + b * block_bytes;
    for (size_t s = 0; s < scales.count; ++s) {
      const uint32_t bits = U16At(bytes + scales.at[s]);
      if ((bits & 0x7c00u) == 0x7c00u)
        Count(ToFloat(F16{static_cast<uint16_t>(bits)}), b * block, false, found);
    }
    if (view.dtype == DType::kGgmlMxFp4)
      Count(DecodeE8M0(std::to_integer<uint8_t>(bytes[0])), b * block, false, found);
    if (view.dtype == DType::kGgmlIq1M) Count(ScaleOfIq1M(bytes), b * block, false, found);
  }
  return found;
}

bool HasScaleType(DType dtype) {
  return IsFloat(dtype) || dtype == DType::kF8E4M3 || dtype == DType::kF8E8M0 ||
         dtype == DType::kU8;
}

// "[3, 17]"
std::string IndexIn(const Shape& shape, size_t element) {
  std::string text;
  for (size_t axis = shape.rank(); axis-- > 0;) {
    const size_t size = std::max<size_t>(1, shape[axis]);
    text = fmt::format("{}{}{}", element % size, text.empty() ? "" : ", ", text);
    element /= size;
  }
  return fmt::format("[{}]", text);
}

std::string Describe(const LocatedTensor& tensor, const ValueFindings& found) {
  const FileTensor& info = tensor.info;
  std::string counts = fmt::format("{} NaN and {} infinite", found.nan, found.inf);
  if (found.negative > 0) counts += fmt::format(" and {} negative", found.negative);
  const bool is_block = IsGgmlBlock(info.dtype);
  return fmt::format("{}: {}: {} {}, the first at {}{} of {}: {}", info.file, info.name, counts,
                     is_block || info.role == TensorRole::kScales ? "scales" : "values",
                     is_block ? "the block from " : "", IndexIn(info.shape, found.first_index),
                     info.shape.ToString(), found.first_value);
}

struct Part {
  size_t tensor;
  size_t begin;  // elements, whole blocks
  size_t count;
};

std::vector<Part> CutIntoParts(std::span<const LocatedTensor> tensors) {
  constexpr size_t kElements = size_t{1} << 21;  // a multiple of every block
  std::vector<Part> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t count = tensors[i].view.NumElements();
    for (size_t begin = 0; begin < count; begin += kElements)
      parts.push_back({i, begin, std::min(kElements, count - begin)});
  }
  return parts;
}

}  // namespace

std::string_view TensorRoleName(TensorRole role) {
  switch (role) {
    case TensorRole::kUnused: return "unused";
    case TensorRole::kVector: return "vector";
    case TensorRole::kMatrix: return "matrix";
    case TensorRole::kCodes: return "codes";
    case TensorRole::kScales: return "scales";
    case TensorRole::kOther: return "other";
  }
  return "";
}

void ValueFindings::Add(const ValueFindings& later) {
  if (later.any() && (!any() || later.first_index < first_index)) {
    first_index = later.first_index;
    first_value = later.first_value;
  }
  nan += later.nan;
  inf += later.inf;
  negative += later.negative;
  zero += later.zero;
}

ValueFindings ScanValues(const TensorView& view, TensorRole role) {
  if (role == TensorRole::kScales && HasScaleType(view.dtype)) return ScanScales(view);
  if (IsFloat(view.dtype)) return ScanFloats(view);
  if (IsGgmlBlock(view.dtype)) return ScanBlocks(view);
  if (view.dtype == DType::kF8E4M3) return ScanFp8(view, 0x7f, &DecodeE4M3);
  if (view.dtype == DType::kF8E5M2) return ScanFp8(view, 0x7c, &DecodeE5M2);
  return {};
}

Verification ScanTensors(std::span<const LocatedTensor> tensors, ThreadPool& pool) {
  const std::vector<Part> parts = CutIntoParts(tensors);
  std::vector<ValueFindings> found(tensors.size());
  std::mutex mutex;
  pool.Run(parts.size(), [&](size_t task, size_t) {
    const Part& part = parts[task];
    const TensorView& view = tensors[part.tensor].view;
    ValueFindings here =
        ScanValues({view.data + BytesOf(view.dtype, part.begin), view.dtype, Shape{part.count}},
                   tensors[part.tensor].info.role);
    here.first_index += part.begin;
    const std::lock_guard lock(mutex);
    found[part.tensor].Add(here);
  });
  Verification result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (found[i].any()) result.problems.push_back(Describe(tensors[i], found[i]));
    if (found[i].zero > 0) {
      result.remarks.push_back(fmt::format("{}: {}: {} of {} scales are 0", tensors[i].info.file,
                                           tensors[i].info.name, found[i].zero,
                                           tensors[i].view.NumElements()));
    }
  }
  return result;
}

}  // namespace switchyard
