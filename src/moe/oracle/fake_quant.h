// Activation quantisation as the oracle sees it: values to codes and back.
#pragma once

#include <vector>

#include "switchyard/core/quant_format.h"

namespace switchyard::moe {

// Replaces every value by what its code stands for. Scales are computed in f32, as a kernel would;
// written apart from the kernels, so that the two check each other. Empty rows are no rows.
void FakeQuantize(const ActQuant& how, std::vector<std::vector<double>>& rows);

}  // namespace switchyard::moe
