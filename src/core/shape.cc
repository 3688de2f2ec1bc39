#include "switchyard/core/shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"

namespace switchyard {

Shape::Shape(std::initializer_list<size_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const size_t> dims) {
  if (dims.size() > kMaxRank) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a shape has at most {} axes, found {}", kMaxRank, dims.size()));
  }
  rank_ = dims.size();
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

bool Shape::NumElements(size_t& count) const {
  size_t product = 1;
  for (size_t size : dims()) {
    if (__builtin_mul_overflow(product, size, &product)) return false;
  }
  count = product;
  return true;
}

std::string Shape::ToString() const { return fmt::format("[{}]", fmt::join(dims(), ", ")); }

size_t TensorView::NumElements() const {
  size_t count = 0;
  SY_CHECK(shape.NumElements(count));
  return count;
}

}  // namespace switchyard
