#include "switchyard/core/quant_format.h"

namespace switchyard {

std::string_view ActQuantKindName(ActQuantKind kind) {
  switch (kind) {
    case ActQuantKind::kNone: return "none";
    case ActQuantKind::kInt8Token: return "int8_token";
    case ActQuantKind::kInt4Token: return "int4_token";
    case ActQuantKind::kInt8Static: return "int8_static";
    case ActQuantKind::kFp8Token: return "fp8_token";
    case ActQuantKind::kFp8Group: return "fp8_group";
    case ActQuantKind::kFp8Tensor: return "fp8_tensor";
    case ActQuantKind::kFp8TensorStatic: return "fp8_tensor_static";
    case ActQuantKind::kMxFp8: return "mxfp8";
    case ActQuantKind::kMxFp4: return "mxfp4";
  }
  return "?";
}

}  // namespace switchyard
