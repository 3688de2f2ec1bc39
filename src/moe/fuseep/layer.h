// What FuseEP knows about one layer.
#pragma once

#include <chrono>

#include "moe/fuseep/window.h"
#include "switchyard/core/dtype.h"
#include "switchyard/moe/contract/config.h"
#include "switchyard/moe/fuseep/fused_moe.h"

namespace switchyard::moe::fuseep {

// Fixed when the layer is built.
struct Layer {
  MoeRunnerConfig config;
  int mode;
  std::chrono::milliseconds timeout;
  Names names;
  DType row_dtype;      // of rows that travel
  bool rows_are_codes;  // they have scales
};

}  // namespace switchyard::moe::fuseep
