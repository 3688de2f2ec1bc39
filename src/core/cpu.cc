#include "switchyard/core/cpu.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <sstream>
#include <thread>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// Highway targets of one level; a cap at a level allows it and everything below.
constexpr int64_t kScalarTargets = HWY_EMU128 | HWY_SCALAR;
constexpr int64_t kAvx2Targets = HWY_AVX2;
constexpr int64_t kAvx512Targets = HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR;

int64_t TargetsUpTo(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return kScalarTargets;
    case Isa::kAvx2: return kScalarTargets | kAvx2Targets;
    case Isa::kAvx512: return kScalarTargets | kAvx2Targets | kAvx512Targets;
  }
  return kScalarTargets;
}

Isa LevelOf(int64_t target) {
  if (target & kAvx512Targets) return Isa::kAvx512;
  if (target & kAvx2Targets) return Isa::kAvx2;
  return Isa::kScalar;
}

// Targets are single bits and a better one is a lower bit.
int64_t BestOf(int64_t targets) { return targets & -targets; }

// What the CPU has, whatever the cap.
int64_t CpuTargets() {
  hwy::DisableTargets(0);
  return hwy::SupportedTargets() & HWY_TARGETS;
}

int64_t& CapMask() {
  static int64_t mask = 0;  // 0: no cap
  return mask;
}

int64_t AllowedTargets() {
  static const int64_t cpu = CpuTargets();
  return CapMask() == 0 ? cpu : cpu & CapMask();
}

std::vector<std::string> TargetNames(int64_t targets) {
  std::vector<std::string> names;
  for (; targets != 0; targets &= targets - 1) names.emplace_back(hwy::TargetName(BestOf(targets)));
  return names;
}

std::string FirstLineValue(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(key)) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos) return line.substr(std::min(line.size(), colon + 2));
    }
  }
  return {};
}

// cpu.max of cgroup v2 ("150000 100000"), or the two files of v1; 0 = no limit.
double CgroupQuota() {
  const auto ratio = [](double quota, double period) {
    return quota > 0 && period > 0 ? quota / period : 0.0;
  };
  if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file) {
    double quota = 0;
    double period = 0;
    if (file >> quota >> period) return ratio(quota, period);
    return 0;
  }
  double quota = 0;
  double period = 0;
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period) return ratio(quota, period);
  return 0;
}

size_t AffinityCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
  return static_cast<size_t>(CPU_COUNT(&set));
}

size_t CacheBytes(int name) {
  const long value = sysconf(name);
  return value > 0 ? static_cast<size_t>(value) : 0;
}

size_t CountNumaNodes() {
  size_t nodes = 0;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/sys/devices/system/node", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.size() > 4 && name.starts_with("node") &&
        name.find_first_not_of("0123456789", 4) == std::string::npos)
      ++nodes;
  }
  return std::max<size_t>(nodes, 1);
}

}  // namespace

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "?";
}

std::vector<Isa> SupportedIsas() {
  static const int64_t cpu = AllowedTargets();
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    const int64_t of_level = isa == Isa::kScalar ? kScalarTargets
                             : isa == Isa::kAvx2 ? kAvx2Targets
                                                 : kAvx512Targets;
    if (cpu & of_level) isas.push_back(isa);
  }
  return isas;
}

void CapIsa(Isa isa) {
  const std::vector<Isa> supported = SupportedIsas();
  if (std::find(supported.begin(), supported.end(), isa) == supported.end()) {
    std::vector<std::string_view> names;
    for (Isa known : supported) names.push_back(IsaName(known));
    throw Error(ErrorCode::kUnsupported,
                fmt::format("this CPU and build have no instruction set \"{}\"; there are: {}",
                            IsaName(isa), fmt::join(names, ", ")));
  }
  CapMask() = TargetsUpTo(isa);
  hwy::DisableTargets(~TargetsUpTo(isa));
  hwy::GetChosenTarget().DeInit();  // the next call of a kernel chooses anew
}

void UncapIsa() {
  CapMask() = 0;
  hwy::DisableTargets(0);
  hwy::GetChosenTarget().DeInit();
}

Isa CurrentIsa() { return LevelOf(BestOf(AllowedTargets())); }

bool HasNativeBF16() { return (BestOf(AllowedTargets()) & (HWY_AVX3_ZEN4 | HWY_AVX3_SPR)) != 0; }

size_t AvailableCpus() {
  size_t cpus = std::max<size_t>(1, std::thread::hardware_concurrency());
  if (const size_t affinity = AffinityCpus(); affinity != 0) cpus = std::min(cpus, affinity);
  if (const double quota = CgroupQuota(); quota > 0) {
    cpus = std::min(cpus, std::max<size_t>(1, static_cast<size_t>(std::floor(quota))));
  }
  return cpus;
}

CpuInfo GetCpuInfo() {
  CpuInfo info;
  info.model = FirstLineValue("/proc/cpuinfo", "model name");
  info.online_cpus = std::thread::hardware_concurrency();
  info.cgroup_quota = CgroupQuota();
  info.affinity_cpus = AffinityCpus();
  info.l1d_bytes = CacheBytes(_SC_LEVEL1_DCACHE_SIZE);
  info.l2_bytes = CacheBytes(_SC_LEVEL2_CACHE_SIZE);
  info.l3_bytes = CacheBytes(_SC_LEVEL3_CACHE_SIZE);
  info.numa_nodes = CountNumaNodes();
  info.targets_compiled = TargetNames(HWY_TARGETS);
  info.target_chosen = hwy::TargetName(BestOf(AllowedTargets()));
  const int64_t cap = CapMask();
  CapMask() = 0;
  info.targets_supported = TargetNames(AllowedTargets());
  CapMask() = cap;
  return info;
}

}  // namespace switchyard
