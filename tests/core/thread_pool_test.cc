#include "switchyard/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "switchyard/core/error.h"

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

}  // namespace
}  // namespace switchyard
