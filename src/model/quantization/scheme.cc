#include "model/quantization/scheme.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard {

void MatrixTensors::Refuse(std::string_view suffix, const std::string& what) const {
  throw Error(ErrorCode::kCorruptData, fmt::format("tensor {}.{}: {}", module, suffix, what));
}

void WeightMemory::Add(OwnedBytes owned) {
  const std::lock_guard lock(mutex_);
  bytes_ += owned.bytes;
  kept_.push_back(std::move(owned));
}

WeightMatrix WeightMemory::Keep(quant::QuantMatrix matrix) {
  const auto kept = std::make_shared<const quant::QuantMatrix>(std::move(matrix));
  Add({kept, kept->data.data(), kept->bytes()});
  return kept->View();
}

}  // namespace switchyard
