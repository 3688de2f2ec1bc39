#include "model/tensor_source.h"

namespace switchyard {

std::vector<LocatedTensor> CheckpointSource::List() const {
  std::vector<LocatedTensor> list;
  for (std::string_view name : checkpoint_.Names()) {
    const TensorInfo& info = *checkpoint_.Info(name);
    list.push_back(
        {{info.name, checkpoint_.FileOf(name), info.dtype, info.shape, info.end - info.begin,
          TensorRole::kUnused, std::string(checkpoint_.IgnoredReason(name))},
         checkpoint_.View(name)});
  }
  return list;
}

}  // namespace switchyard
