// Threads that stay, for work that is too short to start threads for: products of a few microseconds.
#pragma once
#include <cstddef>

namespace ingot {

// Calls task(context, i) for every i below `tasks`, on the calling thread and up to `threads - 1` others; returns when
// all are done. Where the threads are busy with another caller's work, and in threads that cannot be started, the
// caller does everything itself: results must not depend on who does what. Tasks throw nothing.
void run_tasks(std::size_t tasks, std::size_t threads, void (*task)(void*, std::size_t), void* context);

}  // namespace ingot
