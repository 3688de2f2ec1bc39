// Runner "reference": the oracle of moe/oracle behind the runner interface.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "switchyard/moe/contract/runner.h"

namespace switchyard::moe {

// Tokens as the standard format holds them; ids global, quant_info.expert_mask says which are
// local.
struct ReferenceRunnerInput : RunnerInput {
  static constexpr std::string_view kRunner = "reference";

  ConstRows hidden_states;  // [T, H]
  bool were_codes = false;  // they are what codes stand for, and are not quantised again
  TopKOutput topk_output;

  ReferenceRunnerInput() : RunnerInput{kRunner, kTokenRows} {}
};

// See ReferenceRunnerInput.
struct ReferenceRunnerOutput : RunnerOutput {
  static constexpr std::string_view kRunner = "reference";

  // [T, H] weighted and summed over K; [T * K, H] with no_combine, or, neither weighted nor summed,
  // if the dispatch asked for one row per route (IsRoutewise).
  Rows hidden_states;
  std::span<const int32_t> row_of_slot;  // of routewise rows: [T * K], -1 = skipped

  ReferenceRunnerOutput() : RunnerOutput{kRunner, kTokenRows} {}
};

}  // namespace switchyard::moe
