// The tokenizer in the metadata of a GGUF file, and how it becomes the files that Tokenizer reads.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/text/tokenizer.h"

namespace switchyard {

// The fields tokenizer.ggml.* of a file, each under its own name, and its chat templates. V is the
// size of the vocabulary. Arrays that the file lacks are empty. The texts of the tokens and merges
// stay the caller's and must outlive the call that reads them.
struct GgufVocabulary {
  std::string model;  // "gpt2": byte-level BPE; "llama": SentencePiece BPE; "gemma4": BPE of text
  std::string pre;    // how text is cut into words; read for "gpt2" alone
  std::vector<std::string_view> tokens;  // [V], UTF-8
  std::vector<float> scores;             // [V], of "llama": the higher, the sooner a piece is made
  std::vector<int32_t> token_type;       // [V] of 1 normal, 2 unknown, 3 control, 4 user-defined,
                                         // 5 unused, 6 byte; empty: all normal
  std::vector<std::string_view> merges;  // "left right", the first to be applied first; not "llama"

  // Ids of tokens, in 0..V-1.
  std::optional<uint32_t> bos_token_id;
  std::optional<uint32_t> eos_token_id;
  std::optional<uint32_t> eot_token_id;  // ends a turn; checked here, for the caller to stop at
  std::optional<uint32_t> unknown_token_id;
  std::optional<uint32_t> seperator_token_id;  // spelled as the format spells it
  std::optional<uint32_t> padding_token_id;
  std::optional<uint32_t> mask_token_id;

  // Absent: what the kind of vocabulary does.
  std::optional<bool> add_bos_token;
  std::optional<bool> add_eos_token;
  std::optional<bool> add_space_prefix;  // of "llama": a space before the text
  std::optional<bool> remove_extra_whitespaces;

  std::string chat_template;                                // tokenizer.chat_template; empty: none
  std::map<std::string, std::string> named_chat_templates;  // tokenizer.chat_template.<name>
};

// The tokenizer.json and tokenizer_config.json of the model that was converted, as far as the
// metadata tells. What it does not tell is what most models have: added tokens take up no spaces
// around them and are found before normalisation, and the space prefix of "llama" comes after each
// special token too. What converters change is changed back: tokens of no text and padding
// ("[PAD7]", unused) are no tokens, and user-defined tokens of "llama" and "gemma4" have U+2581 for
// spaces. Throws kCorruptData for fields that contradict each other, kUnsupported for a kind that
// is not read; the message starts with the field, so that the caller can put the file before it.
TokenizerFiles MakeTokenizerFiles(const GgufVocabulary& vocabulary);

}  // namespace switchyard
