// Writes a checkpoint again in another scheme.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/thread_pool.h"
#include "switchyard/model/gguf.h"

namespace switchyard {

// A scheme that can be written.
struct QuantizeScheme {
  std::string_view name;  // "w4a16_g128", "gguf-q4_k"
  std::string_view summary;
  bool is_gguf = false;  // one GGUF file; otherwise a folder in Hugging Face layout
};
// All of them, folders first.
std::span<const QuantizeScheme> QuantizeSchemes();

// The scheme of this name, in any case; those of GGUF also under the name of their type ("Q4_K").
// Errors: kInvalidArgument listing the schemes if there is none.
const QuantizeScheme& FindQuantizeScheme(std::string_view name);

// A small file of text.
struct TextFile {
  std::string name;
  std::string content;
};

// How a checkpoint is written.
struct QuantizeOptions {
  std::string scheme;
  // Replace what is at OUT, and start anew where an unfinished run does not fit.
  bool force = false;
  // For a GGUF file made from a folder: sets tokenizer.* for a vocabulary of so many rows. Not set:
  // the file has no tokenizer.
  std::function<void(GgufWriter& writer, size_t vocab_size)> add_tokenizer;
  // For a folder made from a GGUF file: its tokenizer.
  std::vector<TextFile> texts;
  size_t shard_bytes = 5'000'000'000;     // most bytes of a .safetensors file with two tensors
  size_t sync_bytes = size_t{256} << 20;  // written between two notes of what is complete
  size_t max_batch_units = 4096;          // matrices between two calls of on_progress
  // Called between tensors with bytes of output; false stops the run, which another one with the
  // same arguments continues.
  std::function<bool(size_t done_bytes, size_t all_bytes)> on_progress;
};

// What became of one tensor. All matrices of a bank of experts are one.
struct TensorReport {
  std::string name;
  std::string from, to;  // types: "BF16", "I4, a scale per 32 inputs"
  std::string note;      // why it has not the type of the scheme, or empty
  size_t elements = 0;
  size_t bytes_before = 0, bytes_after = 0;
  double rms_error = 0;  // |w - w'| / |w|, 0 for a tensor of zeros
  double max_error = 0;  // largest |w - w'|
  bool is_quantized = false;

  double bits_per_weight() const {
    return elements == 0 ? 0
                         : 8.0 * static_cast<double>(bytes_after) / static_cast<double>(elements);
  }
};

// What became of all of them.
struct QuantizeReport {
  std::string scheme;
  std::vector<TensorReport> tensors;  // matrices and vectors, in the order of the output
  std::vector<std::string> warnings;
  size_t bytes_before = 0, bytes_after = 0;  // of all tensors
  size_t elements = 0;
  size_t resumed_bytes = 0;  // of the output, that an earlier run had written

  double bits_per_weight() const {
    return elements == 0 ? 0
                         : 8.0 * static_cast<double>(bytes_after) / static_cast<double>(elements);
  }
};

// Reads the checkpoint `in` (a folder in Hugging Face layout, or a GGUF file) and writes it to
// `out` in another scheme. A quantised checkpoint is decoded first, which adds its error to the new
// one: the report warns of it.
//
// The output is made in the folder `out`.partial and renamed when it is complete and on the disk.
// That folder holds a journal of the tensors that are complete; a run that was stopped, killed or
// ran out of disk space is continued by the next one with the same arguments, and the bytes of the
// result are the same as without the interruption. They do not depend on the number of threads.
//
// Memory: some rows of every worker at a time, and copies of source matrices that lie packed.
// Errors: kInvalidArgument for an unknown scheme, and if `out` is `in` or one lies in the other;
//   kFailedPrecondition if `out` exists, or if an unfinished run does not fit, and there is no
//   force; kUnsupported naming what the scheme or file format cannot say of this model;
//   kCorruptData naming the tensor with NaN or infinity; kResourceExhausted with the bytes that are
//   missing on the disk; kUnavailable if files cannot be written or another run writes to the same
//   output; kCancelled if on_progress stopped it; and all errors of reading the model.
QuantizeReport QuantizeCheckpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                  const QuantizeOptions& options, ThreadPool& pool);

}  // namespace switchyard
