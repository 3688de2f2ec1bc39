#include "switchyard/core/thread_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <hwy/cache_control.h>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/affinity.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/macros.h"
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

// One word for each node holds the number of the loop and how many tasks of the node's part nobody
// has taken:
//
//   tickets = [ loop number : 31 | only for workers of the node : 1 | tasks left : 32 ]
//
// Taking tasks is one compare-and-swap, which fails if the loop has changed; so a worker that
// wakes late can neither take a task of a finished loop nor hold up the next one, and the caller
// waits for tasks to end, never for threads to wake.
//
// A thread takes a run of tasks in a row, a part of those that are left: long runs first, in which
// it reads memory as one stream, and single tasks at the end, so that all threads end together
// (guided self-scheduling: Polychronopoulos and Kuck, 1987). It looks into the part of its own node
// first, then into those of the nodes that follow.
struct ThreadPool::Impl {
  static constexpr uint64_t kOwnNodeOnly = uint64_t{1} << 32;

  // What is a node's.
  struct alignas(64) Part {
    std::atomic<uint64_t> tickets{0};
    uint32_t num_workers = 0;
    uint32_t end = 0;  // its last task + 1, of the current loop
  };

  explicit Impl(std::span<const size_t> nodes)
      : num_threads(nodes.size()),
        node_of_worker(nodes.begin(), nodes.end()),
        parts(std::ranges::max(nodes) + 1),
        may_spin(num_threads <= AvailableCpus()) {
    for (size_t node : nodes) ++parts[node].num_workers;
    for (const Part& part : parts) {
      if (part.num_workers == 0) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("every NUMA node of a pool needs a worker, node {} of {} has none",
                                &part - parts.data(), parts.size()));
      }
    }
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

  // tasks_of(node) is the size of its part.
  template <typename TasksOf>
  void Run(size_t num_tasks, const TasksOf& tasks_of, const TaskRef& task_body, NodeHelp help) {
    body = &task_body;
    count = static_cast<uint32_t>(num_tasks);
    finished.store(0, std::memory_order_relaxed);
    const uint32_t number = loop.load(std::memory_order_relaxed) + 1;
    const uint64_t head = uint64_t{number} << 33 | (help == NodeHelp::kNo ? kOwnNodeOnly : 0);
    uint32_t end = 0;
    for (size_t node = 0; node < parts.size(); ++node) {
      const auto tasks = static_cast<uint32_t>(tasks_of(node));
      parts[node].end = end += tasks;
      parts[node].tickets.store(head | tasks, std::memory_order_release);
    }
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

  // Executes some tasks of the current loop; false if none is left for this worker.
  bool TakeTasks(size_t worker) {
    const size_t own = node_of_worker[worker];
    if (TakeTasks(parts[own], worker, true)) return true;
    for (size_t node = own + 1; node < parts.size(); ++node)
      if (TakeTasks(parts[node], worker, false)) return true;
    for (size_t node = 0; node < own; ++node)
      if (TakeTasks(parts[node], worker, false)) return true;
    return false;
  }

  bool TakeTasks(Part& part, size_t worker, bool is_own) {
    uint64_t ticket = part.tickets.load(std::memory_order_acquire);
    uint32_t left, taken;
    do {
      left = static_cast<uint32_t>(ticket);
      if (left == 0 || (!is_own && (ticket & kOwnNodeOnly) != 0)) return false;
      taken = std::max(left / (2 * part.num_workers), 1u);
    } while (
        !part.tickets.compare_exchange_weak(ticket, ticket - taken, std::memory_order_acq_rel));
    // From here to the increment of `finished` the loop cannot end, so body, count and end are its
    // own.
    const uint32_t first = part.end - left;
    t_inside_task = true;
    t_worker = worker;
    for (uint32_t task = first; task < first + taken; ++task) RunTask(task, worker);
    t_inside_task = false;
    const uint32_t total = count;
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

  const size_t num_threads;
  const std::vector<size_t> node_of_worker;
  std::vector<Part> parts;
  const bool may_spin;
  std::vector<std::thread> threads;
  alignas(64) std::atomic<uint32_t> finished{0};
  alignas(64) std::atomic<uint32_t> loop{0};
  std::atomic<bool> stop{false};
  // Of the current loop; written while no task runs.
  const TaskRef* body = nullptr;
  uint32_t count = 0;
  std::mutex error_mutex;
  std::exception_ptr error;
};

namespace {

void CheckCount(size_t num_threads) {
  if (num_threads == 0)
    throw Error(ErrorCode::kInvalidArgument, "the number of threads must be at least 1, found 0");
  if (num_threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("at most {} threads are supported, {} were asked for", kMaxThreads,
                            num_threads));
  }
}

// Executes a loop on the calling thread, which is `worker` unless it is executing a task.
void RunHere(size_t num_tasks, size_t worker, const TaskRef& body) {
  for (size_t task = 0; task < num_tasks; ++task) body(task, t_inside_task ? t_worker : worker);
}

std::vector<size_t> OnOneNode(size_t num_threads) {
  CheckCount(num_threads);
  return std::vector<size_t>(num_threads, 0);
}

}  // namespace

