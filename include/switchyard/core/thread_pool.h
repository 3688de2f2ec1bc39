// A fork-join thread pool.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>

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

// Threads that wait for parallel loops. One Run at a time; a Run inside a Run is executed by the
// calling worker alone. Which worker executes a task is not defined, so results must depend on the
// task only: that is what makes every answer independent of the thread count.
class ThreadPool {
 public:
  // The calling thread is one of the `num_threads` workers.
  // Errors: kInvalidArgument if num_threads is 0; kResourceExhausted if the system refuses threads.
  explicit ThreadPool(size_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t num_threads() const;

  // Lets all workers, the calling thread among them, run on `cpus` only (numbers of the system),
  // as far as the calling thread may. Threads that it makes later inherit that. Not within a Run.
  // Errors: kInvalidArgument if the calling thread may use none of them; kUnsupported if the
  //   system refuses.
  void BindTo(std::span<const size_t> cpus);

  // Calls body(task, worker) once for each task in [0, num_tasks), num_tasks < 2^32, and returns
  // when all are done; worker < num_threads(). Workers spin for a moment after a loop, so that
  // loops that follow each other start at once, then sleep; with more threads than CPUs they sleep
  // at once. The caller waits for tasks, never for a thread to wake.
  // Errors: rethrows the first exception of a task; whether the other tasks ran is then not
  //   defined.
  void Run(size_t num_tasks, TaskRef body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard
