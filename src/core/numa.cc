#include "switchyard/core/numa.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/affinity.h"
#include "core/numa_topology.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// "0-3,8" of ascending numbers.
std::string NumberList(std::span<const size_t> numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += end - i == 1 ? fmt::format("{}", numbers[i])
                         : fmt::format("{}-{}", numbers[i], numbers[end - 1]);
    i = end;
  }
  return text.empty() ? "none" : text;
}

std::string ByteText(size_t bytes) {
  constexpr double kMiB = 1024.0 * 1024.0, kGiB = 1024.0 * kMiB;
  const auto value = static_cast<double>(bytes);
  return value < kGiB ? fmt::format("{:.1f} MiB", value / kMiB)
                      : fmt::format("{:.1f} GiB", value / kGiB);
}

// Every step-th page of the ranges.
std::vector<void*> PagesOf(std::span<const std::span<const std::byte>> ranges, size_t max_pages) {
  const size_t page = PageBytes();
  const auto first_of = [&](std::span<const std::byte> range) {
    return reinterpret_cast<uintptr_t>(range.data()) / page * page;
  };
  const auto count_of = [&](std::span<const std::byte> range) {
    if (range.empty()) return size_t{0};
    const uintptr_t end = reinterpret_cast<uintptr_t>(range.data()) + range.size();
    return (end - first_of(range) + page - 1) / page;
  };
  size_t total = 0;
  for (const auto range : ranges) total += count_of(range);
  const size_t step = std::max<size_t>(1, (total + max_pages - 1) / std::max<size_t>(1, max_pages));
  std::vector<void*> pages;
  size_t next = 0;  // counted from the start of the range at hand
  for (const auto range : ranges) {
    const size_t count = count_of(range);
    for (; next < count; next += step)
      pages.push_back(reinterpret_cast<void*>(first_of(range) + next * page));
    next -= count;
  }
  return pages;
}

// Asks the kernel for the node, or -error, of each page; false and errno if it does not tell.
bool AskNodes(std::span<void*> pages, int* nodes) {
  constexpr size_t kBatch = 4096;  // the kernel holds a lock meanwhile
  for (size_t at = 0; at < pages.size(); at += kBatch) {
    const size_t count = std::min(kBatch, pages.size() - at);
    if (syscall(SYS_move_pages, 0, count, pages.data() + at, nullptr, nodes + at, 0) != 0)
      return false;
  }
  return true;
}

// With one node a page that has memory has it there.
void AskResidence(std::span<void*> pages, size_t only_node, int* nodes) {
  for (size_t i = 0; i < pages.size(); ++i) {
    unsigned char is_there = 0;
    const bool is_known = mincore(pages[i], 1, &is_there) == 0;
    nodes[i] = is_known && (is_there & 1) != 0 ? static_cast<int>(only_node) : -ENOENT;
  }
}

void CountPage(int node, PagePlacement& placement) {
  if (node < 0) {
    ++placement.num_absent;
    return;
  }
  const auto index = static_cast<size_t>(node);
  if (index >= placement.pages_on_node.size()) placement.pages_on_node.resize(index + 1, 0);
  ++placement.pages_on_node[index];
}

}  // namespace

std::string DescribeNuma(const NumaTopology& topology) {
  const size_t count = topology.nodes.size();
  std::string text = fmt::format("{} NUMA node{} ({}){}\n", count, count == 1 ? "" : "s",
                                 topology.source, topology.is_this_machine ? "" : ", made up");
  for (const NumaNode& node : topology.nodes) {
    text += fmt::format("node {}: CPUs {}, allowed {}; {} cores; {}\n", node.number,
                        NumberList(node.cpus), NumberList(node.allowed), node.num_cores,
                        ByteText(node.bytes));
  }
  if (count == 1) text += "all memory is equally near\n";
  return text;
}

NumaPlacement ChooseNumaPlacement(const NumaTopology& topology, size_t local_rank,
                                  size_t local_size) {
  std::vector<const NumaNode*> usable;
  size_t with_cpus = 0;
  for (const NumaNode& node : topology.nodes) {
    if (!node.cpus.empty()) ++with_cpus;
    if (!node.allowed.empty()) usable.push_back(&node);
  }
  if (local_rank >= local_size || usable.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} on this machine cannot be placed on {} NUMA nodes with "
                            "CPUs that it may use",
                            local_rank, local_size, usable.size()));
  }
  const size_t count = usable.size();
  NumaPlacement placement;
  placement.is_only_node = count == 1;
  placement.was_bound = count == 1 && with_cpus > 1;
  const size_t first = local_rank * count / local_size;
  const size_t last = std::max(first + 1, (local_rank + 1) * count / local_size);
  for (size_t i = first; i < last; ++i) {
    placement.nodes.push_back(usable[i]->number);
    placement.cpus.insert(placement.cpus.end(), usable[i]->allowed.begin(),
                          usable[i]->allowed.end());
  }
  std::ranges::sort(placement.cpus);
  if (placement.was_bound) return placement;  // who else is bound here is not known
  placement.ranks_on_nodes = 0;
  for (size_t rank = 0; rank < local_size; ++rank)
    if (rank * count / local_size == first) ++placement.ranks_on_nodes;
  return placement;
}

std::vector<size_t> BindThisThread(std::span<const size_t> cpus) {
  std::vector<size_t> wanted(cpus.begin(), cpus.end());
  std::ranges::sort(wanted);
  const std::vector<size_t> allowed = AllowedCpus();
  std::vector<size_t> both = Intersection(wanted, allowed);
  if (both.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a thread cannot be bound to the CPUs {}: it may use {}",
                            NumberList(wanted), NumberList(allowed)));
  }
  BindThread(pthread_self(), both);
  return both;
}

