// Random weights for measurements, stored as a checkpoint of a scheme stores them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/random_scheme.h"
#include "model/tensor_source.h"
#include "switchyard/core/memory.h"

namespace switchyard {

// Whatever is asked for exists. Norms are ones and biases zeros; embeddings have unit variance, the
// other weights a deviation of about 0.02, so that every layer still routes its own way: codes are
// random and scales all alike. Speed depends on shapes and types, not on values.
//
// In a scheme of ggml blocks, vectors and routers are f32, as in GGUF files; matrices of k_b_proj
// with fewer inputs than a block are Q8_0.
class RandomSource : public TensorSource {
 public:
  // Counts what is taken; views have no data. The config is that of ConfigFor.
  RandomSource(const RandomScheme& scheme, const ModelConfig& config);
  // Makes it: `total_bytes` of memory are filled by the pool.
  RandomSource(const RandomScheme& scheme, const ModelConfig& config, size_t total_bytes,
               ThreadPool& pool);

  bool Has(std::string_view name) const override;
  std::span<const DType> matrix_dtypes() const override;
  // Errors: kUnsupported naming tensor, inputs and block if rows are no whole blocks of the scheme.
  TensorView Take(std::string_view name, const Shape& shape,
                  std::span<const DType> allowed) override;
  void Skip(std::string_view, const Shape&, std::span<const DType>) override {}
  void Ignore(std::string_view, std::string_view) override {}
  void Finish() override {}
  bool has_data() const override { return memory_ != nullptr; }

  // Of all tensors so far.
  size_t tensor_bytes() const { return tensor_bytes_; }
  // Of them without those that share memory, because loading copies them: what the second
  // constructor needs.
  size_t memory_bytes() const { return memory_bytes_; }
  // Keeps the bytes alive; hand it to whoever uses the views.
  std::shared_ptr<MappedMemory> memory() const { return memory_; }

 private:
  // Bytes that repeat; tensors start anywhere in them, a unit is never cut.
  struct Pattern {
    std::vector<std::byte> bytes;
    size_t unit = 1;
    std::deque<std::vector<std::byte>> shared;  // the pattern again and again, the last is longest
  };

  DType TypeOf(std::string_view name, const Shape& shape, std::span<const DType> allowed) const;
  bool IsShared(std::string_view name, DType dtype) const;
  Pattern& PatternOf(std::string_view name, const Shape& shape, DType dtype);
  Pattern MakePattern(std::string_view name, const Shape& shape, DType dtype) const;
  Pattern Constant(DType dtype, float value) const;
  // Random values of this deviation; of codes, in units of the code.
  Pattern Normal(DType dtype, float deviation) const;
  const std::byte* ShareBytes(Pattern& pattern, size_t start, size_t bytes) const;
  void Fill(const Pattern& pattern, size_t start, size_t bytes, std::byte* to) const;

  const RandomScheme& scheme_;
  bool has_mxfp4_banks_;
  ThreadPool* pool_ = nullptr;
  std::shared_ptr<MappedMemory> memory_;
  std::map<std::pair<std::string, DType>, Pattern> patterns_;  // by what they are for
  size_t tensor_bytes_ = 0;
  size_t memory_bytes_ = 0;
};

}  // namespace switchyard
