#include "model/convert/plan.h"

namespace switchyard {

size_t OutputTensor::bytes() const {
  size_t count = 0;
  shape.NumElements(count);
  return BytesOf(dtype, count);
}

const Encoding* ConvertPlan::EncodingOf(DType dtype) {
  for (const auto& [known, encoding] : by_dtype_) {
    if (known == dtype) return encoding;
  }
  encodings.push_back(UnscaledEncoding(dtype));
  by_dtype_.emplace_back(dtype, encodings.back().get());
  return encodings.back().get();
}

size_t ConvertPlan::data_bytes() const {
  size_t bytes = 0;
  for (const OutputTensor& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

}  // namespace switchyard
