// A fork-join thread pool.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace switchyard {

// Non-owning reference to a callable (task, worker); lives as long as the call that takes it.
class TaskRef {
 public:
  template <typename F>
    requires std::is_invocable_v<const F&, size_t, size_t>
  TaskRef(const F& body)  // NOLINT(google-explicit-constructor): call sites pass a lambda
      : body_(&body), call_([](const void* f, size_t task, size_t worker) {
          (*static_cast<const F*>(f))(task, worker);
        }) {}

  void operator()(size_t task, size_t worker) const { call_(body_, task, worker); }

 private:
  const void* body_;
  void (*call_)(const void*, size_t, size_t);
};

// The most workers of one pool.
inline constexpr size_t kMaxThreads = 1024;

// Whether the workers of a NUMA node that have nothing left take tasks of other nodes.
enum class NodeHelp { kYes, kNo };

// Threads that wait for parallel loops. One Run at a time; a Run inside a Run is executed by the
// calling worker alone. Which worker executes a task is not defined, so results must depend on the
// task only: that is what makes every answer independent of the thread count.
//
// A pool may span several NUMA nodes, which it numbers from 0. A loop then has a part for each
// node, a range of its tasks, which workers of the node take first.
class ThreadPool {
 public:
  // Workers on one node. The calling thread is one of the `num_threads` workers, the last.
  // Errors: kInvalidArgument if num_threads is 0; kResourceExhausted if the system refuses threads.
  explicit ThreadPool(size_t num_threads);
  // A worker on each of these nodes. Binds nothing, so nodes may be made up; MakeNumaPool (numa.h)
  // does.
  // Errors: those above; kInvalidArgument if a node below the last has no worker.
  explicit ThreadPool(std::span<const size_t> node_of_worker);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t num_threads() const;
  size_t num_nodes() const;
  size_t NodeOf(size_t worker) const;  // worker < num_threads()

  // Lets all workers, the calling thread among them, run on `cpus` only (numbers of the system),
  // as far as the calling thread may. Threads that it makes later inherit that. Not within a Run.
  // Errors: kInvalidArgument if the calling thread may use none of them; kUnsupported if the
  //   system refuses.
  void BindTo(std::span<const size_t> cpus);

  // The same for the workers of each node; cpus_of_node [num_nodes()].
  void BindNodes(std::span<const std::vector<size_t>> cpus_of_node);

  // Calls body(task, worker) once for each task in [0, num_tasks), num_tasks < 2^32, and returns
  // when all are done; worker < num_threads(). Workers spin for a moment after a loop, so that
  // loops that follow each other start at once, then sleep; with more threads than CPUs they sleep
  // at once. The caller waits for tasks, never for a thread to wake. Nodes get equal parts.
  // Errors: rethrows the first exception of a task; whether the other tasks ran is then not
  //   defined.
  void Run(size_t num_tasks, TaskRef body);

  // The same with these parts: the first tasks_of_node[0] tasks are those of node 0, and so on;
  // [num_nodes()]. Without help every task is executed by a worker of its node (unless this Run is
  // inside another), and the caller does wait for threads to wake.
  void RunOnNodes(std::span<const size_t> tasks_of_node, TaskRef body,
                  NodeHelp help = NodeHelp::kYes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard
