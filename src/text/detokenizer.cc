#include "switchyard/text/detokenizer.h"

#include <utility>

#include "switchyard/text/tokenizer.h"
#include "text/ffi.h"

namespace switchyard {
namespace {

std::string_view View(const swt_text& text) { return {reinterpret_cast<const char*>(text.data), text.size}; }

}  // namespace

StreamingDetokenizer::StreamingDetokenizer(const Tokenizer& tokenizer, bool skip_special) {
  text::OwnedBuffer error;
  text::Check(swt_stream_new(tokenizer.handle_, skip_special ? 1 : 0, &handle_, &error.raw), error);
}

StreamingDetokenizer::~StreamingDetokenizer() { swt_stream_free(handle_); }

StreamingDetokenizer::StreamingDetokenizer(StreamingDetokenizer&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)) {}

StreamingDetokenizer& StreamingDetokenizer::operator=(StreamingDetokenizer&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

std::string_view StreamingDetokenizer::Push(int32_t id) {
  if (id < 0) throw Error(ErrorCode::kInvalidArgument, "token id " + std::to_string(id) + " is negative");
  swt_text out{nullptr, 0};
  text::OwnedBuffer error;
  text::Check(swt_stream_push(handle_, static_cast<uint32_t>(id), &out, &error.raw), error);
  return View(out);
}

std::string_view StreamingDetokenizer::Finish() {
  swt_text out{nullptr, 0};
  text::OwnedBuffer error;
  text::Check(swt_stream_finish(handle_, &out, &error.raw), error);
  return View(out);
}

}  // namespace switchyard
