#include "model/quantization/scheme.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard {

void MatrixTensors::Refuse(std::string_view suffix, const std::string& what) const {
  throw Error(ErrorCode::kCorruptData, fmt::format("tensor {}.{}: {}", module, suffix, what));
}

void WeightMemory::Add(std::shared_ptr<const void> memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
  bytes_ += bytes;
}

WeightMatrix WeightMemory::Keep(quant::QuantMatrix matrix) {
  const auto kept = std::make_shared<const quant::QuantMatrix>(std::move(matrix));
  Add(kept, kept->bytes());
  return kept->View();
}

}  // namespace switchyard
