// Columns of a tensor-parallel group put side by side: what GGUF layers need, whose matrices are
// all split on their output axis. Contract 5.7.
#pragma once

#include <functional>

#include "switchyard/core/exec_context.h"
#include "switchyard/core/rows.h"

namespace switchyard::moe::ascend {

// From this rank's columns [M, N / R] to those of all ranks in rank order [M, N], in the arena.
// Every rank of the group calls it with the same M. An empty function is a group of one rank: the
// identity.
using GatherColumns = std::function<Rows(ExecContext& context, ConstRows columns)>;

}  // namespace switchyard::moe::ascend
