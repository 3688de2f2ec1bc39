// A checkpoint that is read matrix by matrix, in whatever way it stores each.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/convert/model_parts.h"
#include "model/matrix_binder.h"
#include "model/quantization/quantization.h"
#include "model/tensor_source.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/config.h"
#include "switchyard/model/files.h"
#include "switchyard/model/gguf.h"

namespace switchyard {

// One matrix of the input. After Load, any thread may read rows.
class SourceMatrix {
 public:
  // f32 rows [first, first + count) into out [count, cols].
  using Read = std::function<void(size_t first, size_t count, float* out)>;

  SourceMatrix(size_t rows, size_t cols, std::string format, size_t bytes)
      : rows_(rows), cols_(cols), format_(std::move(format)), bytes_(bytes) {}

  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  const std::string& format() const { return format_; }  // "BF16"
  size_t bytes() const { return bytes_; }                // in the file

  // Makes copies of what lies packed. Matrices may be loaded concurrently.
  void Load() {
    if (load_) load_();
  }
  void ReadRows(size_t first, size_t count, float* out) const { read_(first, count, out); }
  // Gives the pages of the file back: those of some rows, if they lie together, or all.
  void ReleaseRows(size_t first, size_t count) const {
    if (release_rows_) release_rows_(first, count);
  }
  void Release() const {
    if (release_) release_();
  }

  void set_load(std::function<void()> load) { load_ = std::move(load); }
  void set_read(Read read) { read_ = std::move(read); }
  void set_release(std::function<void()> release) { release_ = std::move(release); }
  void set_release_rows(std::function<void(size_t first, size_t count)> release) {
    release_rows_ = std::move(release);
  }

 private:
  size_t rows_, cols_;
  std::string format_;
  size_t bytes_;
  std::function<void()> load_;
  Read read_;
  std::function<void()> release_;
  std::function<void(size_t, size_t)> release_rows_;
};

// Reads rows of a matrix that is in memory, dense, quantised or in blocks of ggml.
SourceMatrix::Read ReaderOf(const WeightMatrix& matrix);

// The input: a folder or a GGUF model, proven to hold every tensor of its model.
class ConvertSource {
 public:
  // Errors: those of opening and binding the model, without reading its matrices.
  static std::unique_ptr<ConvertSource> Open(const std::filesystem::path& path);

  const ModelConfig& config() const { return config_; }
  const ModelFiles& files() const { return *files_; }
  const std::shared_ptr<const ModelFiles>& shared_files() const { return files_; }
  const GgufModel* gguf() const { return gguf_.get(); }               // null for a folder
  const Checkpoint* checkpoint() const { return checkpoint_.get(); }  // null for a GGUF model
  // Whether linear layers or experts are stored in a quantised scheme.
  bool is_quantized() const;

  // The type in which a part is stored, or BF16 if it is quantised.
  DType KeptDType(const ModelPart& part) const;
  // Names of the tensors that a matrix is made of, in the folder; the banks that hold it among
  // others.
  std::vector<std::string> TensorNames(const ModelPart& part) const;
  // Binds one part of PartsOf(config()). Not thread-safe; each part once.
  std::unique_ptr<SourceMatrix> Bind(const ModelPart& part);
  // A tensor as it lies in the file: rows are those of the last axis.
  std::unique_ptr<SourceMatrix> BindTensor(const TensorView& view) const;
  std::unique_ptr<SourceMatrix> BindTensor(std::string_view folder_name);

 private:
  enum class Experts { kSeparate, kStacked, kTransposed, kMxfp4, kBanks };

  ConvertSource() = default;
  void Prove() const;
  std::string BlockPrefix(const ModelPart& part) const;
  Experts ExpertsAt(const std::string& prefix) const;
  std::string StoredModule(const ModelPart& part) const;
  const StorageScheme* SchemeOf(const std::string& module) const;
  TensorView Bank(const std::string& name);
  std::unique_ptr<SourceMatrix> BindModule(const std::string& module, size_t rows, size_t cols);
  std::unique_ptr<SourceMatrix> BindExpert(const ModelPart& part);
  std::unique_ptr<SourceMatrix> BindMxfp4(const ModelPart& part, const std::string& prefix);
  std::unique_ptr<SourceMatrix> BindBias(const ModelPart& part);
  bool IsInterleaved(const ModelPart& part) const;
  std::unique_ptr<SourceMatrix> BindInterleaved(const ModelPart& part);
  std::unique_ptr<SourceMatrix> BindJoinedLatent(const ModelPart& part);
  std::unique_ptr<SourceMatrix> FromMatrix(const WeightMatrix& matrix, std::string format,
                                           size_t bytes, const TensorView& pages) const;

  std::shared_ptr<const ModelFiles> files_;
  ModelConfig config_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<GgufModel> gguf_;
  std::unique_ptr<QuantizationRules> rules_;
  std::unique_ptr<TensorSource> source_;
  BindOptions options_;
  std::map<std::string, TensorView> banks_;
};

}  // namespace switchyard
