// `inspect`: what the metadata of GGUF files says.
#pragma once

#include <nlohmann/json.hpp>

#include "switchyard/model/gguf.h"

namespace switchyard::cli {

// version, alignment, parts, metadata_entries, name, file_type, tensor_types ({type: number}),
// tokenizer, pre_tokenizer, vocabulary; null where the file does not say.
// Errors: those of GgufFile for entries of the wrong type.
nlohmann::ordered_json DescribeGguf(const GgufModel& gguf);

}  // namespace switchyard::cli
