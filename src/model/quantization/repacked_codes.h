// Schemes whose codes are packed in an order that no kernel reads: they are repacked once, and the
// file's copy is let go.
#pragma once

#include <string>
#include <string_view>

#include "model/quantization/scheme.h"
#include "switchyard/core/quant_format.h"

namespace switchyard {

// Where a scheme has eight (or, of 8 bits, four) codes in an i32.
class AwqCodes : public StorageScheme {
 public:
  explicit AwqCodes(size_t group) : group_(group) {}
  std::string_view moe_scheme() const override { return "awq"; }
  std::string Describe() const override;
  std::string_view codes() const override { return "qweight"; }
  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override;
  bool repacks() const override { return true; }
  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override;

 private:
  size_t group_;  // 0 = all inputs
};

class GptqCodes : public StorageScheme {
 public:
  struct Options {
    size_t bits = 4;
    size_t group = 128;      // 0 = all inputs
    bool is_v2 = false;      // zero points as they are, not minus one
    bool has_order = false;  // groups lie apart (desc_act): g_idx must be there
  };
  explicit GptqCodes(const Options& options) : options_(options) {}
  std::string_view moe_scheme() const override { return "gptq"; }
  std::string Describe() const override;
  std::string_view codes() const override { return "qweight"; }
  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override;
  bool repacks() const override { return true; }
  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override;

 private:
  Options options_;
};

// compressed-tensors, "pack-quantized".
class PackQuantizedCodes : public StorageScheme {
 public:
  struct Options {
    size_t bits = 4;
    size_t group = 128;  // 0 = all inputs
    bool is_symmetric = true;
    bool has_order = false;  // weight_g_idx (actorder "group")
    ActQuant act;
  };
  explicit PackQuantizedCodes(const Options& options) : options_(options) {}
  std::string_view moe_scheme() const override {
    return options_.act.kind == ActQuantKind::kNone ? "wna16" : "w4a8_int";
  }
  std::string Describe() const override;
  std::string_view codes() const override { return "weight_packed"; }
  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override;
  bool repacks() const override { return true; }
  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override;

 private:
  Options options_;
};

// Signed 4-bit codes with a scale per output: one in a byte [N, K], or the outputs 2j (low nibbles)
// and 2j + 1 in one [N/2, K].
class Int4Codes : public StorageScheme {
 public:
  struct Options {
    bool is_paired = false;
    std::string_view moe_scheme;  // "w4a8_int", "w4a4_int"
    ActQuant act;
    bool is_modelslim = false;  // with weight_offset, scale_bias and a second scale
    size_t group = 0;           // of the second scale
  };
  explicit Int4Codes(const Options& options) : options_(options) {}
  std::string_view moe_scheme() const override { return options_.moe_scheme; }
  std::string Describe() const override;
  std::string_view codes() const override { return "weight"; }
  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override;
  bool repacks() const override { return true; }
  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override;

 private:
  Options options_;
};

}  // namespace switchyard
