#include "switchyard/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <numeric>
#include <thread>
#include <vector>

#include "switchyard/core/error.h"
#include "testing/errors.h"

namespace switchyard {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (size_t threads : {1u, 2u, 3u, 8u}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (size_t tasks : {0u, 1u, 2u, 3u, 100u, 1000u}) {
      std::vector<std::atomic<int>> runs(tasks);
      pool.Run(tasks, [&](size_t task, size_t worker) {
        ASSERT_LT(worker, threads);
        ++runs[task];
      });
      for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyShortLoopsInARow) {
  ThreadPool pool(3);
  std::vector<size_t> sums(7);
  for (size_t round = 0; round < 20000; ++round) {
    pool.Run(sums.size(), [&](size_t task, size_t) { sums[task] += task; });
  }
  for (size_t task = 0; task < sums.size(); ++task) EXPECT_EQ(sums[task], 20000 * task);
}

TEST(ThreadPool, WorkersThatSleptTakePartAgain) {
  ThreadPool pool(2);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> sum{0};
    pool.Run(50, [&](size_t, size_t) { ++sum; });
    EXPECT_EQ(sum.load(), 50);
  }
}

TEST(ThreadPool, CarriesAnExceptionToTheCallerAndWorksOn) {
  for (size_t threads : {1u, 3u}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      try {
        pool.Run(20, [](size_t task, size_t) {
          if (task == 13) throw Error(ErrorCode::kCorruptData, "thirteen");
        });
        FAIL() << "no exception";
      } catch (const Error& e) {
        EXPECT_EQ(e.message(), "thirteen");
      }
    }
    std::atomic<int> sum{0};
    pool.Run(10, [&](size_t, size_t) { ++sum; });
    EXPECT_EQ(sum.load(), 10);
  }
}

TEST(ThreadPool, ALoopInsideALoopStaysOnItsWorker) {
  ThreadPool pool(3);
  std::atomic<int> sum{0};
  pool.Run(6, [&](size_t, size_t outer) {
    pool.Run(4, [&](size_t, size_t inner) {
      EXPECT_EQ(inner, outer);
      ++sum;
    });
  });
  EXPECT_EQ(sum.load(), 24);
}

TEST(ThreadPool, RefusesImpossibleCounts) {
  EXPECT_THROW(ThreadPool(0), Error);
  EXPECT_THROW(ThreadPool(kMaxThreads + 1), Error);
}

// ---- several nodes, made up

using Numbers = std::vector<size_t>;

const std::vector<Numbers>& NodesOfPools() {
  static const std::vector<Numbers> all = {{0},       {0, 0, 0},       {0, 1},      {1, 0},
                                           {0, 1, 1}, {0, 0, 1, 1, 1}, {3, 2, 1, 0}};
  return all;
}