ThreadPool::ThreadPool(size_t num_threads) : ThreadPool(OnOneNode(num_threads)) {}

ThreadPool::ThreadPool(std::span<const size_t> node_of_worker) {
  const size_t num_threads = node_of_worker.size();
  CheckCount(num_threads);
  if (const size_t last = std::ranges::max(node_of_worker); last >= num_threads) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} workers cannot be on NUMA nodes 0 to {}", num_threads, last));
  }
  try {
    impl_ = std::make_unique<Impl>(node_of_worker);
  } catch (const std::system_error& e) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("cannot start {} threads: {}", num_threads, e.what()));
  }
}

ThreadPool::~ThreadPool() = default;

size_t ThreadPool::num_threads() const { return impl_->num_threads; }
size_t ThreadPool::num_nodes() const { return impl_->parts.size(); }
size_t ThreadPool::NodeOf(size_t worker) const { return impl_->node_of_worker[worker]; }

void ThreadPool::BindTo(std::span<const size_t> cpus) {
  const std::vector<size_t> allowed = BindThisThread(cpus);
  for (std::thread& thread : impl_->threads) BindThread(thread.native_handle(), allowed);
}

void ThreadPool::BindNodes(std::span<const std::vector<size_t>> cpus_of_node) {
  SY_CHECK_EQ(cpus_of_node.size(), num_nodes());
  for (size_t worker = 0; worker < impl_->threads.size(); ++worker)
    BindThread(impl_->threads[worker].native_handle(), cpus_of_node[NodeOf(worker)]);
  BindThisThread(cpus_of_node[NodeOf(num_threads() - 1)]);
}

void ThreadPool::Run(size_t num_tasks, TaskRef body) {
  if (t_inside_task || num_tasks <= 1 || impl_->threads.empty())
    return RunHere(num_tasks, num_threads() - 1, body);
  const auto end_of = [&](size_t node) { return num_tasks * (node + 1) / num_nodes(); };
  const auto begin_of = [&](size_t node) { return num_tasks * node / num_nodes(); };
  impl_->Run(
      num_tasks, [&](size_t node) { return end_of(node) - begin_of(node); }, body, NodeHelp::kYes);
}

void ThreadPool::RunOnNodes(std::span<const size_t> tasks_of_node, TaskRef body, NodeHelp help) {
  SY_CHECK_EQ(tasks_of_node.size(), num_nodes());
  const size_t num_tasks = std::reduce(tasks_of_node.begin(), tasks_of_node.end());
  const bool needs_others = help == NodeHelp::kNo && num_nodes() > 1;
  if (t_inside_task || impl_->threads.empty() || (num_tasks <= 1 && !needs_others))
    return RunHere(num_tasks, num_threads() - 1, body);
  impl_->Run(
      num_tasks, [&](size_t node) { return tasks_of_node[node]; }, body, help);
}

}  // namespace switchyard
