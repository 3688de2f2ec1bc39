// How text is cut into words before byte-level BPE, by the name that GGUF files give it
// (tokenizer.ggml.pre).
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace switchyard::text {

// One regular expression, in the dialect of the `tokenizers` crate (Oniguruma).
struct Split {
  std::string_view pattern;                // empty: none
  std::string_view behavior = "Isolated";  // of its matches

  friend bool operator==(const Split&, const Split&) = default;
};

// What the original tokenizer.json of a family of models says.
struct PreTokenizer {
  std::array<Split, 5> splits = {};  // each cuts the pieces of the one before
  bool digits = false;               // then every digit is a piece
  bool gpt2_pattern = false;         // then the pattern of GPT-2 cuts
  bool nfc = false;                  // the text is first brought to normal form C
  bool ignore_merges = false;        // a word that is a token is that token, merges or not
  bool add_bos = false;              // where the file does not say
};

// Null if the name is not known.
const PreTokenizer* FindPreTokenizer(std::string_view name);

// The best known name of what cuts words in this way, whatever it adds before a text; empty if
// there is none.
std::string_view PreTokenizerNameOf(const PreTokenizer& wanted);

// All names, separated by commas.
std::string PreTokenizerNames();

}  // namespace switchyard::text
