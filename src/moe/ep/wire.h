// A row on its way: which token it is, where it is going, and its values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "switchyard/core/quant_format.h"
#include "switchyard/moe/contract/topk.h"

namespace switchyard::moe {

inline constexpr size_t kWireAlignment = 64;
constexpr size_t WireUp(size_t bytes) {
  return (bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// The values of a row as bytes: codes (or plain numbers), then scales.
struct ValueLayout {
  QuantRows meta;  // kind, types and scale columns; no data
  size_t data_bytes = 0;
  size_t scale_bytes = 0;

  // Of rows of the kind of `rows`; each row has scales of its own, or none.
  static ValueLayout Of(const QuantRows& rows);
  // Bytes of a row, aligned.
  size_t bytes() const { return WireUp(data_bytes + scale_bytes); }
  void Pack(const QuantRows& rows, size_t row, std::byte* to) const;
  // The packed row as one row of its kind; refers to `from`.
  QuantRows View(const std::byte* from) const;

  friend bool operator==(const ValueLayout& a, const ValueLayout& b) {
    return a.meta.kind == b.meta.kind && a.meta.dtype == b.meta.dtype &&
           a.data_bytes == b.data_bytes && a.scale_bytes == b.scale_bytes;
  }
};

// A dispatched row:
//
//   | token u32 | K x id u16, 0xffff = -1 | K x weight f32 | pad to 64 | codes | scales | pad |
//
// Communication, section 5.
class WireLayout {
 public:
  static constexpr size_t kMaxExperts = 0xffff;

  WireLayout() = default;
  WireLayout(const ValueLayout& values, size_t top_k);

  size_t row_bytes() const { return header_bytes_ + values_.bytes(); }
  size_t top_k() const { return top_k_; }
  const ValueLayout& values() const { return values_; }

  // Writes what comes before the values.
  void PackHeader(const TopKOutput& topk, size_t token, std::byte* row) const;

  static uint32_t Token(const std::byte* row) { return *reinterpret_cast<const uint32_t*>(row); }
  int32_t Id(const std::byte* row, size_t k) const {
    const uint16_t id = reinterpret_cast<const uint16_t*>(row + sizeof(uint32_t))[k];
    return id == kMaxExperts ? -1 : id;
  }
  float Weight(const std::byte* row, size_t k) const {
    return reinterpret_cast<const float*>(row + weights_at_)[k];
  }
  const std::byte* Values(const std::byte* row) const { return row + header_bytes_; }
  std::byte* Values(std::byte* row) const { return row + header_bytes_; }

 private:
  ValueLayout values_;
  size_t top_k_ = 0;
  size_t weights_at_ = 0;
  size_t header_bytes_ = 0;
};

// Dispatched rows, one for each token of a rank.
struct PackedTokens {
  const std::byte* data = nullptr;
  size_t row_bytes = 0;

  const std::byte* Row(size_t token) const { return data + token * row_bytes; }
};

}  // namespace switchyard::moe
