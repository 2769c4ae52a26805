// Stress of core/pool.cc for `make sanitize`: callers from several threads, forks between, and no memory for a thread.
// Prints nothing and returns 0 where all is well.
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "core/pool.h"

namespace {

std::atomic<bool> no_memory{false};

int fail(const char* what) {
  std::fprintf(stderr, "pool_stress: %s\n", what);
  return 1;
}

// Every task once, whoever does it.
bool sums_to(std::size_t tasks, std::size_t threads) {
  std::vector<std::size_t> found(tasks);
  ingot::run_tasks(tasks, threads, [](void* all, std::size_t i) { (*static_cast<std::vector<std::size_t>*>(all))[i] += i + 1; }, &found);
  for (std::size_t i = 0; i < tasks; ++i)
    if (found[i] != i + 1) return false;
  return true;
}

bool signals_are_delivered() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, SIGTERM) == 0;
}

// As OpenMP does it, of threads that are there for the call alone.
void team(void (*call)(void*), void* context, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(call, context);
  call(context);
  for (std::thread& other : others) other.join();
}

// Every step once, in order.
bool cuts_cover(std::size_t all, std::size_t threads) {
  const ingot::Cuts cuts(all, threads);
  for (std::size_t i = 0, before = all; i < cuts.tasks(); ++i) {
    const std::size_t size = cuts.first(i + 1) - cuts.first(i);
    if (!size || size > before) return false;
    before = size;
  }
  return cuts.first(0) == 0 && cuts.first(cuts.tasks()) == all;
}

}  // namespace

void* operator new(std::size_t size) {
  void* memory = no_memory.load() ? nullptr : std::malloc(size);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 2000;
  if (!sums_to(4, 2)) return fail("a task was left out, or done twice");
  std::size_t found[8] = {};
  no_memory = true;  // the pool wants more threads and gets none
  ingot::run_tasks(8, 8, [](void* all, std::size_t i) { static_cast<std::size_t*>(all)[i] = i + 1; }, found);
  no_memory = false;
  if (!signals_are_delivered()) return fail("signals are blocked where a thread could not be started");
  for (std::size_t i = 0; i < 8; ++i)
    if (found[i] != i + 1) return fail("a task was left out where a thread could not be started");

  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int i = 0; i < rounds; ++i)
        if (!sums_to(1 + (i * 7 + caller) % 97, 1 + i % 6)) wrong.fetch_add(1);
    });
  for (std::thread& caller : callers) caller.join();
  if (wrong) return fail("a task was left out, or done twice");

  for (std::size_t all = 0; all < 300; ++all)
    for (std::size_t threads : {1, 2, 3, 64, 400})
      if (!cuts_cover(all, threads)) return fail("steps were left out, or cut into tasks that grow");

  ingot::share_team(&team);
  for (int i = 0; i < rounds / 10; ++i)
    if (!sums_to(1 + i % 97, 1 + i % 6)) return fail("a task was left out, or done twice, by a team");

  for (int i = 0; i < 8; ++i) {  // a child has a pool of its own
    const pid_t child = fork();
    if (child == 0) _exit(sums_to(64, 4) ? 0 : 1);
    int status = 0;
    if (waitpid(child, &status, 0) != child || status) return fail("a child process did not do its tasks");
  }
  return signals_are_delivered() ? 0 : fail("signals are blocked");
}
