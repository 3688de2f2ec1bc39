// Ownership and errors of the C ABI in C++ terms. Private to this layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/error.h"
#include "switchyard_text.h"

namespace switchyard::text {

inline sy_text_view View(std::string_view text) { return {text.data(), text.size()}; }

inline std::string Take(sy_text_bytes bytes) {
  std::string text(bytes.data, bytes.size);
  sy_text_bytes_free(bytes);
  return text;
}

inline std::vector<int32_t> Take(sy_text_ids ids) {
  std::vector<int32_t> result(ids.size);
  for (size_t i = 0; i < ids.size; ++i) result[i] = static_cast<int32_t>(ids.data[i]);
  sy_text_ids_free(ids);
  return result;
}

// Throws what a status other than 0 stands for.
inline void Check(int32_t status, const sy_text_bytes& error) {
  if (status == SY_TEXT_OK) return;
  const ErrorCode code = status == SY_TEXT_INVALID_ARGUMENT     ? ErrorCode::kInvalidArgument
                         : status == SY_TEXT_CORRUPT_DATA       ? ErrorCode::kCorruptData
                         : status == SY_TEXT_RESOURCE_EXHAUSTED ? ErrorCode::kResourceExhausted
                                                                : ErrorCode::kInternal;
  throw Error(code, Take(error));
}

}  // namespace switchyard::text
