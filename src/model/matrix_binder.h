// Single weight matrices, in whatever way the checkpoint stores each.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/tensor_source.h"
#include "model/weights.h"

namespace switchyard {

// The note of a matrix that the rules take for quantised and that lies there as plain floats.
inline constexpr std::string_view kPlainFloats = "stored as plain floats";

// Binding has two halves. First all matrices are asked for: those that lie as they are used are
// bound at once, the others are noted. When the source has proven that every tensor is there and
// fits, Load makes the others. Addresses that are given must stay until then.
class MatrixBinder {
 public:
  MatrixBinder(TensorSource& source, const BindOptions& options)
      : source_(source), options_(options) {}

  // What --quantize may touch: linear layers; or not: embedding, head, routers.
  enum class Use : uint8_t { kLinear, kOther };
  // The matrix MODULE of [rows, cols], into `out`. Returns its scheme in moe/schemes.
  // Errors: those of the rules, naming the module.
  std::string_view Bind(const std::string& module, size_t rows, size_t cols, Use use,
                        WeightMatrix& out);

  // A part of a bank of plain floats, which has been taken. Returns its scheme in moe/schemes.
  // Shapes: part [rows, cols].
  std::string_view BindPart(const std::string& bank, const TensorView& part, WeightMatrix& out);

  // A matrix that must be there, but is another rank's.
  struct Skipped {
    std::string_view moe_scheme;
    TensorView act_scale;  // its static scale of activations; data is null if it has none
  };
  Skipped Skip(const std::string& module, size_t rows, size_t cols);

  // Notes a matrix that was bound by other means.
  void Note(StoredMatrix matrix) { noted_.push_back(std::move(matrix)); }
  // Bytes of copies that the matrices so far will take.
  size_t copied_bytes() const { return copied_bytes_; }

  // Makes what was noted, in parallel, and lets go what was repacked. With look_only one matrix of
  // each kind stands for all of them, so that formats are known and little memory is taken.
  // Errors: those of the schemes.
  void Load();

  // Makes every matrix that a scheme stores and forgets it again: what is wrong with each, as
  // (module, message).
  std::vector<std::pair<std::string, std::string>> Verify();
  std::vector<OwnedBytes> TakeOwned() { return memory_.Take(); }
  WeightMemory& memory() { return memory_; }
  // Of the matrices so far; Load completes them.
  const std::vector<StoredMatrix>& notes() const { return noted_; }
  std::vector<StoredMatrix> TakeNotes() { return std::move(noted_); }

 private:
  struct Pending {
    const StorageScheme* scheme = nullptr;  // null: quantised online
    MatrixTensors tensors;
    WeightMatrix* out = nullptr;
    size_t note = 0;  // of noted_
  };
  // The matrix that `pending` becomes, in `memory`.
  WeightMatrix Make(const Pending& pending, WeightMemory& memory) const;
  void Complete(const Pending& pending);
  void LoadSamples();
  const StorageScheme* SchemeOf(const std::string& module, std::string* note) const;
  std::vector<StoredTensor> TensorsOf(const StorageScheme& scheme, const std::string& module,
                                      size_t rows, size_t cols) const;
  void TakeScheme(const StorageScheme& scheme, const std::string& module, size_t rows, size_t cols,
                  WeightMatrix& out);
  // A view of plain floats (or ggml blocks); quantised later if that is asked for.
  std::string_view BindPlain(const std::string& module, const TensorView& view, size_t rows,
                             size_t cols, Use use, std::string note, WeightMatrix& out);

  TensorSource& source_;
  const BindOptions& options_;
  std::deque<Pending> pending_;
  WeightMemory memory_;
  size_t copied_bytes_ = 0;
  std::vector<StoredMatrix> noted_;
};

}  // namespace switchyard
