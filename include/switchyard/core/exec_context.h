// What a computation may use: threads and scratch memory.
#pragma once

#include "switchyard/core/arena.h"
#include "switchyard/core/profile.h"
#include "switchyard/core/thread_pool.h"

namespace switchyard {

// Passed down every call of a forward pass; owned by the engine. One forward pass at a time uses
// one context.
struct ExecContext {
  ThreadPool& pool;
  Arena& arena;
  Profile* profile = nullptr;  // null: no times are taken
};

}  // namespace switchyard
