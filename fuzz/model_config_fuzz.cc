// A whole config.json of any architecture: it is understood, or refused with one of the two codes
// that say why. Never a crash, and what is understood has sizes that the rest of the engine relies
// on.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "model/architectures/architecture.h"
#include "model/rope.h"
#include "switchyard/core/error.h"

namespace {

using namespace switchyard;  // NOLINT(google-build-using-namespace)

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckPromises(const ModelConfig& config) {
  Require(config.vocab_size > 0 && config.hidden_size > 0 && !config.layers.empty());
  Require(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0);
  Require(config.rope.rotary_dim % 2 == 0 && config.rope.rotary_dim <= config.head_dim);
  Require(config.head_dim > 0 && (config.latent || config.head_dim % 2 == 0));
  Require(config.kv_shape().elements() > 0);
  if (config.latent) {
    Require(config.head_dim == config.latent->nope_dim + config.rope.rotary_dim);
    Require(config.latent->kv_rank > 0 && config.latent->value_dim > 0);
  }
  Require(config.num_expert_groups <= 1 || config.num_moe_layers() == 0 ||
          config.num_experts % config.num_expert_groups == 0);
  Require(config.num_moe_layers() == 0 ||
          (config.top_k >= 1 && config.top_k <= config.num_experts));
  Require(InverseFrequencies(config.rope, config.max_positions).size() ==
          config.rope.rotary_dim / 2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    CheckPromises(ParseModelConfig(ConfigReader::Parse("config.json", text)));
  } catch (const Error& e) {
    Require(e.code() == ErrorCode::kCorruptData || e.code() == ErrorCode::kUnsupported);
  }
  return 0;
}
