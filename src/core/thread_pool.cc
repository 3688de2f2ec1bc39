#include "switchyard/core/thread_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <hwy/cache_control.h>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/affinity.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/numa.h"

namespace switchyard {
namespace {

// True on a thread that is executing a task of any pool: a nested Run then stays on this thread.
thread_local bool t_inside_task = false;
thread_local size_t t_worker = 0;

// How long a thread that waits keeps its core before it sleeps. The serial pieces between two
// parallel loops of a decode step take less, so a step sleeps nowhere; and a core that another
// process needs is lost for no longer than this.
constexpr std::chrono::microseconds kSpinTime{50};

// Spins for kSpinTime (or not at all) until done() holds; false if it still does not.
template <typename Done>
bool SpinUntil(bool may_spin, const Done& done) {
  if (done()) return true;
  if (!may_spin) return false;
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 16; ++i) {
      hwy::Pause();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

// One word holds the number of the loop and how many of its tasks nobody has taken:
//
//   tickets_ = [ loop number : 32 | tasks left : 32 ]
//
// Taking tasks is one compare-and-swap, which fails if the loop has changed; so a worker that
// wakes late can neither take a task of a finished loop nor hold up the next one, and the caller
// waits for tasks to end, never for threads to wake.
//
// A thread takes a run of tasks in a row, a part of those that are left: long runs first, in which
// it reads memory as one stream, and single tasks at the end, so that all threads end together
// (guided self-scheduling: Polychronopoulos and Kuck, 1987).
struct ThreadPool::Impl {
  explicit Impl(size_t num_threads)
      : num_threads(static_cast<uint32_t>(num_threads)), may_spin(num_threads <= AvailableCpus()) {
    try {
      for (size_t worker = 0; worker + 1 < num_threads; ++worker)
        threads.emplace_back([this, worker] { Work(worker); });
    } catch (...) {
      StopThreads();
      throw;
    }
  }

  ~Impl() { StopThreads(); }

  void StopThreads() {
    stop.store(true);
    loop.fetch_add(1);
    loop.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void Run(size_t num_tasks, const TaskRef& task_body) {
    body = &task_body;
    count = static_cast<uint32_t>(num_tasks);
    finished.store(0, std::memory_order_relaxed);
    const uint32_t number = loop.load(std::memory_order_relaxed) + 1;
    tickets.store(uint64_t{number} << 32 | count, std::memory_order_release);
    loop.store(number, std::memory_order_release);
    loop.notify_all();  // no system call unless a worker sleeps
    const size_t self = threads.size();
    while (TakeTasks(self)) {
    }
    const auto all_done = [this] { return finished.load(std::memory_order_acquire) == count; };
    if (!SpinUntil(may_spin, all_done)) {
      for (uint32_t seen; (seen = finished.load(std::memory_order_acquire)) != count;)
        finished.wait(seen);
    }
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  void Work(size_t worker) {
    uint32_t seen = 0;
    while (true) {
      if (!SpinUntil(may_spin, [&] { return loop.load(std::memory_order_acquire) != seen; }))
        loop.wait(seen);
      seen = loop.load(std::memory_order_acquire);
      if (stop.load()) return;
      while (TakeTasks(worker)) {
      }
    }
  }

  // Executes some tasks of the current loop; false if none is left.
  bool TakeTasks(size_t worker) {
    uint64_t ticket = tickets.load(std::memory_order_acquire);
    uint32_t left, taken;
    do {
      left = static_cast<uint32_t>(ticket);
      if (left == 0) return false;
      taken = std::max(left / (2 * num_threads), 1u);
    } while (!tickets.compare_exchange_weak(ticket, ticket - taken, std::memory_order_acq_rel));
    // From here to the increment of `finished` the loop cannot end, so body and count are its own.
    const uint32_t total = count;
    const uint32_t first = total - left;
    t_inside_task = true;
    t_worker = worker;
    for (uint32_t task = first; task < first + taken; ++task) RunTask(task, worker);
    t_inside_task = false;
    if (finished.fetch_add(taken, std::memory_order_acq_rel) + taken == total)
      finished.notify_one();
    return true;
  }

  void RunTask(uint32_t task, size_t worker) {
    try {
      (*body)(task, worker);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  const uint32_t num_threads;
  const bool may_spin;
  std::vector<std::thread> threads;
  alignas(64) std::atomic<uint64_t> tickets{0};
  alignas(64) std::atomic<uint32_t> finished{0};
  alignas(64) std::atomic<uint32_t> loop{0};
  std::atomic<bool> stop{false};
  // Of the current loop; written while no task runs.
  const TaskRef* body = nullptr;
  uint32_t count = 0;
  std::mutex error_mutex;
  std::exception_ptr error;
};

ThreadPool::ThreadPool(size_t num_threads) {
  if (num_threads == 0)
    throw Error(ErrorCode::kInvalidArgument, "the number of threads must be at least 1, found 0");
  if (num_threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("at most {} threads are supported, {} were asked for", kMaxThreads,
                            num_threads));
  }
  try {
    impl_ = std::make_unique<Impl>(num_threads);
  } catch (const std::system_error& e) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("cannot start {} threads: {}", num_threads, e.what()));
  }
}

ThreadPool::~ThreadPool() = default;

size_t ThreadPool::num_threads() const { return impl_->threads.size() + 1; }

void ThreadPool::BindTo(std::span<const size_t> cpus) {
  const std::vector<size_t> allowed = BindThisThread(cpus);
  for (std::thread& thread : impl_->threads) BindThread(thread.native_handle(), allowed);
}

void ThreadPool::Run(size_t num_tasks, TaskRef body) {
  if (t_inside_task || num_tasks <= 1 || impl_->threads.empty()) {
    const size_t worker = t_inside_task ? t_worker : num_threads() - 1;
    for (size_t task = 0; task < num_tasks; ++task) body(task, worker);
    return;
  }
  impl_->Run(num_tasks, body);
}

}  // namespace switchyard
