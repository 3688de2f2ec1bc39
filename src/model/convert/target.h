// The schemes that can be written: which matrices take part, and what describes them in
// config.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/convert/encoding.h"
#include "model/convert/model_parts.h"
#include "switchyard/core/dtype.h"
#include "switchyard/model/quantize.h"

namespace switchyard {
// Whether checkpoints of the model hold mxfp4 experts as banks of names of their own: gpt-oss.
bool HasOwnMxfp4(const ModelConfig& config);

// How the matrices that take part are stored in a folder in Hugging Face layout.
// Errors: kUnsupported if checkpoints of this architecture have no such layout.
std::unique_ptr<Encoding> FolderEncoding(std::string_view scheme, const ModelConfig& config);

// Modules that stay floats.
struct LeftOut {
  std::vector<std::string> modules;  // but experts
  std::vector<std::string> expert_modules;
  std::vector<std::string> expert_products;  // "down_proj": of all experts

  bool any_experts() const { return !expert_modules.empty(); }
};

// The field quantization_config as JSON; empty: there is none.
std::string QuantizationConfigOf(std::string_view scheme, const ModelConfig& config,
                                 const LeftOut& left_out);
// Whether the scheme has a say in a part at all.
bool TakesPart(std::string_view scheme, const ModelConfig& config, ModelPart::Kind kind);

// A type of a GGUF file.
struct GgufTarget {
  DType dtype = DType::kF32;  // of most matrices
  uint32_t file_type = 0;     // general.file_type
};
GgufTarget GgufTargetOf(std::string_view scheme);

// What a matrix is to its model, as far as its type depends on it.
enum class GgufRole { kEmbedding, kTiedEmbedding, kOutput, kExperts, kRouter, kOther };

// The type of a matrix of `cols` inputs, and why it is not that of the file (empty if it is).
struct GgufChoice {
  DType dtype = DType::kF32;
  std::string note;
};
// As llama.cpp's quantiser without mixtures chooses: the output matrix, or the embedding that
// serves as one, is Q6_K at least; routers are F32; MXFP4 is for experts, the rest is then Q8_0;
// and where blocks of 256 do not divide a row, a type of blocks of 32 of about the same size (Q2_K,
// Q3_K: IQ4_NL; Q4_K: Q5_0; Q5_K: Q5_1; Q6_K: Q8_0), or else F16.
GgufChoice ChooseGgufType(const GgufTarget& target, GgufRole role, size_t cols);

}  // namespace switchyard
