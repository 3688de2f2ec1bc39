// `bench --ep`: what exchanging rows between ranks costs, beside the least that it could cost.
#pragma once

#include <cstddef>
#include <string>

#include "switchyard/core/settings.h"

namespace switchyard::cli {

// What the command line says.
struct EpBenchOptions {
  std::string shape;    // NAME[:SCHEME], or empty
  std::string tokens;   // of each rank, "1,16,128"
  size_t repeats = 20;  // of each figure, at least
  bool json = false;
};

// Measures on all ranks that mpirun has started, or on one; rank 0 prints the table.
// Errors: kInvalidArgument, kNotFound, kUnsupported, naming the option.
int RunEpBench(const EpBenchOptions& options, const Settings& settings);

}  // namespace switchyard::cli
