#include "core/products.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/affine_gemm.h"
#include "kernels/affine_int8.h"

namespace ingot {
namespace {

class Scratch {
 public:
  float* hold(std::size_t count) {
    if (count > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<float*>(::operator new(count * sizeof(float), kAligned)));
      size_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAligned{64};
  struct Free {
    void operator()(float* memory) const { ::operator delete(memory, kAligned); }
  };
  std::unique_ptr<float, Free> memory_;
  std::size_t size_ = 0;
};

// Who may use which part of the memory: no more than `count` ask at a time.
class Slots {
 public:
  explicit Slots(std::size_t count) : count_(count), busy_(new std::atomic<bool>[count]()) {}

  std::size_t take() {
    for (std::size_t slot = 0;; slot = (slot + 1) % count_)
      if (!busy_[slot].exchange(true, std::memory_order_acquire)) return slot;
  }
  void give(std::size_t slot) { busy_[slot].store(false, std::memory_order_release); }

 private:
  const std::size_t count_;
  const std::unique_ptr<std::atomic<bool>[]> busy_;
};

// Of so many columns, the last filled up.
std::size_t blocks_of(const MatmulLayout& at, std::size_t columns) { return (at.cols + columns - 1) / columns; }

// The kernels for many rows.
struct Gemm {
  using Job = GemmJob;
  using Scratch = GemmScratch;
  static constexpr std::size_t kRows = kGemmRows, kCount = kGemmCount;

  // Of prepared x; places it at `memory` where there is any.
  static std::size_t prepared(Job& job, float* memory) {
    const std::size_t rows = job.mode == GemmMode::tiles ? (job.count + 31) / 32 * 32 : job.count;  // AMX takes whole tiles
    const std::size_t blocks = (job.blocks + kGemmSpan - 1) / kGemmSpan * kGemmSpan;                // others whole spans
    const std::size_t sums = job.at.zero == ZeroKind::none ? 0 : job.groups * kGemmCount;
    job.sums = sums ? memory : nullptr;
    job.packed = memory ? memory + sums : nullptr;
    return sums + rows * blocks * kGemmBlock;
  }

  static std::size_t tile(const Job& job) { return job.tile; }
  static std::size_t at_once(const Job&, std::size_t) { return 1; }
  static void prepare(const Job& job, std::size_t index) { INGOT_KERNEL(gemm_pack)(job, index); }
  static void rows(const Job& job, std::size_t first, std::size_t last, Scratch& scratch) {
    INGOT_KERNEL(gemm_rows)(job, first, last, scratch);
  }
};

// The kernels for x in 8 bits.
struct Int8 {
  using Job = Int8Job;
  using Scratch = Int8Scratch;
  static constexpr std::size_t kRows = kInt8Rows, kCount = kInt8Count;

  static std::size_t prepared(Job& job, float* memory) {
    constexpr std::size_t codes = kInt8Block / sizeof(float);
    const std::size_t blocks = job.fours * kInt8Sums * job.count;
    if (memory) {
      job.codes = reinterpret_cast<std::int8_t*>(memory);
      job.steps = memory + blocks * codes;
      job.starts = reinterpret_cast<std::int32_t*>(job.steps + blocks);
      job.sums = job.at.zero == ZeroKind::none ? nullptr : job.steps + 2 * blocks;
    }
    return blocks * (codes + 3);
  }

  static std::size_t tile(const Job&) { return INGOT_KERNEL(int8_tile)(); }

  // Few rows of x, for which reading weights takes longest: a thread reads as many of them in a row as may be.
  static std::size_t at_once(const Job& job, std::size_t threads) {
    constexpr std::size_t few = 4;
    return job.count > few ? 1 : std::max<std::size_t>(1, (job.at.rows + kRows - 1) / kRows / (4 * threads));
  }

