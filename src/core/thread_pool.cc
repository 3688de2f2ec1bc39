#include "switchyard/core/thread_pool.h"

#include <fmt/format.h>

#include <atomic>
#include <exception>
#include <hwy/contrib/thread_pool/thread_pool.h>
#include <system_error>

#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// True on a thread that is executing a task of any pool: a nested Run then stays on this thread.
thread_local bool t_inside_task = false;
thread_local size_t t_worker = 0;

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(size_t num_threads)
      : pool(num_threads), may_spin(num_threads > 1 && num_threads <= AvailableCpus()) {}

  hwy::ThreadPool pool;
  bool may_spin;
  int spin_depth = 0;
};

ThreadPool::ThreadPool(size_t num_threads) {
  if (num_threads == 0) throw Error(ErrorCode::kInvalidArgument, "the number of threads must be at least 1, found 0");
  if (num_threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("at most {} threads are supported, {} were asked for", kMaxThreads, num_threads));
  }
  try {
    impl_ = std::make_unique<Impl>(num_threads);
  } catch (const std::system_error& e) {
    throw Error(ErrorCode::kResourceExhausted, fmt::format("cannot start {} threads: {}", num_threads, e.what()));
  }
}

ThreadPool::~ThreadPool() = default;

size_t ThreadPool::num_threads() const { return impl_->pool.NumWorkers(); }

void ThreadPool::Run(size_t num_tasks, TaskRef body) {
  if (t_inside_task || num_tasks <= 1 || impl_->pool.NumWorkers() == 1) {
    const size_t worker = t_inside_task ? t_worker : num_threads() - 1;
    for (size_t task = 0; task < num_tasks; ++task) body(task, worker);
    return;
  }
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  impl_->pool.Run(0, num_tasks, [&](uint64_t task, size_t worker) {
    t_inside_task = true;
    t_worker = worker;
    try {
      body(static_cast<size_t>(task), worker);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
    t_inside_task = false;
  });
  if (failed.load()) std::rethrow_exception(error);
}

ThreadPool::SpinScope::SpinScope(ThreadPool& pool) : pool_(pool) {
  if (pool.impl_->may_spin && pool.impl_->spin_depth++ == 0) pool.impl_->pool.SetWaitMode(hwy::PoolWaitMode::kSpin);
}

ThreadPool::SpinScope::~SpinScope() {
  if (pool_.impl_->may_spin && --pool_.impl_->spin_depth == 0) pool_.impl_->pool.SetWaitMode(hwy::PoolWaitMode::kBlock);
}

}  // namespace switchyard