TEST(ThreadPoolNodes, EveryTaskRunsOnceInPartsOfAnySize) {
  for (const Numbers& nodes : NodesOfPools()) {
    ThreadPool pool(nodes);
    ASSERT_EQ(pool.num_threads(), nodes.size());
    for (size_t w = 0; w < nodes.size(); ++w) EXPECT_EQ(pool.NodeOf(w), nodes[w]);
    for (const Numbers& sizes : std::vector<Numbers>{
             {0, 0, 0, 0}, {1, 0, 0, 0}, {0, 0, 0, 1}, {100, 1, 0, 33}, {7, 7, 7, 7}}) {
      const std::span<const size_t> parts = std::span(sizes).first(pool.num_nodes());
      const size_t tasks = std::reduce(parts.begin(), parts.end());
      for (const NodeHelp help : {NodeHelp::kYes, NodeHelp::kNo}) {
        std::vector<std::atomic<int>> runs(tasks);
        pool.RunOnNodes(
            parts, [&](size_t task, size_t) { ++runs[task]; }, help);
        for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
      }
      std::vector<std::atomic<int>> runs(tasks);
      pool.Run(tasks, [&](size_t task, size_t) { ++runs[task]; });
      for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST(ThreadPoolNodes, ManyShortLoopsInARow) {
  ThreadPool pool(Numbers{0, 1, 1});
  const Numbers parts = {2, 3};
  std::vector<size_t> sums(5);
  for (size_t round = 0; round < 5000; ++round) {
    for (const NodeHelp help : {NodeHelp::kYes, NodeHelp::kNo})
      pool.RunOnNodes(
          parts, [&](size_t task, size_t) { sums[task] += task; }, help);
  }
  for (size_t task = 0; task < sums.size(); ++task) EXPECT_EQ(sums[task], 10000 * task);
}

// The workers start together and keep step, so that none has time for another's part.
TEST(ThreadPoolNodes, WorkersDoThePartOfTheirNodeFirst) {
  const Numbers nodes = {2, 0, 1};
  const Numbers parts = {5, 5, 5};
  ThreadPool pool(nodes);
  for (int round = 0; round < 20; ++round) {
    std::barrier step(3);
    std::vector<size_t> node_of_task(15, 99);
    pool.RunOnNodes(parts, [&](size_t task, size_t worker) {
      step.arrive_and_wait();
      node_of_task[task] = nodes[worker];
      step.arrive_and_wait();
    });
    for (size_t task = 0; task < 15; ++task) ASSERT_EQ(node_of_task[task], task / 5) << task;
  }
}

// Each task waits for the other one, which a worker of the other node must have taken.
TEST(ThreadPoolNodes, WorkersHelpOtherNodes) {
  ThreadPool pool(Numbers{0, 1});
  for (const Numbers& parts : {Numbers{2, 0}, Numbers{0, 2}}) {
    std::barrier both(2);
    std::vector<size_t> worker_of_task(2, 99);
    pool.RunOnNodes(parts, [&](size_t task, size_t worker) {
      worker_of_task[task] = worker;
      both.arrive_and_wait();
    });
    EXPECT_NE(worker_of_task[0], worker_of_task[1]);
  }
}

TEST(ThreadPoolNodes, WithoutHelpEveryTaskRunsOnItsNode) {
  for (const Numbers& nodes : NodesOfPools()) {
    ThreadPool pool(nodes);
    for (size_t size : {1u, 10u, 100u}) {
      const Numbers parts(pool.num_nodes(), size);
      Numbers node_of_task(size * parts.size(), 99);
      pool.RunOnNodes(
          parts, [&](size_t task, size_t worker) { node_of_task[task] = pool.NodeOf(worker); },
          NodeHelp::kNo);
      for (size_t task = 0; task < node_of_task.size(); ++task)
        ASSERT_EQ(node_of_task[task], task / size);
    }
  }
  ThreadPool pool(Numbers{0, 1});  // a single task, of the node that the caller is not on
  size_t node = 99;
  pool.RunOnNodes(
      Numbers{1, 0}, [&](size_t, size_t worker) { node = pool.NodeOf(worker); }, NodeHelp::kNo);
  EXPECT_EQ(node, 0u);
}

TEST(ThreadPoolNodes, CarriesAnExceptionToTheCaller) {
  ThreadPool pool(Numbers{0, 1});
  for (const NodeHelp help : {NodeHelp::kYes, NodeHelp::kNo}) {
    testing::ExpectError(ErrorCode::kCorruptData, {"eleven"}, [&] {
      pool.RunOnNodes(
          Numbers{8, 8},
          [](size_t task, size_t) {
            if (task == 11) throw Error(ErrorCode::kCorruptData, "eleven");
          },
          help);
    });
  }
}

TEST(ThreadPoolNodes, EveryNodeNeedsAWorker) {
  testing::ExpectError(ErrorCode::kInvalidArgument, {"node 1 of 3 has none"}, [] {
    ThreadPool pool(Numbers{0, 2, 2});
  });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"2 workers", "0 to 7"}, [] {
    ThreadPool pool(Numbers{0, 7});
  });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"at least 1, found 0"},
                       [] { ThreadPool pool(Numbers{}); });
  ThreadPool pool(Numbers{0, 1});
  EXPECT_THROW(pool.RunOnNodes(Numbers{4}, [](size_t, size_t) {}), Error);
  EXPECT_THROW(pool.BindNodes(std::vector<Numbers>{{0}}), Error);
}

}  // namespace
}  // namespace switchyard
