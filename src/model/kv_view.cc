#include "switchyard/model/kv_view.h"

namespace switchyard {

KvBlockLayout::KvBlockLayout(const ModelConfig& config, DType dtype)
    : shape_(config.kv_shape()),
      dtype_(dtype),
      key_split_(config.latent ? config.latent->kv_rank : shape_.key_dim),
      scales_(RowsBytes(shape_.elements())),
      bytes_(scales_) {
  if (!IsKvCode(dtype)) return;
  const size_t scales_of_head = num_key_parts() + (shape_.value_dim == 0 ? 0 : 1);
  bytes_ += shape_.heads * scales_of_head * kScalesBytes;
}

size_t KvBlockLayout::Values(size_t head) const {
  if (shape_.value_dim == 0) return Keys(head);
  return shape_.heads * RowsBytes(shape_.key_dim) + head * RowsBytes(shape_.value_dim);
}

size_t KvBlockLayout::ValueScales(size_t head) const {
  if (shape_.value_dim == 0) return KeyScales(head);
  return KeyScales(shape_.heads) + head * kScalesBytes;
}

}  // namespace switchyard
