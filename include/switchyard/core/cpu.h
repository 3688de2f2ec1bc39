// What this CPU is, what this build can use of it, and the cap that a user sets on it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// The levels a user can cap dispatch to. avx512 takes VNNI and bf16 where the CPU has them.
enum class Isa { kScalar, kAvx2, kAvx512 };

// The spelling of --isa: "scalar", "avx2" or "avx512".
std::string_view IsaName(Isa isa);

// Levels that this CPU supports and this build contains, lowest first. Never empty.
std::vector<Isa> SupportedIsas();

// Caps the dispatch of every kernel in the process. Not to be called while kernels run.
// Errors: kUnsupported naming the levels there are, if the CPU or build lacks `isa`.
void CapIsa(Isa isa);
// Lifts the cap.
void UncapIsa();
// The level in force.
Isa CurrentIsa();

// True if the kernels in force multiply bf16 pairs in hardware (AVX512_BF16): then bf16 activations
// are faster than f32.
bool HasNativeBF16();

// Number of threads that make sense: the smallest of the affinity mask, the cgroup quota (rounded
// down, at least 1) and the CPUs that are online.
size_t AvailableCpus();

// What the system tells of the CPU; 0 or empty where it does not.
struct CpuInfo {
  std::string model;  // "AMD EPYC ...", empty if the system does not tell
  size_t online_cpus = 0;
  double cgroup_quota = 0;  // CPUs; 0 = unlimited
  size_t affinity_cpus = 0;
  size_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;
  size_t numa_nodes = 1;
  std::vector<std::string> targets_compiled;   // Highway's names, best first
  std::vector<std::string> targets_supported;  // of those, what the CPU can run
  std::string target_chosen;                   // what kernels use now
};
// Reads it now. Cheap, but not for hot paths: it opens files of /proc and /sys.
CpuInfo GetCpuInfo();

}  // namespace switchyard
