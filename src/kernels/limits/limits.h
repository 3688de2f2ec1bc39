// What this machine can do at most, measured on the spot: the yardstick of `switchyard bench`.
#pragma once

#include "switchyard/core/thread_pool.h"

namespace switchyard::kernels {

struct MachineLimits {
  double read_gbps =
      0;  // streaming reads from memory in 2 MiB pages, GB/s (1e9 bytes), all threads of the pool
  double f32_gops = 0;   // f32 multiply-adds, 2 operations each, 1e9 per second
  double bf16_gops = 0;  // bf16 pair products; 0 where the CPU (or --isa) has none in hardware
  double int8_gops = 0;  // u8 x s8 dots of four; 0 where the CPU (or --isa) has none in hardware
};

// Best of several short runs each, about a second in all, with the instruction set in force. Needs
// 1 GiB of memory for a moment (less, if less is available). Source of the method:
// shared/bench/limits.cpp (time on the workers, best of N).
MachineLimits MeasureLimits(ThreadPool& pool);

}  // namespace switchyard::kernels
