// What the metadata of a GGUF file says about its model, and what its tensors are called.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "switchyard/model/config.h"
#include "switchyard/model/gguf.h"

namespace switchyard {

// The config of a model in GGUF files, of the architectures olmoe, qwen3moe, llama with experts
// (Mixtral), deepseek2 (V2, V2-Lite, V3 and relatives) and gpt-oss.
//
// Where it differs from that of the same model in safetensors: experts are stored [E, out, in] with
// gate and up apart in every family; the converter has reordered the rows of q and k of llama, so
// rope.interleaved is true; rope_freqs.weight, which divides frequencies, becomes a longrope with
// equal factors. Biases, tied embeddings and the correction bias of the router follow from the
// tensors that are there. eos_ids holds the end of text and the end of turn.
// Errors: kUnsupported naming file and key for another architecture, a value that cannot be
//   computed, and every key of the architecture that is neither read nor known to be harmless;
//   kCorruptData for missing keys, wrong types and values that contradict each other.
ModelConfig ReadGgufConfig(const GgufModel& gguf);

// The name in a GGUF file of `architecture` ("gpt-oss") of the tensor that hub checkpoints call
// `hub_name`: "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight". nullopt for names
// that GGUF has no tensor for.
//
// Experts: "….mlp.experts.gate_proj" (also with ".weight") is the bank of all,
// "blk.3.ffn_gate_exps.weight", and "….experts.gate_proj_bias" its biases; "….experts.5.w1.weight"
// is one of a file of before April 2024, "blk.3.ffn_gate.5.weight". Latent attention:
// "….kv_b_proj.weight" is "blk.3.attn_kv_b.weight" in files that keep it whole;
// "….k_b_proj.weight", [heads, kv_rank, nope_dim], and "….v_b_proj.weight", [heads, value_dim,
// kv_rank], are its parts in the others.
std::optional<std::string> GgufTensorName(std::string_view architecture, std::string_view hub_name);

// Why a tensor of this name is not a weight to be bound; nullopt if it is one.
std::optional<std::string_view> GgufIgnoredReason(std::string_view tensor_name);

}  // namespace switchyard