NumaWorkers SpreadWorkers(const NumaTopology& topology, const NumaPlacement& placement,
                          size_t num_workers) {
  if (num_workers == 0 || placement.cpus.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} workers cannot be spread over {} CPUs",
                                                         num_workers, placement.cpus.size()));
  }
  NumaWorkers workers;
  size_t num_cpus = 0;  // of the nodes so far
  for (const NumaNode& node : topology.nodes) {
    if (std::ranges::find(placement.nodes, node.number) == placement.nodes.end()) continue;
    num_cpus += node.allowed.size();
    // Of C CPUs and W workers, CPU c has those from c * W / C up to (c + 1) * W / C.
    const size_t end = num_cpus * num_workers / placement.cpus.size();
    if (end == workers.node_of_worker.size()) continue;
    workers.node_of_worker.resize(end, workers.cpus_of_node.size());
    workers.cpus_of_node.push_back(node.allowed);
  }
  return workers;
}

std::unique_ptr<ThreadPool> MakeNumaPool(const NumaTopology& topology,
                                         const NumaPlacement& placement, size_t num_threads) {
  if (placement.nodes.size() == 1) return std::make_unique<ThreadPool>(num_threads);
  const NumaWorkers workers = SpreadWorkers(topology, placement, num_threads);
  auto pool = std::make_unique<ThreadPool>(workers.node_of_worker);
  if (topology.is_this_machine) pool->BindNodes(workers.cpus_of_node);
  return pool;
}

void BindMemory(std::span<std::byte> bytes, std::span<const size_t> nodes) {
  constexpr size_t kMaxNodes = 1024, kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMaxNodes / kWordBits] = {};
  for (size_t node : nodes) {
    if (node < kMaxNodes) mask[node / kWordBits] |= 1ul << node % kWordBits;
  }
  if (nodes.empty() || std::ranges::max(nodes) >= kMaxNodes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("memory cannot be bound to the NUMA nodes {}", NumberList(nodes)));
  }
  const size_t page = PageBytes();
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes.size()) / page * page;
  if (first >= last) return;
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  if (syscall(SYS_mbind, first, last - first, policy, mask, kMaxNodes + 1, MPOL_MF_MOVE) != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} could not be bound to the NUMA nodes {}: {}",
                            ByteText(bytes.size()), NumberList(nodes), std::strerror(errno)));
  }
}

void FirstTouch(ThreadPool& pool, std::span<std::byte> bytes) {
  constexpr size_t kPiece = size_t{2} << 20;  // a big page: one thread makes all of it
  const size_t page = PageBytes();
  const auto touch = [&](size_t at) {
    volatile std::byte& byte = bytes[at];
    const std::byte value = byte;
    byte = value;
  };
  pool.Run((bytes.size() + kPiece - 1) / kPiece, [&](size_t piece, size_t) {
    const size_t end = std::min(bytes.size(), (piece + 1) * kPiece);
    for (size_t at = piece * kPiece; at < end; at += page) touch(at);
    touch(end - 1);  // bytes need not start where a page does
  });
}

double PagePlacement::ShareOn(std::span<const size_t> nodes) const {
  size_t all = 0, here = 0;
  for (size_t node = 0; node < pages_on_node.size(); ++node) {
    all += pages_on_node[node];
    if (std::ranges::find(nodes, node) != nodes.end()) here += pages_on_node[node];
  }
  return all == 0 ? 1.0 : static_cast<double>(here) / static_cast<double>(all);
}

PagePlacement FindPages(std::span<const std::span<const std::byte>> ranges, size_t max_pages) {
  PagePlacement placement;
  for (const auto range : ranges) placement.bytes += range.size();
  std::vector<void*> pages = PagesOf(ranges, max_pages);
  const auto nodes = std::make_unique<int[]>(pages.size());
  if (!AskNodes(pages, nodes.get())) {
    const std::string reason = std::strerror(errno);
    const NumaTopology topology = ReadNodesOfFolder("/sys/devices/system/node", AllowedCpus());
    if (topology.nodes.size() != 1) {
      placement.why_unknown = reason;
      return placement;
    }
    AskResidence(pages, topology.nodes[0].number, nodes.get());
  }
  placement.num_pages = pages.size();
  for (size_t i = 0; i < pages.size(); ++i) CountPage(nodes[i], placement);
  return placement;
}

std::string DescribePages(std::string_view what, const PagePlacement& pages,
                          const NumaPlacement& placement) {
  std::string text = fmt::format("node{} {}: {}: {}", placement.nodes.size() == 1 ? "" : "s",
                                 NumberList(placement.nodes), what, ByteText(pages.bytes));
  if (!pages.why_unknown.empty())
    return text + fmt::format(", the system does not tell where: {}", pages.why_unknown);
  if (pages.num_absent == pages.num_pages) return text + ", not in memory";
  // Rounded down: 100 means that nothing was found elsewhere.
  text += fmt::format(", {} % local", static_cast<int>(pages.ShareOn(placement.nodes) * 100));
  if (placement.is_only_node && !placement.was_bound) text += " (the only node)";
  for (size_t node = 0; node < pages.pages_on_node.size(); ++node) {
    const bool is_here = std::ranges::find(placement.nodes, node) != placement.nodes.end();
    if (is_here || pages.pages_on_node[node] == 0) continue;
    const size_t one[] = {node};
    text += fmt::format(", {:.1f} % on node {}", pages.ShareOn(one) * 100, node);
  }
  if (pages.num_absent != 0) {
    text += fmt::format(", {:.1f} % not in memory", 100.0 * static_cast<double>(pages.num_absent) /
                                                        static_cast<double>(pages.num_pages));
  }
  return text;
}

}  // namespace switchyard
