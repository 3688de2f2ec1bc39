// A loaded decoder-only MoE model and its forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"
#include "switchyard/model/config.h"
#include "switchyard/model/file_tensor.h"
#include "switchyard/model/files.h"
#include "switchyard/model/kv_view.h"
#include "switchyard/model/stored_matrix.h"
#include "switchyard/moe/eplb/rebalancer.h"
#include "switchyard/moe/layer/moe_layer.h"

namespace switchyard {

class GgufModel;

// Which positions of a chunk the head computes.
enum class LogitsWanted { kNone, kLast, kAll };

// The part of one sequence that a forward pass computes: tokens at positions [position, position +
// tokens.size()).
struct SequenceChunk {
  std::span<const int32_t> tokens;  // ids in [0, vocab_size)
  size_t position = 0;              // of the first token; all earlier ones are in the cache
  size_t sequence_limit =
      0;  // tokens that the sequence may reach in all; fixed for its life (rope kinds that stretch)
  std::span<const BlockTable> tables;  // one per KV group, covering position + tokens.size() tokens
  LogitsWanted logits = LogitsWanted::kLast;
};

// Sees what passes by. Views are valid during the call.
class ForwardObserver {
 public:
  virtual ~ForwardObserver() = default;
  // Shapes: hidden [T, H]: the residual stream after a decoder layer, all chunks one after another.
  virtual void OnLayer(size_t /*layer*/, ConstRows /*hidden*/) {}
  // Shapes: ids and weights [T, K] of an MoE layer.
  virtual void OnRouting(size_t /*layer*/, const moe::TopKOutput& /*topk*/) {}
};

// What a user may choose when a model is loaded.
struct ModelOptions {
  // Runner, a2a backend, act dtype (also of attention and head); with moe.ep the model is one
  // rank's part: all of it but the experts of other ranks.
  moe::MoeLayerOptions moe;
  size_t num_redundant_experts = 0;  // copies beside the first ones, over all ranks of a layer
  std::string init_expert_location = "trivial";     // see moe::InitialLocation
  std::optional<moe::RebalancerOptions> rebalance;  // move experts as their loads ask for
  // Which copy of an expert takes a token; unset = as the backend wants it.
  std::optional<moe::DispatchAlgorithm> dispatch;
  // Scheme to which float weights are quantised while they are read (--quantize); empty = none.
  std::string quantize;
  bool w4a4_new_packing = false;  // ModelSlim W4A4 files hold two codes in a byte (contract 5.4)
  bool check_values = true;  // read all weights at load: warms the page cache, and warns of NaN and
                             // infinity by name
  bool repack = true;  // weights into the layout that products read fastest, in place of the files'
  // Binds every tensor, and neither repacks nor quantises nor copies any but one matrix of a kind:
  // for `inspect`, in little memory. There are plans and no values: Forward refuses.
  bool look_only = false;
  bool verify = false;  // with look_only: reads every value of the files, see Model::verification
};

// Why a part of a model is computed the way it is, for `inspect` and `info --explain`.
struct ComputePlan {
  std::string part;     // "attention", "experts of 16 layers", "experts w2 of 4 layers", "head"
  std::string weights;  // "BF16"
  std::string kernel;   // "MatmulBF16BF16"
  std::string runner;   // experts only
  std::string reason;
};

// Read-only after loading; Forward may be called by one thread at a time per ExecContext.
class Model {
 public:
  // Reads a folder in Hugging Face layout, or GGUF files (OpenGgufFiles). Collective with moe.ep.
  // Errors: what goes wrong on one rank is the error of all; kFailedPrecondition naming the rank if
  //   ranks have different models; kNotFound, kCorruptData and kUnsupported, each naming file,
  //   field or tensor.
  static std::unique_ptr<Model> Load(std::shared_ptr<const ModelFiles> files,
                                     const ModelOptions& options, ThreadPool& pool);

  // Random weights in the shape of `config`, in big pages, stored and bound as those of a
  // checkpoint of `scheme` (see RandomSchemes).
  // Errors: kNotFound naming the schemes; kUnsupported naming matrix, found and expected if a shape
  //   does not fit the scheme; kResourceExhausted naming the bytes.
  static std::unique_ptr<Model> Random(const ModelConfig& config, std::string_view scheme,
                                       const ModelOptions& options, ThreadPool& pool);

  // Only config.json, or the metadata of GGUF files. Errors as Load.
  static ModelConfig ReadConfig(const std::shared_ptr<const ModelFiles>& files);

  ~Model();

  const ModelConfig& config() const;
  // Bytes of all weights as stored; those of all ranks.
  size_t weight_bytes() const;
  // Bytes of copies beside them, of weights that no kernel reads as they are stored.
  size_t copied_bytes() const;
  // Which logical expert each slot of a MoE layer (counted alone) holds now, over all ranks, and
  // the weights of those of this rank. Shapes: [P].
  std::span<const int32_t> ExpertMap(size_t moe_layer) const;
  const moe::ExpertWeights& experts(size_t moe_layer) const;
  // Most tokens of a rank in one pass that the exchange takes in every phase.
  size_t max_tokens_per_rank() const;
  // Whether the exchange goes on without ranks that are lost.
  bool is_elastic() const;
  // Whether this rank computes attention and head together with others, which then need it for
  // every product, logits too.
  bool is_shared() const;
  // Errors: kInvalidArgument naming the token and its position if it is outside the vocabulary.
  void CheckToken(int32_t token, size_t position) const;
  // Bytes that one decoded token reads: all matrices it passes through, the head included, one row
  // of the embedding.
  size_t active_bytes_per_token() const;
  // Bytes in the files that copied_bytes stand for, so that nobody reads them again.
  size_t released_bytes() const;
  // Multiplications with weights per token of a prompt (the head left out, which a prompt computes
  // once), and in the head.
  size_t active_params() const;
  size_t head_params() const;
  // The type that most weights have.
  DType weight_dtype() const;
  // The type that activations take in products with most weights.
  DType activation_dtype() const;
  std::vector<ComputePlan> Explain() const;
  // How each weight matrix of this rank is stored, in the order of the model.
  const std::vector<StoredMatrix>& matrices() const;
  // Every tensor of the files, in safetensors by name, in GGUF in the order of the parts. Empty
  // unless look_only.
  const std::vector<FileTensor>& tensors() const;
  // What `verify` found: values that no intact weight has, what a scheme refuses, bytes between
  // tensors that are not zero.
  const Verification& verification() const;
  // The GGUF files of the model; nullptr if it has none.
  const GgufModel* gguf() const;
  // Names and problems of tensors with NaN or infinity, found at load ("model.layers.0….weight: 3
  // NaN, first at [0, 7]").
  const std::vector<std::string>& bad_tensors() const;

  // With ranks that have sequences of their own, every rank calls it for the same pass, also
  // without chunks. Otherwise all ranks call it with the same chunks.
  //
  // Computes the chunks and writes their keys and values into the cache. A chunk's results do not
  // depend on the other chunks, on how a sequence is cut into chunks, or on the number of threads:
  // the same bits come out.
  //
  // Shapes: returns logits [rows wanted, V] f32 in the order of chunks and positions, in
  //   context.arena, which the caller resets between passes.
  // Errors: kInvalidArgument naming the token and its position if an id is outside the vocabulary.
  Rows Forward(ExecContext& context, std::span<const SequenceChunk> chunks, const KvView& cache,
               ForwardObserver* observer = nullptr);

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard
