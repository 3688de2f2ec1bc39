#include "core/affinity.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <cstring>

#include "switchyard/core/error.h"

namespace switchyard {

std::vector<size_t> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<size_t> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

void BindThread(std::thread::native_handle_type thread, std::span<const size_t> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (size_t cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (const int error = pthread_setaffinity_np(thread, sizeof set, &set); error != 0) {
    throw Error(ErrorCode::kUnsupported, fmt::format("a thread could not be bound to {} CPUs: {}",
                                                     cpus.size(), std::strerror(error)));
  }
}

}  // namespace switchyard
