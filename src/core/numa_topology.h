// Reading NUMA nodes from /sys, where there is no hwloc.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>
#include <vector>

#include "switchyard/core/numa.h"

namespace switchyard {

// The kernel's lists of numbers, "0-3,8": ascending. What is no list ends it.
std::vector<size_t> ParseNumberList(std::string_view text);

// The nodes under a folder such as /sys/devices/system/node; one with all CPUs if there are none.
NumaTopology ReadNodesOfFolder(const std::filesystem::path& folder,
                               std::span<const size_t> allowed_cpus);

// The CPUs of `cpus` that are in `allowed`, both ascending.
std::vector<size_t> Intersection(std::span<const size_t> cpus, std::span<const size_t> allowed);

}  // namespace switchyard
