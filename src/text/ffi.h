// Conversions between the C ABI of the Rust library and C++, shared by the sources of this layer.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard/text/chat_template.h"
#include "switchyard_text.h"

namespace switchyard::text {

inline swt_text Borrow(std::string_view text) {
  // An empty view may hold a null pointer, which would mean an absent text.
  static constexpr char kEmpty = 0;
  const char* data = text.data() != nullptr ? text.data() : &kEmpty;
  return {reinterpret_cast<const uint8_t*>(data), text.size()};
}

inline swt_text Borrow(const std::optional<std::string>& text) {
  return text ? Borrow(std::string_view(*text)) : swt_text{nullptr, 0};
}

// Frees the Rust side's memory however the scope is left.
struct OwnedBuffer {
  swt_buffer raw{nullptr, 0, 0};
  OwnedBuffer() = default;
  OwnedBuffer(const OwnedBuffer&) = delete;
  OwnedBuffer& operator=(const OwnedBuffer&) = delete;
  ~OwnedBuffer() { swt_buffer_free(raw); }
  std::string Text() const { return std::string(reinterpret_cast<const char*>(raw.data), raw.size); }
};

struct OwnedIds {
  swt_ids raw{nullptr, 0, 0};
  OwnedIds() = default;
  OwnedIds(const OwnedIds&) = delete;
  OwnedIds& operator=(const OwnedIds&) = delete;
  ~OwnedIds() { swt_ids_free(raw); }
  std::vector<int32_t> Ids() const {
    std::vector<int32_t> ids(raw.size);
    for (size_t i = 0; i < raw.size; ++i) ids[i] = static_cast<int32_t>(raw.data[i]);
    return ids;
  }
};

// Throws the Error that a status stands for, unless it is SWT_OK.
void Check(int32_t status, const OwnedBuffer& error);

// Borrows from `request`.
swt_chat ToChat(const ChatRequest& request);

}  // namespace switchyard::text
