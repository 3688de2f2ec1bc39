// The files of the default model, carried inside the program.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace switchyard {

// One file of the model, as it lies in models/default.
struct EmbeddedFile {
  std::string_view name;             // "config.json"
  std::span<const std::byte> bytes;  // aligned to 64 bytes and followed by at least 64 zero bytes
};

// What a Hugging Face checkpoint folder would hold: config.json, generation_config.json,
// model.safetensors, tokenizer.json and tokenizer_config.json, in this order. The bytes live as
// long as the program and are paged in from its file on first use. Thread-safe.
std::span<const EmbeddedFile> DefaultModelFiles();

}  // namespace switchyard
