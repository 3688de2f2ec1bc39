// What a conversion will write: every byte of the output has its place before the first matrix is
// read, so that parts can be written in any order, and again.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/convert/encoding.h"
#include "model/convert/source.h"
#include "switchyard/model/quantize.h"

namespace switchyard {

struct OutputTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  size_t file = 0;    // in ConvertPlan::files
  size_t offset = 0;  // from the start of the file

  size_t bytes() const;
};

// One matrix of the input on its way into tensors of the output.
struct ConvertUnit {
  std::string name;  // in the report; the experts of a bank share one
  std::string note;
  size_t rows = 0;
  size_t cols = 0;
  std::function<std::unique_ptr<SourceMatrix>()> bind;
  const Encoding* encoding = nullptr;
  RowPlace place;
  std::vector<size_t> tensors;  // of the encoding, in its order
  size_t bytes_after = 0;       // its part of them
};

struct OutputFile {
  std::string name;
  std::string header;
  size_t bytes = 0;
};

struct ConvertPlan {
  std::vector<std::unique_ptr<Encoding>> encodings;
  std::vector<OutputTensor> tensors;
  std::vector<ConvertUnit> units;
  std::vector<OutputFile> files;    // with tensors
  std::vector<TextFile> texts;      // written as a whole
  std::vector<std::string> copies;  // files of the input that are taken over
  std::vector<std::string> warnings;

  // The encoding for plain floats of a type, or blocks of ggml; made once.
  const Encoding* EncodingOf(DType dtype);
  // Bytes of tensor data.
  size_t data_bytes() const;

 private:
  std::vector<std::pair<DType, const Encoding*>> by_dtype_;
};

// Errors: kUnsupported naming what the layout cannot say of the model.
ConvertPlan PlanFolder(ConvertSource& source, const QuantizeScheme& scheme,
                       const QuantizeOptions& options);
ConvertPlan PlanGguf(ConvertSource& source, const QuantizeScheme& scheme,
                     const QuantizeOptions& options, const std::string& file_name);

// Proves that the header of the GGUF file made from a folder says of the model what its config.json
// says. Errors: kUnsupported naming the field that the format cannot hold, with both values.
void RequireSameConfig(const ModelConfig& folder, const ModelConfig& gguf);

}  // namespace switchyard
