#include "moe/eplb/expert_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "quant/panel_matmul.h"
#include "switchyard/core/error.h"

namespace switchyard::moe {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kCacheLine = 64;
constexpr std::string_view kBankNames[] = {"w1", "w3", "w2"};
constexpr std::string_view kPartNames[] = {"weights", "scales",       "zero points",
                                           "biases",  "tensor scale", "column groups"};

template <typename Weights>
auto& BankOf(Weights& weights, size_t index) {
  return index == 0 ? weights.w1 : index == 1 ? weights.w3 : weights.w2;
}

size_t ListSize(const ExpertBank& bank, ExpertPart part) {
  switch (part) {
    case ExpertPart::kData: return bank.data.size();
    case ExpertPart::kScale: return bank.scale.size();
    case ExpertPart::kZero: return bank.zero.size();
    case ExpertPart::kBias: return bank.bias.size();
    case ExpertPart::kTensorScale: return bank.tensor_scale.size();
    case ExpertPart::kColumnGroup: return bank.column_group.size();
  }
  return 0;
}

const std::byte* Pointer(const ExpertBank& bank, ExpertPart part, size_t slot) {
  switch (part) {
    case ExpertPart::kData: return bank.data[slot];
    case ExpertPart::kScale: return bank.scale[slot];
    case ExpertPart::kZero: return bank.zero[slot];
    case ExpertPart::kBias: return reinterpret_cast<const std::byte*>(bank.bias[slot]);
    case ExpertPart::kTensorScale:
      return reinterpret_cast<const std::byte*>(bank.tensor_scale[slot]);
    case ExpertPart::kColumnGroup:
      return reinterpret_cast<const std::byte*>(bank.column_group[slot]);
  }
  return nullptr;
}

void SetPointer(ExpertBank& bank, ExpertPart part, size_t slot, const std::byte* pointer) {
  switch (part) {
    case ExpertPart::kData: bank.data[slot] = pointer; break;
    case ExpertPart::kScale: bank.scale[slot] = pointer; break;
    case ExpertPart::kZero: bank.zero[slot] = pointer; break;
    case ExpertPart::kBias: bank.bias[slot] = reinterpret_cast<const float*>(pointer); break;
    case ExpertPart::kTensorScale:
      bank.tensor_scale[slot] = reinterpret_cast<const float*>(pointer);
      break;
    case ExpertPart::kColumnGroup:
      bank.column_group[slot] = reinterpret_cast<const int32_t*>(pointer);
      break;
  }
}

size_t CeilDiv(size_t n, size_t d) { return (n + d - 1) / d; }
size_t RoundUp(size_t n, size_t unit) { return CeilDiv(n, unit) * unit; }

// Rows and bytes of one part of a bank (quant_format.h says how they lie).
ExpertTensor Measure(const ExpertBank& bank, ExpertPart part) {
  const ExpertMatrices view = bank.View();
  const MatrixFormat& format = bank.format;
  ExpertTensor tensor;
  tensor.part = part;
  if (part == ExpertPart::kData && format.in_panels) {
    tensor.rows = 1;
    tensor.row_bytes = tensor.stride = quant::PanelBytes(format, bank.rows, bank.cols);
  } else if (part == ExpertPart::kData) {
    tensor.rows = bank.rows;
    tensor.row_bytes = BytesOf(format.dtype, bank.cols);
    tensor.stride = BytesOf(format.dtype, view.stride);
  } else if (part == ExpertPart::kBias) {
    tensor.rows = bank.rows;
    tensor.row_bytes = sizeof(float);
    tensor.stride = bank.bias_stride * sizeof(float);
  } else if (part == ExpertPart::kTensorScale) {
    tensor.rows = 1;
    tensor.row_bytes = tensor.stride = sizeof(float);
  } else if (part == ExpertPart::kColumnGroup) {
    tensor.rows = 1;
    tensor.row_bytes = tensor.stride = bank.cols * sizeof(int32_t);
  } else if (format.is_quantized() && format.scale_cols != 0) {
    const size_t element = part == ExpertPart::kZero ? 1 : DTypeBytes(format.scale_dtype);
    tensor.rows = CeilDiv(bank.rows, format.scale_rows);
    tensor.row_bytes = CeilDiv(bank.cols, format.scale_cols) * element;
    tensor.stride = view.scale_stride * element;
  }
  return tensor;
}

// The distance from a to b, if it is the same in all slots.
std::optional<ptrdiff_t> Distance(const ExpertWeights& weights, const ExpertTensor& a,
                                  const ExpertTensor& b, size_t num_slots) {
  std::optional<ptrdiff_t> distance;
  for (size_t slot = 0; slot < num_slots; ++slot) {
    const auto from = reinterpret_cast<uintptr_t>(Pointer(BankOf(weights, a.bank), a.part, slot));
    const auto to = reinterpret_cast<uintptr_t>(Pointer(BankOf(weights, b.bank), b.part, slot));
    const auto here = static_cast<ptrdiff_t>(to - from);
    if (distance && *distance != here) return std::nullopt;
    distance = here;
  }
  return distance;
}

// Whether rows of `second` fit between those of `first`, `distance` bytes after each.
bool FitsBetween(const ExpertTensor& first, const ExpertTensor& second, ptrdiff_t distance) {
  return distance >= static_cast<ptrdiff_t>(first.row_bytes) &&
         static_cast<size_t>(distance) + second.row_bytes <= first.stride;
}

}  // namespace

