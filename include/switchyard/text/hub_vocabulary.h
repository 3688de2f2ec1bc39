// The vocabulary of a tokenizer.json as GGUF metadata: the reverse of MakeTokenizerFiles.
#pragma once

#include <string>
#include <vector>

#include "switchyard/text/gguf_vocabulary.h"
#include "switchyard/text/tokenizer.h"

namespace switchyard {

// A vocabulary with its texts.
struct HubVocabulary {
  std::vector<std::string> texts, merges;  // what the views of `vocabulary` point to
  GgufVocabulary vocabulary;

  HubVocabulary() = default;
  HubVocabulary(HubVocabulary&&) = default;
  HubVocabulary& operator=(HubVocabulary&&) = default;
  HubVocabulary(const HubVocabulary&) = delete;
  HubVocabulary& operator=(const HubVocabulary&) = delete;
};

// Byte-level BPE with one of the known ways of cutting words becomes "gpt2"; BPE over text with
// byte fallback and a space before the text (Llama 2, Mixtral) becomes "llama", with scores in the
// order of the merges. Ids that no token has are unused "[PAD7]". Left out is what the format
// cannot say: that added tokens take up spaces around them.
// Errors: kCorruptData if the files are no tokenizer; kUnsupported naming the field of
//   tokenizer.json that the format has no kind for, and for merges that scores cannot give.
HubVocabulary ReadHubVocabulary(const TokenizerFiles& files);

}  // namespace switchyard
