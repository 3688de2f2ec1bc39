// The CPUs that a thread may run on.
#pragma once

#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace switchyard {

// Of the calling thread, ascending: what affinity and cgroup leave of the machine.
std::vector<size_t> AllowedCpus();

// Errors: kUnsupported if the system refuses.
void BindThread(std::thread::native_handle_type thread, std::span<const size_t> cpus);

}  // namespace switchyard
