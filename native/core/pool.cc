#include "core/pool.h"

#include "core/float_mode.h"

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <exception>
#include <thread>

namespace ingot {
namespace {

constexpr std::size_t kMostThreads = 256;
constexpr std::size_t kSpins = 2000;  // polls for new work before a thread sleeps: some tens of microseconds

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  std::size_t tasks;
  void (*task)(void*, std::size_t);
  void* context;
  std::atomic<std::size_t> next{0};

  void work() {
    for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks;
         i = next.fetch_add(1, std::memory_order_relaxed))
      task(context, i);
  }
};

#if defined(_WIN32)
struct SignalsBlocked {};  // Windows delivers Ctrl-C to a separate thread
#else
// While this object lives, signals are not delivered to the calling thread, nor to threads that it starts.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};
#endif

class Pool {
 public:
  void run(Job& job, std::size_t threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    const std::size_t helpers = turn ? start(threads - 1) : 0;
    if (helpers) open(job, helpers);
    job.work();
    if (helpers) close();
  }

 private:
  // Returns the number of threads, at most `wanted`.
  std::size_t start(std::size_t requested) {
    if (requested > kMostThreads) requested = kMostThreads;
    if (started_ >= requested) return requested;
    [[maybe_unused]] const SignalsBlocked blocked{};  // the interpreter's threads handle signals
    try {
      for (; started_ < requested; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // no thread or memory available: continue with the threads started
    }
    return started_;
  }

  void open(Job& job, std::size_t helpers) {
    std::size_t asleep;
    {
      std::lock_guard<std::mutex> guard(lock_);
      job_ = &job;
      seats_ = helpers;
      asleep = asleep_;
      round_.fetch_add(1, std::memory_order_release);
    }
    for (; asleep && helpers; --asleep, --helpers) wake_.notify_one();
  }

  // No new thread joins; threads that joined complete their current task.
  void close() {
    {
      std::lock_guard<std::mutex> guard(lock_);
      job_ = nullptr;
    }
    for (std::size_t looks = 0; working_.load(std::memory_order_acquire); ++looks) wait_a_little(looks);
  }

  void serve() {
    const DefaultFloats mode;  // a thread inherits the mode of the one that started it
    for (std::uint64_t seen = 0;;) {
      for (std::size_t looks = 0; looks < kSpins && round_.load(std::memory_order_acquire) == seen; ++looks) relax();
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> guard(lock_);
        ++asleep_;
        wake_.wait(guard, [&] { return round_.load(std::memory_order_relaxed) != seen; });
        --asleep_;
        seen = round_.load(std::memory_order_relaxed);
        if (job_ && seats_) {
          --seats_;
          job = job_;
          working_.fetch_add(1, std::memory_order_relaxed);
        }
      }
      if (!job) continue;
      job->work();
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex turn_;  // locked by callers: only one at a time has helpers
  std::mutex lock_;
  std::condition_variable wake_;
  Job* job_ = nullptr;
  std::size_t seats_ = 0, asleep_ = 0, started_ = 0;
  std::atomic<std::size_t> working_{0};
  std::atomic<std::uint64_t> round_{0};
};

// Never destroyed, because its threads may run until the process ends. After a fork, the child has only the calling
// thread and starts with a new pool.
std::atomic<Pool*> the_pool{nullptr};

std::atomic<Team> the_team{nullptr};

// A forked child has none of its parent's threads.
void forget_at_fork() {
#if !defined(_WIN32)
  static const int hooked = pthread_atfork(nullptr, nullptr, [] {
    the_pool.store(nullptr);
    the_team.store(nullptr);
  });
  static_cast<void>(hooked);
#endif
}

Pool& pool() {
  forget_at_fork();
  Pool* result = the_pool.load(std::memory_order_acquire);
  if (result) return *result;
  Pool* decoded = new Pool;
  if (the_pool.compare_exchange_strong(result, decoded)) return *decoded;
  delete decoded;
  return *result;
}

void work_in_team(void* job) {
  const DefaultFloats mode;
  static_cast<Job*>(job)->work();
}

}  // namespace

void wait_a_little(std::size_t looks) { looks < kSpins ? relax() : std::this_thread::yield(); }

void share_team(Team team) {
  forget_at_fork();
  the_team.store(team);
}

void run_tasks(std::size_t tasks, std::size_t threads, void (*task)(void*, std::size_t), void* context) {
  Job job{tasks, task, context};
  const std::size_t useful = threads < tasks ? threads : tasks;
  if (useful < 2) return job.work();
  if (const Team team = the_team.load(std::memory_order_acquire))
    return team(&work_in_team, &job, static_cast<unsigned>(threads < kMostThreads ? threads : kMostThreads), 0);
  pool().run(job, useful);
}

}  // namespace ingot
