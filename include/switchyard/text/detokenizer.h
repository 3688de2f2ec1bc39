// Decoding one token at a time, for streaming.
#pragma once

#include <cstdint>
#include <string_view>

struct swt_stream;

namespace switchyard {

class Tokenizer;

// All pieces together equal Tokenizer::Decode of all ids, whatever the ids. A piece never ends inside a character:
// bytes wait until they complete one, or until it is certain that they cannot and U+FFFD stands for them. Cost per id
// does not grow with the history. One thread at a time.
class StreamingDetokenizer {
 public:
  // Keeps the vocabulary alive by itself.
  explicit StreamingDetokenizer(const Tokenizer& tokenizer, bool skip_special = true);
  ~StreamingDetokenizer();
  StreamingDetokenizer(StreamingDetokenizer&& other) noexcept;
  StreamingDetokenizer& operator=(StreamingDetokenizer&& other) noexcept;

  // Text that became final with `id`; often empty. Valid until the next call.
  // Errors: kInvalidArgument if the id is outside the vocabulary; the stream goes on as if it had not come.
  std::string_view Push(int32_t id);
  // The rest; afterwards a new text may begin. Valid until the next call.
  std::string_view Finish();

 private:
  swt_stream* handle_ = nullptr;
};

}  // namespace switchyard
