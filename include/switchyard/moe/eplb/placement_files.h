// Placements and loads as JSON, and the placement that a model starts with. Contract 7.2.
//
//   {"physical_to_logical": [[…P numbers…], …L rows…]}    where every physical expert is
//   {"logical_count": [[…E numbers…], …L rows…]}          tokens per expert, summed over all steps
//   {"logical_count": [[[…E…], …L…], …S…]}                the same of every step
//
// Other fields are ignored. The names are those of SGLang's files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/moe/eplb/algorithms.h"
#include "switchyard/moe/eplb/location.h"

namespace switchyard::moe {

// Loads that were recorded.
//
// Shapes: tokens_per_expert f32 [S, L, E].
struct LoadTable {
  size_t num_steps = 0;
  size_t num_layers = 0;
  size_t num_logical = 0;
  std::vector<float> tokens_per_expert;
};

// What a JSON text of the forms above holds; `name` is quoted by errors.
// Errors: kCorruptData naming the text, the byte or the field, and what was expected.
std::vector<int32_t> ParsePlacement(std::string_view json, std::string_view name,
                                    const ExpertLocationSizes& sizes);
LoadTable ParseLoads(std::string_view json, std::string_view name);

// The reverse.
// Shapes: physical_to_logical i32 [L, P]; tokens_per_expert f32 [S, L, E].
// Errors: kInvalidArgument if the sizes contradict the numbers.
std::string FormatPlacement(const ExpertLocationSizes& sizes,
                            std::span<const int32_t> physical_to_logical);
std::string FormatLoads(const LoadTable& loads);

// Writes a text to a file, whole or not at all.
// Errors: kUnavailable naming the file, if it cannot be written.
void WriteTextFile(const std::string& path, std::string_view text);

// The placement that a model starts with (setting init-expert-location): "trivial"; a JSON text
// that starts with "{"; or the path of a file with one. A placement is taken as it is, loads are
// balanced by `policy` (of every step for deepseek_vec, else of their sum).
// Errors: kNotFound naming a file that cannot be read; kCorruptData as ParsePlacement and
//   ParseLoads; kInvalidArgument if sizes do not fit the model or a logical expert has no replica.
ExpertLocation InitialLocation(std::string_view spec, const ExpertLocationSizes& sizes,
                               const EplbPolicy& policy = {}, size_t num_groups = 0);

}  // namespace switchyard::moe
