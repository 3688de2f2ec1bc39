#include "model/load_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace switchyard {
namespace {

constexpr size_t kUnit = size_t{1} << 15;  // elements; whole blocks of every type
constexpr size_t kUnitsPerTask = 64;

}  // namespace

LoadScan::LoadScan(std::vector<TensorView> views, std::vector<std::string> names)
    : by_address_(views.size()), found_(views.size()) {
  size_t num_units = 0;
  for (size_t i = 0; i < views.size(); ++i) {
    const size_t units = (views[i].NumElements() + kUnit - 1) / kUnit;
    const size_t unit_bytes = BytesOf(views[i].dtype, kUnit);
    tensors_.push_back({views[i], std::move(names[i]), unit_bytes, units, num_units});
    num_units += units;
  }
  is_scanned_ = std::vector<std::atomic<bool>>(num_units);
  std::iota(by_address_.begin(), by_address_.end(), size_t{0});
  std::ranges::sort(by_address_, std::less<>(), [&](size_t i) { return tensors_[i].view.data; });
}

void LoadScan::ScanBefore(const std::byte* data, size_t bytes) {
  const auto after = std::ranges::upper_bound(by_address_, data, std::less<>(),
                                              [&](size_t i) { return tensors_[i].view.data; });
  if (after == by_address_.begin()) return;
  const size_t index = *std::prev(after);
  const Tensor& tensor = tensors_[index];
  const auto offset = static_cast<size_t>(data - tensor.view.data);
  const auto units_before = [&](size_t end) {
    return std::min(tensor.num_units, (end + tensor.unit_bytes - 1) / tensor.unit_bytes);
  };
  const size_t last = units_before(offset + bytes);
  for (size_t unit = units_before(offset); unit < last; ++unit) ScanUnit(index, unit);
}

void LoadScan::ScanUnit(size_t index, size_t unit) {
  const Tensor& tensor = tensors_[index];
  if (is_scanned_[tensor.first_unit + unit].exchange(true, std::memory_order_relaxed)) return;
  const size_t begin = unit * kUnit;
  const size_t count = std::min(kUnit, tensor.view.NumElements() - begin);
  const TensorView& view = tensor.view;
  ValueFindings bad = ScanValues({view.data + unit * tensor.unit_bytes, view.dtype, Shape{count}},
                                 TensorRole::kMatrix);
  if (!bad.any()) return;
  bad.first_index += begin;
  const std::lock_guard lock(mutex_);
  found_[index].Add(bad);
}

std::vector<std::string> LoadScan::Finish(ThreadPool& pool) {
  struct Part {
    size_t tensor, first, last;  // units
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (size_t first = 0; first < tensors_[i].num_units; first += kUnitsPerTask)
      parts.push_back({i, first, std::min(first + kUnitsPerTask, tensors_[i].num_units)});
  }
  pool.Run(parts.size(), [&](size_t task, size_t) {
    const Part& part = parts[task];
    for (size_t unit = part.first; unit < part.last; ++unit) ScanUnit(part.tensor, unit);
  });
  std::vector<std::string> messages;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (found_[i].any()) messages.push_back(Describe(tensors_[i], found_[i]));
  }
  return messages;
}

std::string LoadScan::Describe(const Tensor& tensor, const ValueFindings& bad) const {
  return fmt::format("{}: {} NaN and {} infinite {}, the first at element {} of shape {}",
                     tensor.name, bad.nan, bad.inf,
                     IsGgmlBlock(tensor.view.dtype) ? "scales" : "values", bad.first_index,
                     tensor.view.shape.ToString());
}

}  // namespace switchyard