std::string TensorName(const ExpertTensor& tensor) {
  return fmt::format("{} of {}", kPartNames[static_cast<size_t>(tensor.part)],
                     kBankNames[tensor.bank]);
}

ExpertLayout::ExpertLayout(const ExpertWeights& weights, size_t num_slots, size_t layer_id) {
  for (size_t bank = 0; bank < 3; ++bank)
    AddTensors(BankOf(weights, bank), bank, num_slots, layer_id);
  PlaceTensors(weights, num_slots);
}

void ExpertLayout::AddTensors(const ExpertBank& bank, size_t index, size_t num_slots,
                              size_t layer_id) {
  for (const ExpertPart part :
       {ExpertPart::kData, ExpertPart::kScale, ExpertPart::kZero, ExpertPart::kBias,
        ExpertPart::kTensorScale, ExpertPart::kColumnGroup}) {
    const size_t found = ListSize(bank, part);
    if (found == 0) continue;
    ExpertTensor tensor = Measure(bank, part);
    tensor.bank = index;
    const std::string name = fmt::format("layer {}: {}", layer_id, TensorName(tensor));
    if (found != num_slots) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: {} local experts were expected, found {}", name, num_slots, found));
    }
    for (size_t slot = 0; slot < num_slots; ++slot) {
      if (Pointer(bank, part, slot) == nullptr)
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}: local expert {} has none", name, slot));
    }
    if (tensor.row_bytes == 0 || (tensor.rows > 1 && tensor.stride < tensor.row_bytes)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} rows of {} bytes cannot lie {} bytes apart", name,
                              tensor.rows, tensor.row_bytes, tensor.stride));
    }
    tensors_.push_back(tensor);
  }
}

void ExpertLayout::PlaceTensors(const ExpertWeights& weights, size_t num_slots) {
  std::vector<bool> is_placed(tensors_.size(), false);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (is_placed[i]) continue;
    ExpertTensor& tensor = tensors_[i];
    tensor.offset = bytes_;
    size_t end = bytes_ + tensor.Extent();
    for (size_t j = i + 1; j < tensors_.size() && tensor.rows > 1; ++j) {
      ExpertTensor& other = tensors_[j];
      if (other.part != tensor.part || other.rows != tensor.rows || other.stride != tensor.stride)
        continue;
      const auto distance = Distance(weights, tensor, other, num_slots);
      if (!distance) continue;
      if (FitsBetween(tensor, other, *distance)) {
        other.offset = tensor.offset + static_cast<size_t>(*distance);
      } else if (FitsBetween(other, tensor, -*distance)) {
        other.offset = tensor.offset;
        tensor.offset += static_cast<size_t>(-*distance);
      } else {
        continue;
      }
      end = std::max(tensor.offset + tensor.Extent(), other.offset + other.Extent());
      is_placed[j] = true;
      break;
    }
    bytes_ = RoundUp(end, kCacheLine);
  }
  bytes_ = RoundUp(bytes_, kPage);
}

uint64_t ExpertLayout::Fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  const auto add = [&](size_t value) { hash = (hash ^ value) * 0x100000001b3; };
  add(bytes_);
  for (const ExpertTensor& t : tensors_) {
    for (size_t value :
         {t.bank, static_cast<size_t>(t.part), t.rows, t.row_bytes, t.stride, t.offset})
      add(value);
  }
  return hash;
}

std::vector<const std::byte*> ExpertLayout::Pointers(const ExpertWeights& weights,
                                                     size_t slot) const {
  std::vector<const std::byte*> pointers;
  for (const ExpertTensor& tensor : tensors_)
    pointers.push_back(Pointer(BankOf(weights, tensor.bank), tensor.part, slot));
  return pointers;
}

std::vector<const std::byte*> ExpertLayout::PointersInto(const std::byte* block) const {
  std::vector<const std::byte*> pointers;
  for (const ExpertTensor& tensor : tensors_) pointers.push_back(block + tensor.offset);
  return pointers;
}

void ExpertLayout::Pack(const std::vector<const std::byte*>& pointers, std::byte* block) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const ExpertTensor& tensor = tensors_[i];
    const bool is_dense = tensor.stride == tensor.row_bytes;
    const size_t pieces = is_dense ? 1 : tensor.rows;
    const size_t bytes = is_dense ? tensor.Extent() : tensor.row_bytes;
    for (size_t row = 0; row < pieces; ++row) {
      std::memcpy(block + tensor.offset + row * tensor.stride, pointers[i] + row * tensor.stride,
                  bytes);
    }
  }
}

void ExpertLayout::SetPointers(const std::vector<const std::byte*>& pointers,
                               ExpertWeights& weights, size_t slot) const {
  for (size_t i = 0; i < tensors_.size(); ++i)
    SetPointer(BankOf(weights, tensors_[i].bank), tensors_[i].part, slot, pointers[i]);
}

}  // namespace switchyard::moe
