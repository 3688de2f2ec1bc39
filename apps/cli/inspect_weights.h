// `inspect`: how the weights of each part of a model are stored.
#pragma once

#include <nlohmann/json.hpp>

#include "switchyard/model/model.h"

namespace switchyard::cli {

// {part: [row, …]} for a model that was loaded with look_only. A row is what is stored alike:
// scheme, dtype, format, quantized, block ([rows, cols] of a scale), activations, bits_per_weight,
// elements, bytes, matrices, layers, notes ([{note, matrices, modules}]); of norms and of tensors
// that are not used only scheme, dtype, elements and bytes.
nlohmann::ordered_json DescribeParts(const Model& model);

// Sums over all matrices: elements, bytes, bits_per_weight, quantized_elements, quantized_bytes.
nlohmann::ordered_json DescribeWeights(const Model& model);

// [{name, file, dtype, shape, bytes, role, use}, …]
nlohmann::ordered_json DescribeTensors(const Model& model);

void PrintParts(const nlohmann::ordered_json& parts);
void PrintTensors(const nlohmann::ordered_json& tensors);

}  // namespace switchyard::cli
