// Keeping a rank's threads and its memory on the same NUMA node: which nodes there are, which one a
// rank takes, binding, and looking afterwards where the pages really are.
//
// On a machine with one node everything here works and changes nothing. In core, because what
// loads weights binds memory and what prints placement reads it, with and without ranks. CPUs and
// nodes are bound by Linux calls; hwloc, where it is there, tells what nodes there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/core/thread_pool.h"

namespace switchyard {

// One node: memory and the CPUs next to it, by the system's numbers.
struct NumaNode {
  size_t number = 0;
  std::vector<size_t> cpus;     // ascending; none for a node of memory only
  std::vector<size_t> allowed;  // of those, what this process may use (affinity and cgroup)
  size_t num_cores = 0;         // a core may be several CPUs
  size_t bytes = 0;             // of its memory
};

// The nodes of a machine; at least one.
struct NumaTopology {
  std::vector<NumaNode> nodes;  // ascending in number
  std::string source;           // "hwloc 2.9.0", "/sys"
  bool is_this_machine = true;  // false for a made-up one, to which nothing can be bound
};

// The machine that this runs on, and what the calling thread may use of it.
// With hwloc the environment variable HWLOC_SYNTHETIC puts another machine in its place.
NumaTopology ReadNumaTopology();

// A machine from hwloc's description, such as "pack:2 numa:2 core:4 pu:1".
// Errors: kInvalidArgument if hwloc does not understand it; kUnsupported without hwloc.
NumaTopology MakeUpNumaTopology(const std::string& description);

// "2 NUMA nodes (hwloc 2.9.0)", and a line for each: CPUs, those allowed, cores, memory.
std::string DescribeNuma(const NumaTopology& topology);

// Where a rank is to run.
struct NumaPlacement {
  std::vector<size_t> nodes;  // numbers: one, or several if there are more nodes than ranks
  std::vector<size_t> cpus;   // allowed ones of these nodes
  size_t ranks_on_nodes = 1;  // ranks that share them, as far as this one can tell
  bool was_bound = false;     // somebody (mpirun) had bound the rank to one of several nodes
  bool is_only_node = false;  // there is no other that this process may use
};

// Rank i of the n on this machine takes, of N nodes with allowed CPUs, node i * N / n; with more
// nodes than ranks those up to (i + 1) * N / n, so that no node idles. A rank that may use one node
// only keeps it, whatever its number.
// Errors: kInvalidArgument if local_rank is not below local_size, or no CPU is allowed.
NumaPlacement ChooseNumaPlacement(const NumaTopology& topology, size_t local_rank,
                                  size_t local_size);

// Lets the calling thread run on `cpus` only, as far as it may run there now: affinity only
// shrinks. Threads that it makes inherit that, so bind before making a pool; ThreadPool::BindTo is
// for a pool that is there. Returns the CPUs that are left.
// Errors: as ThreadPool::BindTo.
std::vector<size_t> BindThisThread(std::span<const size_t> cpus);

// The workers of a pool on several nodes, each of which gets as many as its share of the CPUs.
struct NumaWorkers {
  std::vector<size_t> node_of_worker;             // ascending, numbered from 0 without gaps
  std::vector<std::vector<size_t>> cpus_of_node;  // allowed ones, of the nodes that have workers
};
// Errors: kInvalidArgument if num_workers is 0 or the placement has no CPUs.
NumaWorkers SpreadWorkers(const NumaTopology& topology, const NumaPlacement& placement,
                          size_t num_workers);

// A pool whose workers are spread so and bound to their nodes, the calling thread among them, which
// hands that down to the threads that it makes. With one node, or on a made-up machine, nothing is
// bound.
// Errors: those of ThreadPool and its BindTo.
std::unique_ptr<ThreadPool> MakeNumaPool(const NumaTopology& topology,
                                         const NumaPlacement& placement, size_t num_threads);

// From now on the whole pages of `bytes` come from `nodes` (one is preferred, several take turns);
// pages that are there already are moved. For anonymous memory.
// Errors: kInvalidArgument if there are no nodes; kUnsupported with the system's words where it
//   refuses (unknown node, or a container without the right to).
void BindMemory(std::span<std::byte> bytes, std::span<const size_t> nodes);

// Gives every page of `bytes` memory on the node of the thread that touches it, in parallel:
// contents stay as they are.
void FirstTouch(ThreadPool& pool, std::span<std::byte> bytes);

// Where the pages of some memory are.
struct PagePlacement {
  size_t bytes = 0;                   // that were asked about
  size_t num_pages = 0;               // that were looked at
  std::vector<size_t> pages_on_node;  // by the node's number
  size_t num_absent = 0;              // have no memory yet, or are not in this process's tables
  std::string why_unknown;            // what the system said if it did not tell

  // Of the pages that have memory, the share on these nodes: 0 to 1; 1 if none has.
  double ShareOn(std::span<const size_t> nodes) const;
};

// Looks where pages are, without touching them: all of them, or max_pages evenly spread.
// Cost: about 0.1 us per page.
PagePlacement FindPages(std::span<const std::span<const std::byte>> ranges,
                        size_t max_pages = size_t{1} << 16);

// "node 1: experts 32-63: 12.1 GiB, 100 % local"; with what is absent, elsewhere or unknown.
std::string DescribePages(std::string_view what, const PagePlacement& pages,
                          const NumaPlacement& placement);

}  // namespace switchyard
