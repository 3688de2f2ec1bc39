// Tokenizers between folders in Hugging Face layout and the metadata of GGUF files.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/model/files.h"
#include "switchyard/model/gguf.h"
#include "switchyard/model/quantize.h"
#include "switchyard/text/tokenizer.h"

namespace switchyard::cli {

bool HasGgufTokenizer(const std::shared_ptr<const ModelFiles>& files);

// tokenizer.json and its like, to be written into a folder.
std::vector<TextFile> TokenizerTexts(const TokenizerFiles& files);

// Sets tokenizer.ggml.* and tokenizer.chat_template from the files of a folder; tokens that the
// tokenizer lacks of the rows of the embedding are written as unused "[PAD7]", as llama.cpp's
// converter does. The function throws kUnsupported for a tokenizer that GGUF has no kind for.
std::function<void(GgufWriter&, size_t)> GgufTokenizerSetter(
    const std::shared_ptr<const ModelFiles>& files);

}  // namespace switchyard::cli