  static void prepare(const Job& job, std::size_t index) { INGOT_KERNEL(int8_prepare)(job, index); }
  static void rows(const Job& job, std::size_t first, std::size_t last, Scratch& scratch) {
    INGOT_KERNEL(int8_rows)(job, first, last, scratch);
  }
};

// A tile of x a task, then `kRows` rows of the weights, or several times as many, a task.
template <class Way>
class InTasks {
 public:
  InTasks(const typename Way::Job& job, std::size_t threads)
      : job_(job), threads_(std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(1, tasks(1)))), slots_(threads_),
        at_once_(Way::at_once(job, threads_)) {
    const std::size_t each = sizeof(typename Way::Scratch) / sizeof(float);
    float* memory = hold_scratch(threads_ * each + Way::prepared(job_, nullptr));
    scratch_ = reinterpret_cast<typename Way::Scratch*>(memory);
    Way::prepared(job_, memory + threads_ * each);
  }

  void run() {
    const std::size_t tile = Way::tile(job_), all = tasks(at_once_);
    run_tasks((job_.count + tile - 1) / tile, threads_, &InTasks::prepare, this);
    run_tasks(all, threads_, &InTasks::rows, this);
  }

 private:
  std::size_t tasks(std::size_t at_once) const {
    const std::size_t step = Way::kRows * at_once;
    return (job_.at.rows + step - 1) / step;
  }

  static void prepare(void* self, std::size_t index) { Way::prepare(static_cast<InTasks*>(self)->job_, index); }

  static void rows(void* self, std::size_t index) {
    InTasks& product = *static_cast<InTasks*>(self);
    const std::size_t step = Way::kRows * product.at_once_, stop = std::min((index + 1) * step, product.job_.at.rows);
    const std::size_t slot = product.slots_.take();
    for (std::size_t first = index * step; first < stop; first += Way::kRows)
      Way::rows(product.job_, first, std::min(first + Way::kRows, stop), product.scratch_[slot]);
    product.slots_.give(slot);
  }

  typename Way::Job job_;
  const std::size_t threads_;
  Slots slots_;
  const std::size_t at_once_;
  typename Way::Scratch* scratch_;
};

// Calls `multiply` for so many rows of x at a time: x, how many, and where their products go.
template <class Multiply>
void in_parts(const MatmulLayout& at, const void* x, std::size_t count, const MatmulOutput& out, std::size_t most,
              const Multiply& multiply) {
  const std::size_t size = out.type == Dtype::f32 ? 4 : 2;
  for (std::size_t m = 0; m < count; m += most) {
    MatmulOutput part = out;
    part.values = static_cast<std::uint8_t*>(out.values) + m * at.rows * size;
    multiply(static_cast<const std::uint8_t*>(x) + m * at.cols * size, std::min(most, count - m), part);
  }
}

}  // namespace

float* hold_scratch(std::size_t floats) {
  thread_local Scratch scratch;
  return scratch.hold(floats);
}

GemmMode mode_here(GemmMode found) {
  if (found != GemmMode::tiles || (current_isa() == Isa::v4 && has_tiles())) return found;
  return has_pair_dots(current_isa()) ? GemmMode::dots : GemmMode::fused;
}

void multiply_rows(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, GemmMode mode,
                   std::size_t threads) {
  const MatmulLayout& at = weights.at;
  in_parts(at, x, count, out, kGemmCount, [&](const void* part, std::size_t rows, const MatmulOutput& to) {
    const GemmJob job{at, weights.codes, to, part, to.type, rows, blocks_of(at, kGemmBlock), blocks_of(at, at.group), mode,
                      INGOT_KERNEL(gemm_tile)(mode, rows), weights.source, nullptr, nullptr};
    InTasks<Gemm>(job, weights.bytes * rows < kAlone ? 1 : threads).run();
  });
}

void multiply_int8(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, bool dots,
                   std::size_t threads) {
  const MatmulLayout& at = weights.at;
  const std::size_t fours = blocks_of(at, kInt8Block * kInt8Sums);
  in_parts(at, x, count, out, kInt8Count, [&](const void* part, std::size_t rows, const MatmulOutput& to) {
    const Int8Job job{at, weights.codes, to, part, to.type, rows, fours, blocks_of(at, at.group), dots,
                      nullptr, nullptr, nullptr, nullptr};
    InTasks<Int8>(job, weights.bytes * rows < kAlone ? 1 : threads).run();
  });
}

}  // namespace ingot
