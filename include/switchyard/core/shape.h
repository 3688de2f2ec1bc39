// The shape of a tensor, and a non-owning view of one.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>

#include "switchyard/core/dtype.h"

namespace switchyard {

// Up to kMaxRank sizes, outermost first. A value type without allocation.
class Shape {
 public:
  static constexpr size_t kMaxRank = 6;

  Shape() = default;
  // Errors: kInvalidArgument if there are more than kMaxRank sizes.
  Shape(std::initializer_list<size_t> dims);
  explicit Shape(std::span<const size_t> dims);

  size_t rank() const { return rank_; }
  size_t operator[](size_t axis) const { return dims_[axis]; }
  std::span<const size_t> dims() const { return {dims_.data(), rank_}; }

  // Product of the sizes; 1 for rank 0. False if it does not fit size_t.
  bool NumElements(size_t& count) const;

  // "[8, 256]"
  std::string ToString() const;

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  size_t rank_ = 0;
  std::array<size_t, kMaxRank> dims_{};
};

// Bytes of somebody else's tensor: row-major and contiguous; rows of a type of DTypeBlock > 1 are
// whole blocks. Valid as long as its owner (a
// checkpoint, an arena).
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  // Number of elements; shapes in views are proven not to overflow when the view is made.
  size_t NumElements() const;
  size_t NumBytes() const { return BytesOf(dtype, NumElements()); }
};

}  // namespace switchyard
