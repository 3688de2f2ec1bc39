// How often this program has asked for memory.
#pragma once

#include <cstddef>

namespace switchyard::cli {

// Calls of operator new so far, by all threads.
size_t NumAllocations();

}  // namespace switchyard::cli
