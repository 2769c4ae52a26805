// Threads that stay, for work that is too short to start threads for: products of a few microseconds.
#pragma once
#include <cstddef>

namespace ingot {

// Let others on this processor core go first: for loops that wait for another thread. `looks` counts from 0.
void wait_a_little(std::size_t looks);

// Work of `all` steps that lie in a row, cut into tasks that get smaller: half of it into one task a thread, half of the
// rest likewise, and so on; what is left, a step a task. So memory is read in long runs, and threads end together.
class Cuts {
 public:
  Cuts(std::size_t all, std::size_t threads) : all_(all), threads_(threads) {
    while (per_thread(levels_)) left_ -= threads_ * per_thread(levels_), ++levels_;
  }

  std::size_t tasks() const { return levels_ * threads_ + left_; }

  // Returns the first item of task `index`; the next task begins where it ends.
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
// all have finished. If the threads are busy with another caller's work, or cannot be started, the caller runs all tasks
// itself: results must not depend on which thread runs a task. Tasks throw nothing.
void run_tasks(std::size_t tasks, std::size_t threads, void (*task)(void*, std::size_t), void* context);

// The entry of a program's own OpenMP (GNU's `GOMP_parallel`, which LLVM's and Intel's have too): it calls a function on
// `threads` threads, the calling one and others that it retains.
using Team = void (*)(void (*call)(void*), void* context, unsigned threads, unsigned flags);

// From now on, until the process forks, tasks go to the threads of `team`, or where it is null to those that stay here.
void share_team(Team team);

}  // namespace ingot
