// Any quantization_config: rules, or one of the two codes that say why not. What the rules say
// about modules are schemes whose tensors have names, shapes and types; never a crash, and no
// expression takes long.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "model/quantization/quantization.h"
#include "switchyard/core/error.h"

namespace {

using namespace switchyard;  // NOLINT(google-build-using-namespace)

void Require(bool condition) {
  if (!condition) std::abort();
}

void RequireKnownCode(const Error& error) {
  Require(error.code() == ErrorCode::kCorruptData || error.code() == ErrorCode::kUnsupported);
  Require(error.message().starts_with("config.json"));
  Require(error.message().size() < 4000);
}

constexpr std::string_view kModules[] = {
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.mlp.gate",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.experts.0.gate_proj",
    "model.layers.17.mlp.experts.127.down_proj",
    "model.layers.3.block_sparse_moe.experts.3.w2",
    "language_model.model.layers.2.mlp.shared_experts.up_proj",
    "",
};

void CheckTensors(const StorageScheme& scheme, size_t rows, size_t cols) {
  Require(!scheme.moe_scheme().empty() && !scheme.Describe().empty());
  try {
    const std::vector<StoredTensor> tensors = scheme.Tensors(rows, cols);
    Require(!tensors.empty() && tensors.front().suffix == scheme.codes());
    for (const StoredTensor& tensor : tensors) {
      Require(!tensor.suffix.empty() && !tensor.shapes.empty() && !tensor.dtypes.empty());
      size_t count = 0;
      for (const Shape& shape : tensor.shapes) Require(shape.NumElements(count));
    }
  } catch (const Error& error) {  // sizes that the packing cannot hold
    Require(error.code() == ErrorCode::kInvalidArgument);
  }
}

void CheckRules(const QuantizationRules& rules) {
  for (std::string_view module : kModules) {
    try {
      const StorageScheme* scheme = rules.SchemeOf(module);
      if (scheme == nullptr) continue;
      CheckTensors(*scheme, 64, 128);
      CheckTensors(*scheme, 40, 72);
      CheckTensors(*scheme, 7, 1);
    } catch (const Error& error) {  // of a description that says nothing about a module
      RequireKnownCode(error);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (bool new_packing : {false, true}) {
    try {
      ConfigReader config = ConfigReader::Parse("config.json", text);
      CheckRules(*ParseQuantization(config, {new_packing}));
    } catch (const Error& error) {
      RequireKnownCode(error);
    }
  }
  return 0;
}
