#include "core/numa_topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "core/affinity.h"
#include "switchyard/core/error.h"

#if SY_WITH_HWLOC
#include <hwloc.h>
#endif

namespace switchyard {
namespace {

std::string FirstLine(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "Node 0 MemTotal:  4030 kB" of a node's meminfo.
size_t NodeBytes(const std::filesystem::path& meminfo) {
  std::ifstream file(meminfo);
  std::string word;
  size_t kib = 0;
  while (file >> word)
    if (word == "MemTotal:" && file >> kib) return kib * 1024;
  return 0;
}

#if SY_WITH_HWLOC

using Topology = std::unique_ptr<hwloc_topology, void (*)(hwloc_topology_t)>;

// Null if hwloc cannot tell, or does not understand the description.
Topology LoadTopology(const char* description) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return Topology(nullptr, hwloc_topology_destroy);
  Topology owner(topology, hwloc_topology_destroy);
  if ((description != nullptr && hwloc_topology_set_synthetic(topology, description) != 0) ||
      hwloc_topology_load(topology) != 0)
    owner.reset();
  return owner;
}

std::vector<size_t> NumbersOf(hwloc_const_cpuset_t set) {
  std::vector<size_t> numbers;
  for (int i = hwloc_bitmap_first(set); i >= 0; i = hwloc_bitmap_next(set, i))
    numbers.push_back(static_cast<size_t>(i));
  return numbers;
}

NumaTopology NodesOf(hwloc_topology_t topology) {
  NumaTopology nodes;
  const unsigned version = hwloc_get_api_version();
  nodes.source = fmt::format("hwloc {}.{}.{}", version >> 16, version >> 8 & 0xff, version & 0xff);
  nodes.is_this_machine = hwloc_topology_is_thissystem(topology) != 0;
  const std::vector<size_t> mine = AllowedCpus();
  const std::vector<size_t> allowed = NumbersOf(hwloc_topology_get_allowed_cpuset(topology));
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, object)) != nullptr) {
    NumaNode& node = nodes.nodes.emplace_back();
    node.number = object->os_index;
    node.cpus = NumbersOf(object->cpuset);
    node.allowed = Intersection(node.cpus, allowed);
    if (nodes.is_this_machine) node.allowed = Intersection(node.allowed, mine);
    const int cores =
        hwloc_get_nbobjs_inside_cpuset_by_type(topology, object->cpuset, HWLOC_OBJ_CORE);
    node.num_cores = cores > 0 ? static_cast<size_t>(cores) : 0;
    node.bytes = object->attr->numanode.local_memory;
  }
  std::ranges::sort(nodes.nodes, {}, &NumaNode::number);
  return nodes;
}

#endif

}  // namespace

std::vector<size_t> Intersection(std::span<const size_t> cpus, std::span<const size_t> allowed) {
  std::vector<size_t> both;
  std::ranges::set_intersection(cpus, allowed, std::back_inserter(both));
  return both;
}

std::vector<size_t> ParseNumberList(std::string_view text) {
  constexpr size_t kMost = size_t{1} << 16;  // CPUs; against a file that is none
  std::vector<size_t> numbers;
  const char* next = text.data();
  const char* const end = text.data() + text.size();
  while (next != end) {
    size_t first = 0;
    auto [stop, error] = std::from_chars(next, end, first);
    if (error != std::errc()) break;
    size_t last = first;
    if (stop != end && *stop == '-') {
      const auto range = std::from_chars(stop + 1, end, last);
      if (range.ec != std::errc()) break;
      stop = range.ptr;
    }
    for (size_t i = first; i <= last && i < kMost; ++i) numbers.push_back(i);
    if (stop == end || *stop != ',') break;
    next = stop + 1;
  }
  return numbers;
}

NumaTopology ReadNodesOfFolder(const std::filesystem::path& folder,
                               std::span<const size_t> allowed_cpus) {
  NumaTopology topology;
  topology.source = "/sys";
  for (size_t number : ParseNumberList(FirstLine(folder / "online"))) {
    const std::filesystem::path path = folder / fmt::format("node{}", number);
    NumaNode& node = topology.nodes.emplace_back();
    node.number = number;
    node.cpus = ParseNumberList(FirstLine(path / "cpulist"));
    node.allowed = Intersection(node.cpus, allowed_cpus);
    node.num_cores = node.cpus.size();  // /sys tells cores elsewhere; nobody counts on them
    node.bytes = NodeBytes(path / "meminfo");
  }
  if (topology.nodes.empty()) {
    NumaNode& node = topology.nodes.emplace_back();
    node.cpus.assign(allowed_cpus.begin(), allowed_cpus.end());
    node.allowed = node.cpus;
    node.num_cores = node.cpus.size();
  }
  return topology;
}

NumaTopology ReadNumaTopology() {
#if SY_WITH_HWLOC
  if (const Topology topology = LoadTopology(nullptr)) {
    NumaTopology nodes = NodesOf(topology.get());
    if (!nodes.nodes.empty()) return nodes;
  }
#endif
  return ReadNodesOfFolder("/sys/devices/system/node", AllowedCpus());
}

NumaTopology MakeUpNumaTopology(const std::string& description) {
#if SY_WITH_HWLOC
  const Topology topology = LoadTopology(description.c_str());
  if (!topology) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("hwloc does not understand the machine \"{}\"", description));
  }
  return NodesOf(topology.get());
#else
  throw Error(ErrorCode::kUnsupported,
              fmt::format("this build has no hwloc to make up the machine \"{}\"", description));
#endif
}

}  // namespace switchyard
