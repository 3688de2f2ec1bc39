#include "switchyard/text/detokenizer.h"

#include <fmt/format.h>

#include <utility>

#include "switchyard/core/error.h"
#include "text/ffi.h"

namespace switchyard {
namespace {

sy_text_stream* Handle(void* handle) { return static_cast<sy_text_stream*>(handle); }

}  // namespace

// The stream shares ownership of the tokenizer's data on its side of the ABI.
StreamingDetokenizer::StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer,
                                           bool skip_special)
    : handle_(sy_text_stream_new(static_cast<const sy_text_tokenizer*>(tokenizer->handle_),
                                 skip_special)) {}

StreamingDetokenizer::StreamingDetokenizer(StreamingDetokenizer&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)) {}

StreamingDetokenizer& StreamingDetokenizer::operator=(StreamingDetokenizer&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

StreamingDetokenizer::~StreamingDetokenizer() { sy_text_stream_free(Handle(handle_)); }

std::string StreamingDetokenizer::Add(int32_t id) {
  if (id < 0)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("decode: the id {} is negative", id));
  sy_text_bytes text = {}, error = {};
  text::Check(sy_text_stream_add(Handle(handle_), static_cast<uint32_t>(id), &text, &error), error);
  return text::Take(text);
}

std::string StreamingDetokenizer::Finish() {
  sy_text_bytes text = {}, error = {};
  text::Check(sy_text_stream_finish(Handle(handle_), &text, &error), error);
  return text::Take(text);
}

}  // namespace switchyard
