// Generated ids one by one into text that will not change any more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "switchyard/text/tokenizer.h"

namespace switchyard {

// Every returned piece is whole characters; bytes that cannot become one are U+FFFD. All pieces
// joined are what Tokenizer::Decode gives for all ids. One thread at a time.
class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer,
                                bool skip_special = true);
  StreamingDetokenizer(StreamingDetokenizer&& other) noexcept;
  StreamingDetokenizer& operator=(StreamingDetokenizer&& other) noexcept;
  ~StreamingDetokenizer();

  // Text that became final with this id, often empty. Throws kInvalidArgument for a negative id.
  std::string Add(int32_t id);

  // The rest. The stream may be used again afterwards, from the start.
  std::string Finish();

 private:
  void* handle_;
};

}  // namespace switchyard
