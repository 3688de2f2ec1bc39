// Any vocabulary as the metadata of a GGUF file: refused with switchyard::Error, or a tokenizer
// whose ids are those of tokens and whose text decodes.
//
// The input is text, so that seeds can be read: two lines with the model and the kind of words,
// then one line for each field, of which the first character says what it is.
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "switchyard/core/error.h"
#include "switchyard/text/gguf_vocabulary.h"

namespace {

using switchyard::GgufVocabulary;
using switchyard::Tokenizer;

void Require(bool condition) {
  if (!condition) std::abort();
}

std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

uint32_t Number(std::string_view text) {
  uint32_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

void AddToken(GgufVocabulary& vocabulary, int32_t type, std::string_view text) {
  vocabulary.tokens.push_back(text);
  vocabulary.token_type.push_back(type);
  vocabulary.scores.push_back(-static_cast<float>(vocabulary.scores.size() * 7 % 31));
}

void ReadField(GgufVocabulary& vocabulary, char kind, std::string_view rest) {
  switch (kind) {
    case 'm': vocabulary.merges.push_back(rest); break;
    case 'c': vocabulary.chat_template.assign(rest); break;
    case 'b': vocabulary.bos_token_id = Number(rest); break;
    case 'e': vocabulary.eos_token_id = Number(rest); break;
    case 'u': vocabulary.unknown_token_id = Number(rest); break;
    case 'p': vocabulary.padding_token_id = Number(rest); break;
    case 'B': vocabulary.add_bos_token = rest.empty(); break;
    case 'E': vocabulary.add_eos_token = rest.empty(); break;
    case 'S': vocabulary.add_space_prefix = rest.empty(); break;
    default: AddToken(vocabulary, kind - '0', rest);
  }
}

GgufVocabulary Read(std::string_view text) {
  GgufVocabulary vocabulary;
  vocabulary.model = TakeLine(text);
  vocabulary.pre = TakeLine(text);
  while (!text.empty()) {
    const std::string_view line = TakeLine(text);
    if (!line.empty()) ReadField(vocabulary, line[0], line.substr(1));
  }
  return vocabulary;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const GgufVocabulary vocabulary = Read(text);
  try {
    const auto tokenizer = Tokenizer::CreateFromGguf(vocabulary);
    const auto ids =
        tokenizer->Encode("<s> ab a\nb 12345 don't \xE4\xB8\xAD \xF0\x9F\x98\x80 </s>");
    for (int32_t id : ids) {
      Require(id >= 0 && static_cast<size_t>(id) < vocabulary.tokens.size());
      Require(!tokenizer->IdToToken(id).empty());
    }
    tokenizer->Decode(ids, false);
  } catch (const switchyard::Error& error) {
    Require(error.code() == switchyard::ErrorCode::kCorruptData ||
            error.code() == switchyard::ErrorCode::kUnsupported);
    Require(error.message().starts_with("tokenizer."));
    Require(error.message().size() < 10'000);
  }
  return 0;
}
