// Persistent threads for work that is too short for starting threads: products of a few microseconds.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <new>

namespace ingot {

// Yields the processor core in a loop that waits for another thread. `looks` counts the iterations from 0.
void wait_a_little(std::size_t looks);

// Divides `all` consecutive steps into tasks of decreasing size: half of the steps into one task per thread, half of
// the remainder likewise, and so on; at the end a task is one step. So memory is read in long runs, and threads finish
// together.
class Cuts {
 public:
  Cuts(std::size_t all, std::size_t threads) : all_(all), threads_(threads) {
    while (per_thread(levels_)) left_ -= threads_ * per_thread(levels_), ++levels_;
  }

  std::size_t tasks() const { return levels_ * threads_ + left_; }

  // Returns the first step of task `index`; the next task begins at its end.
  std::size_t first(std::size_t index) const {
    std::size_t done = 0, level = 0;
    for (; level < levels_ && index >= threads_; ++level, index -= threads_) done += threads_ * per_thread(level);
    return done + index * (level < levels_ ? per_thread(level) : 1);
  }

 private:
  std::size_t per_thread(std::size_t level) const { return (all_ >> (level + 1)) / threads_; }

  const std::size_t all_, threads_;
  std::size_t levels_ = 0, left_ = all_;
};

// Calls task(context, i) for every i below `tasks`, on the calling thread and up to `threads - 1` others; returns when
// all have finished. If the threads are busy with another caller's work, or cannot be started, the caller runs all
// tasks itself: results must not depend on which thread runs a task. Tasks must not throw.
void run_tasks(std::size_t tasks, std::size_t threads, void (*task)(void*, std::size_t), void* context);

// Calls task(first, last) for ranges of `step` that cover `count`, on up to `threads` threads. Throws std::bad_alloc if
// a task did.
template <class Task>
void in_ranges(std::size_t count, std::size_t step, std::size_t threads, const Task& task) {
  struct Context {
    const Task& task;
    std::size_t count, step;
    std::atomic<bool> failed{false};
  } context{task, count, step};
  run_tasks((count + step - 1) / step, threads,
            [](void* pointer, std::size_t index) {
              Context& all = *static_cast<Context*>(pointer);
              try {
                all.task(index * all.step, std::min((index + 1) * all.step, all.count));
              } catch (const std::bad_alloc&) {
                all.failed.store(true, std::memory_order_relaxed);
              }
            },
            &context);
  if (context.failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// The entry point of the process's own OpenMP (GNU's `GOMP_parallel`, which LLVM's and Intel's have too): it calls a
// function on `threads` threads, the calling thread and others that it keeps.
using Team = void (*)(void (*call)(void*), void* context, unsigned threads, unsigned flags);

// From now on, until the process forks, tasks run on the threads of `team`, or, if it is null, on the threads of this
// pool.
void share_team(Team team);

}  // namespace ingot
