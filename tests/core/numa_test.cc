// Which NUMA node a rank takes, on made-up machines; binding and looking, on this one.
#include "switchyard/core/numa.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/affinity.h"
#include "core/numa_topology.h"
#include "switchyard/core/memory.h"
#include "testing/errors.h"

namespace switchyard {
namespace {

using testing::ExpectError;
using Numbers = std::vector<size_t>;

// Nodes of four CPUs each, all allowed.
NumaTopology Machine(size_t num_nodes) {
  NumaTopology topology;
  for (size_t n = 0; n < num_nodes; ++n) {
    NumaNode& node = topology.nodes.emplace_back();
    node.number = n;
    node.cpus = {4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3};
    node.allowed = node.cpus;
    node.num_cores = 2;
    node.bytes = size_t{3} << 30;
  }
  return topology;
}

Numbers NodesOfRanks(const NumaTopology& topology, size_t num_ranks) {
  Numbers nodes;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const NumaPlacement placement = ChooseNumaPlacement(topology, rank, num_ranks);
    nodes.insert(nodes.end(), placement.nodes.begin(), placement.nodes.end());
  }
  return nodes;
}

// ---- the choice

TEST(NumaChoice, RanksSpreadOverTheNodes) {
  EXPECT_EQ(NodesOfRanks(Machine(2), 2), (Numbers{0, 1}));
  EXPECT_EQ(NodesOfRanks(Machine(2), 4), (Numbers{0, 0, 1, 1}));
  EXPECT_EQ(NodesOfRanks(Machine(2), 3), (Numbers{0, 0, 1}));
  EXPECT_EQ(NodesOfRanks(Machine(4), 4), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(NodesOfRanks(Machine(1), 3), (Numbers{0, 0, 0}));
  EXPECT_EQ(NodesOfRanks(Machine(4), 1), (Numbers{0, 1, 2, 3})) << "no node idles";
  EXPECT_EQ(NodesOfRanks(Machine(4), 3), (Numbers{0, 1, 2, 3}));
}

TEST(NumaChoice, SaysWhatTheRankMayUseAndWithWhom) {
  const NumaPlacement second = ChooseNumaPlacement(Machine(2), 1, 2);
  EXPECT_EQ(second.cpus, (Numbers{4, 5, 6, 7}));
  EXPECT_EQ(second.ranks_on_nodes, 1u);
  EXPECT_FALSE(second.was_bound);
  EXPECT_FALSE(second.is_only_node);
  EXPECT_EQ(ChooseNumaPlacement(Machine(2), 0, 3).ranks_on_nodes, 2u);
  const NumaPlacement alone = ChooseNumaPlacement(Machine(1), 1, 2);
  EXPECT_TRUE(alone.is_only_node);
  EXPECT_FALSE(alone.was_bound) << "there was nothing to choose";
  EXPECT_EQ(alone.ranks_on_nodes, 2u);
}

TEST(NumaChoice, ABoundRankKeepsItsNode) {
  NumaTopology topology = Machine(2);
  topology.nodes[0].allowed.clear();
  topology.nodes[1].allowed = {5, 6};
  const NumaPlacement placement = ChooseNumaPlacement(topology, 0, 4);
  EXPECT_EQ(placement.nodes, (Numbers{1}));
  EXPECT_EQ(placement.cpus, (Numbers{5, 6}));
  EXPECT_TRUE(placement.was_bound);
}

TEST(NumaChoice, NodesOutOfBoundsAndNodesOfMemoryOnlyAreLeftOut) {
  NumaTopology topology = Machine(4);
  topology.nodes[0].allowed.clear();  // a cgroup
  topology.nodes[2].cpus.clear();     // memory only
  topology.nodes[2].allowed.clear();
  EXPECT_EQ(NodesOfRanks(topology, 2), (Numbers{1, 3}));
  ExpectError(ErrorCode::kInvalidArgument, {"rank 2 of 2"},
              [] { ChooseNumaPlacement(Machine(2), 2, 2); });
  topology.nodes = {topology.nodes[0]};
  ExpectError(ErrorCode::kInvalidArgument, {"0 NUMA nodes"},
              [&] { ChooseNumaPlacement(topology, 0, 1); });
}

// ---- workers of one process

TEST(NumaWorkers, SpreadAsCpusDo) {
  const auto spread = [](const NumaTopology& topology, size_t num_workers) {
    return SpreadWorkers(topology, ChooseNumaPlacement(topology, 0, 1), num_workers);
  };
  EXPECT_EQ(spread(Machine(1), 3).node_of_worker, (Numbers{0, 0, 0}));
  EXPECT_EQ(spread(Machine(2), 4).node_of_worker, (Numbers{0, 0, 1, 1}));
  EXPECT_EQ(spread(Machine(2), 5).node_of_worker, (Numbers{0, 0, 1, 1, 1}));
  EXPECT_EQ(spread(Machine(4), 4).node_of_worker, (Numbers{0, 1, 2, 3}));
  const NumaWorkers few = spread(Machine(4), 2);
  EXPECT_EQ(few.node_of_worker, (Numbers{0, 1})) << "nodes without workers are left out";
  EXPECT_EQ(few.cpus_of_node, (std::vector<Numbers>{{4, 5, 6, 7}, {12, 13, 14, 15}}));
  EXPECT_EQ(spread(Machine(2), 1).cpus_of_node.size(), 1u);
  NumaTopology uneven = Machine(3);
  uneven.nodes[0].allowed = {3};
  uneven.nodes[1].allowed.clear();
  uneven.nodes[2].allowed = {8, 9, 10};
  const NumaWorkers workers = spread(uneven, 8);
  EXPECT_EQ(workers.node_of_worker, (Numbers{0, 0, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(workers.cpus_of_node, (std::vector<Numbers>{{3}, {8, 9, 10}}));
  ExpectError(ErrorCode::kInvalidArgument, {"0 workers"}, [&] { spread(Machine(2), 0); });
}

TEST(NumaWorkers, APoolOnAMadeUpMachineIsNotBound) {
  NumaTopology topology = Machine(2);
  topology.is_this_machine = false;
  const Numbers before = AllowedCpus();
  const auto pool = MakeNumaPool(topology, ChooseNumaPlacement(topology, 0, 1), 3);
  EXPECT_EQ(pool->num_threads(), 3u);
  EXPECT_EQ(pool->num_nodes(), 2u);
  EXPECT_EQ(AllowedCpus(), before);
  EXPECT_EQ(MakeNumaPool(Machine(1), ChooseNumaPlacement(Machine(1), 0, 1), 3)->num_nodes(), 1u);
}

// Nodes of one CPU each, cut from this machine.
TEST(NumaWorkers, APoolIsBoundToItsNodes) {
  std::thread([] {
    const Numbers cpus = AllowedCpus();
    if (cpus.size() < 2) GTEST_SKIP() << "one CPU is no two nodes";
    NumaTopology topology = Machine(2);
    for (size_t n : {0u, 1u}) topology.nodes[n].cpus = topology.nodes[n].allowed = {cpus[n]};
    const auto pool = MakeNumaPool(topology, ChooseNumaPlacement(topology, 0, 1), 2);
    std::vector<Numbers> seen(2);
    pool->RunOnNodes(
        Numbers{1, 1}, [&](size_t task, size_t) { seen[task] = AllowedCpus(); }, NodeHelp::kNo);
    EXPECT_EQ(seen, (std::vector<Numbers>{{cpus[0]}, {cpus[1]}}));
  }).join();
}

TEST(NumaTopologies, HwlocMakesUpMachines) {
  try {
    const NumaTopology topology = MakeUpNumaTopology("pack:2 numa:2 core:3 pu:2");
    ASSERT_EQ(topology.nodes.size(), 4u);
    EXPECT_FALSE(topology.is_this_machine);
    EXPECT_EQ(topology.nodes[3].number, 3u);
    EXPECT_EQ(topology.nodes[3].cpus, (Numbers{18, 19, 20, 21, 22, 23}));
    EXPECT_EQ(topology.nodes[3].allowed, topology.nodes[3].cpus);
    EXPECT_EQ(topology.nodes[3].num_cores, 3u);
    EXPECT_EQ(NodesOfRanks(topology, 8), (Numbers{0, 0, 1, 1, 2, 2, 3, 3}));
    ExpectError(ErrorCode::kInvalidArgument, {"\"nonsense:x\""},
                [] { MakeUpNumaTopology("nonsense:x"); });
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
    GTEST_SKIP() << error.message();
  }
}

TEST(NumaTopologies, SysIsReadWithoutHwloc) {
  EXPECT_EQ(ParseNumberList("0-2,5,7-8\n"), (Numbers{0, 1, 2, 5, 7, 8}));
  EXPECT_EQ(ParseNumberList(""), Numbers{});
  EXPECT_EQ(ParseNumberList("3,x"), (Numbers{3}));
  EXPECT_EQ(ParseNumberList("5-"), Numbers{});
  const auto folder = std::filesystem::temp_directory_path() / "switchyard_numa_test";
  const auto write = [&](const std::string& name, std::string_view text) {
    std::filesystem::create_directories((folder / name).parent_path());
    std::ofstream(folder / name) << text;
  };
  write("online", "0,2\n");
  write("node0/cpulist", "0-1\n");
  write("node0/meminfo", "Node 0 MemTotal:       2048 kB\nNode 0 MemFree: 1 kB\n");
  write("node2/cpulist", "2-3\n");
  const NumaTopology topology = ReadNodesOfFolder(folder, Numbers{1, 2, 3});
  std::filesystem::remove_all(folder);
  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].cpus, (Numbers{0, 1}));
  EXPECT_EQ(topology.nodes[0].allowed, (Numbers{1}));
  EXPECT_EQ(topology.nodes[0].bytes, size_t{2048} * 1024);
  EXPECT_EQ(topology.nodes[1].number, 2u);
  EXPECT_EQ(topology.nodes[1].allowed, (Numbers{2, 3}));
  const NumaTopology none = ReadNodesOfFolder(folder, Numbers{4});
  ASSERT_EQ(none.nodes.size(), 1u);
  EXPECT_EQ(none.nodes[0].allowed, (Numbers{4}));
}

TEST(NumaTopologies, AreDescribed) {
  const std::string two = DescribeNuma(Machine(2));
  EXPECT_NE(two.find("2 NUMA nodes"), std::string::npos) << two;
  EXPECT_NE(two.find("node 1: CPUs 4-7, allowed 4-7; 2 cores; 3.0 GiB"), std::string::npos) << two;
  EXPECT_NE(DescribeNuma(Machine(1)).find("equally near"), std::string::npos);
}

// ---- this machine

TEST(NumaHere, TheMachineHasNodesWithAllowedCpus) {
  const NumaTopology topology = ReadNumaTopology();
  ASSERT_FALSE(topology.nodes.empty());
  Numbers allowed;
  for (const NumaNode& node : topology.nodes)
    allowed.insert(allowed.end(), node.allowed.begin(), node.allowed.end());
  std::ranges::sort(allowed);
  if (topology.is_this_machine) {  // HWLOC_SYNTHETIC is not set
    EXPECT_EQ(allowed, AllowedCpus());
  }
  EXPECT_NO_THROW(ChooseNumaPlacement(topology, 0, 1));
}

TEST(NumaHere, AffinityShrinksAndThreadsInheritIt) {
  std::thread([] {
    const Numbers before = AllowedCpus();
    ASSERT_FALSE(before.empty());
    const Numbers wanted = {before.back(), 100000};
    EXPECT_EQ(BindThisThread(wanted), (Numbers{before.back()}));
    EXPECT_EQ(AllowedCpus(), (Numbers{before.back()}));
    std::thread([&] { EXPECT_EQ(AllowedCpus(), (Numbers{before.back()})); }).join();
    ExpectError(ErrorCode::kInvalidArgument, {"100000"}, [] { BindThisThread(Numbers{100000}); });
    if (before.size() > 1) {
      ExpectError(ErrorCode::kInvalidArgument, {"cannot be bound"},
                  [&] { BindThisThread(Numbers{before.front()}); });
    }
  }).join();
}

TEST(NumaHere, APoolIsBoundAsAWhole) {
  std::thread([] {
    ThreadPool pool(3);
    const Numbers one = {AllowedCpus().front()};
    pool.BindTo(one);
    std::atomic<size_t> bound{0};
    pool.Run(64, [&](size_t, size_t) { bound += AllowedCpus() == one ? 1 : 0; });
    EXPECT_EQ(bound.load(), 64u);
  }).join();
}

TEST(NumaHere, PagesAreFoundWhereTheyWereTouched) {
  const NumaTopology topology = ReadNumaTopology();
  const NumaPlacement placement = ChooseNumaPlacement(topology, 0, 1);
  ThreadPool pool(2);
  constexpr size_t kBytes = size_t{9} << 20;
  MappedMemory memory(kBytes, "numa test");
  const std::span<std::byte> bytes(memory.data(), kBytes);
  const std::span<const std::byte> ranges[] = {bytes};
  const PagePlacement before = FindPages(ranges);
  ASSERT_EQ(before.why_unknown, "");
  EXPECT_EQ(before.num_absent, before.num_pages) << "looking touches nothing";
  EXPECT_NE(DescribePages("x", before, placement).find("not in memory"), std::string::npos);
  bytes[5] = std::byte{7};
  FirstTouch(pool, bytes);
  EXPECT_EQ(bytes[5], std::byte{7});
  const PagePlacement after = FindPages(ranges);
  EXPECT_EQ(after.bytes, kBytes);
  EXPECT_EQ(after.num_absent, 0u);
  EXPECT_EQ(after.ShareOn(placement.nodes), 1.0) << "all nodes are this rank's";
  const PagePlacement some = FindPages(ranges, 100);
  EXPECT_LE(some.num_pages, 100u);
  EXPECT_GT(some.num_pages, 50u);
  const std::string text = DescribePages("experts 0-3", after, placement);
  EXPECT_NE(text.find("experts 0-3: 9.0 MiB, 100 % local"), std::string::npos) << text;
  EXPECT_EQ(text.find("the only node") != std::string::npos, topology.nodes.size() == 1) << text;
}

TEST(NumaHere, MemoryIsBoundWhereTheSystemLetsUs) {
  const NumaTopology topology = ReadNumaTopology();
  MappedMemory memory(size_t{1} << 20, "numa test");
  const std::span<std::byte> bytes(memory.data(), memory.size());
  try {
    BindMemory(bytes, Numbers{topology.nodes.back().number});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.message();
    GTEST_SKIP() << error.message();
  }
  ThreadPool pool(1);
  FirstTouch(pool, bytes);
  const std::span<const std::byte> ranges[] = {bytes};
  EXPECT_EQ(FindPages(ranges).ShareOn(Numbers{topology.nodes.back().number}), 1.0);
  BindMemory(bytes.first(10), Numbers{0});  // no whole page: nothing to do
  ExpectError(ErrorCode::kUnsupported, {"NUMA nodes 1000"},
              [&] { BindMemory(bytes, Numbers{1000}); });
  ExpectError(ErrorCode::kInvalidArgument, {"nodes none"}, [&] { BindMemory(bytes, Numbers{}); });
}

TEST(NumaPages, SharesAreOfPagesThatHaveMemory) {
  PagePlacement pages;
  EXPECT_EQ(pages.ShareOn(Numbers{0}), 1.0);
  pages.bytes = size_t{40} << 20;
  pages.num_pages = 1000;
  pages.pages_on_node = {1, 799};
  pages.num_absent = 200;
  EXPECT_EQ(pages.ShareOn(Numbers{1}), 799.0 / 800.0);
  NumaPlacement placement;
  placement.nodes = {1};
  EXPECT_EQ(DescribePages("experts 32-63", pages, placement),
            "node 1: experts 32-63: 40.0 MiB, 99 % local, 0.1 % on node 0, 20.0 % not in memory");
  pages.why_unknown = "Operation not permitted";
  EXPECT_EQ(DescribePages("w", pages, placement),
            "node 1: w: 40.0 MiB, the system does not tell where: Operation not permitted");
}

}  // namespace
}  // namespace switchyard
