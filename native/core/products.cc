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

// Slots of scratch memory for at most `count` threads at a time.
class Slots {
 public:
  explicit Slots(std::size_t count) : count_(count), busy_(new std::atomic<bool>[count]()) {}

  std::size_t take() {
    for (std::size_t slot = 0;; slot = (slot + 1) % count_)
      if (!busy_[slot].exchange(true, std::memory_order_acquire)) return slot;
  }
  std::size_t count() const { return count_; }
  void give(std::size_t slot) { busy_[slot].store(false, std::memory_order_release); }

 private:
  const std::size_t count_;
  const std::unique_ptr<std::atomic<bool>[]> busy_;
};

// The number of blocks of `columns` columns, the last one padded.
std::size_t blocks_of(const MatmulLayout& layout, std::size_t columns) { return (layout.cols + columns - 1) / columns; }

// The kernels for many rows.
struct Gemm {
  using Job = GemmJob;
  using Scratch = GemmScratch;
  static constexpr std::size_t kRows = kGemmRows;

  // Returns the number of bytes of prepared x; writes its location to `memory` if that is not null.
  static std::size_t prepared(Job& job, float* memory) {
    // AMX needs complete tiles.
    const std::size_t rows = job.mode == GemmMode::tiles ? (job.count + 31) / 32 * 32 : job.count;
    // Other modes need complete spans.
    const std::size_t blocks = (job.blocks + kGemmSpan - 1) / kGemmSpan * kGemmSpan;
    const std::size_t sums = job.layout.zero == ZeroKind::none ? 0 : job.groups * kGemmCount;
    job.sums = sums ? memory : nullptr;
    job.packed = memory ? memory + sums : nullptr;
    return sums + rows * blocks * kGemmBlock;
  }

  static std::size_t tile(const Job& job) { return job.tile; }
  static void prepare(const Job& job, std::size_t index) { INGOT_KERNEL(gemm_pack)(job, index); }
  static void rows(const Job& job, std::size_t first, std::size_t last, Scratch& scratch) {
    INGOT_KERNEL(gemm_rows)(job, first, last, scratch);
  }
};

// The x86-64-v4 kernels for x in 8 bits are compiled with dot products of bytes alone, to save 600 KB. Processors
// without these instructions (the first with AVX-512) use the x86-64-v3 kernels.
#if defined(INGOT_HAS_V4)
#define INGOT_INT8_KERNEL(name) \
  (current_isa() == Isa::v4 && !job.dots ? &v3::name : INGOT_KERNEL(name))
#else
#define INGOT_INT8_KERNEL(name) INGOT_KERNEL(name)
#endif

// The kernels for x in 8 bits.
struct Int8 {
  using Job = Int8Job;
  using Scratch = Int8Scratch;
  static constexpr std::size_t kRows = kInt8Rows;

  static std::size_t prepared(Job& job, float* memory) {
    constexpr std::size_t codes = kInt8Block / sizeof(float);
    const std::size_t blocks = job.fours * kInt8Sums * job.count;
    if (memory) {
      job.codes = reinterpret_cast<std::int8_t*>(memory);
      job.steps = memory + blocks * codes;
      job.starts = reinterpret_cast<std::int32_t*>(job.steps + blocks);
      job.sums = job.layout.zero == ZeroKind::none ? nullptr : job.steps + 2 * blocks;
    }
    return blocks * (codes + 3);
  }

  static std::size_t tile([[maybe_unused]] const Job& job) { return INGOT_INT8_KERNEL(int8_tile)(); }

  static void prepare(const Job& job, std::size_t index) { INGOT_INT8_KERNEL(int8_prepare)(job, index); }
  static void rows(const Job& job, std::size_t first, std::size_t last, Scratch& scratch) {
    INGOT_INT8_KERNEL(int8_rows)(job, first, last, scratch);
  }
};

// Each task prepares a tile of x, or multiplies a multiple of `kRows` rows of the weights; the latter wait until all of
// x is prepared. A thread prefetches the rows of its next task.
template <class Method>
class InTasks {
 public:
  InTasks(const typename Method::Job& job, std::size_t threads)
      : job_(job),
        threads_(std::max<std::size_t>(threads, 1)),
        steps_((job_.layout.rows + Method::kRows - 1) / Method::kRows),
        slots_(std::clamp<std::size_t>(steps_, 1, threads_)),
        cuts_(steps_, slots_.count()),
        tiles_((job_.count + Method::tile(job_) - 1) / Method::tile(job_)) {
    const std::size_t width = sizeof(typename Method::Scratch) / sizeof(float), scratch = slots_.count() * width;
    float* memory = hold_scratch(scratch + Method::prepared(job_, nullptr));
    scratch_ = reinterpret_cast<typename Method::Scratch*>(memory);
    Method::prepared(job_, memory + scratch);
  }

  void run() {
    run_tasks(tiles_ + cuts_.tasks(), threads_, &InTasks::task, this);
  }

 private:
  static void task(void* self, std::size_t index) { static_cast<InTasks*>(self)->task(index); }

  void task(std::size_t index) {
    if (index < tiles_) {
      Method::prepare(job_, index);
      prepared_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (std::size_t looks = 0; prepared_.load(std::memory_order_acquire) < tiles_; ++looks) wait_a_little(looks);
    rows(cuts_.first(index - tiles_), cuts_.first(index - tiles_ + 1));
  }

  void rows(std::size_t first, std::size_t last) {
    const std::size_t slot = slots_.take(), all = job_.layout.rows;
    for (std::size_t step = first; step < last; ++step)
      Method::rows(job_, step * Method::kRows, std::min((step + 1) * Method::kRows, all), scratch_[slot]);
    slots_.give(slot);
  }

  typename Method::Job job_;
  const std::size_t threads_, steps_;
  Slots slots_;
  const Cuts cuts_;
  const std::size_t tiles_;
  std::atomic<std::size_t> prepared_{0};
  typename Method::Scratch* scratch_;
};

// Calls `multiply` for batches of rows of x, with x, the number of rows, and the output of their products.
template <class Multiply>
void in_parts(const MatmulLayout& layout, const void* x, std::size_t count, const MatmulOutput& out, std::size_t limit,
              const Multiply& multiply) {
  const std::size_t size = out.type == Dtype::f32 ? 4 : 2;
  for (std::size_t m = 0; m < count; m += limit) {
    MatmulOutput part = out;
    part.values = static_cast<std::uint8_t*>(out.values) + m * layout.rows * size;
    multiply(static_cast<const std::uint8_t*>(x) + m * layout.cols * size, std::min(limit, count - m), part);
  }
}

}  // namespace

float* hold_scratch(std::size_t floats) {
  thread_local Scratch scratch;
  return scratch.hold(floats);
}

GemmMode mode_here(GemmMode result) {
  if (result != GemmMode::tiles || (current_isa() == Isa::v4 && has_tiles())) return result;
  return has_pair_dots(current_isa()) ? GemmMode::dots : GemmMode::fused;
}

void multiply_rows(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, GemmMode mode,
                   std::size_t threads) {
  const MatmulLayout& layout = weights.layout;
  in_parts(layout, x, count, out, kGemmCount, [&](const void* part, std::size_t rows, const MatmulOutput& to) {
    const GemmJob job{layout,
                      weights.codes,
                      to,
                      part,
                      to.type,
                      rows,
                      blocks_of(layout, kGemmBlock),
                      blocks_of(layout, layout.group),
                      mode,
                      INGOT_KERNEL(gemm_tile)(mode, rows),
                      weights.source,
                      nullptr,
                      nullptr};
    InTasks<Gemm>(job, weights.bytes * rows < kAlone ? 1 : threads).run();
  });
}

void multiply_int8(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, bool dots,
                   std::size_t threads) {
  const MatmulLayout& layout = weights.layout;
  const std::size_t fours = blocks_of(layout, kInt8Block * kInt8Sums);
  in_parts(layout, x, count, out, kInt8Count, [&](const void* part, std::size_t rows, const MatmulOutput& to) {
    const Int8Job job{layout, weights.codes, to, part, to.type, rows, fours, blocks_of(layout, layout.group), dots,
                      nullptr, nullptr, nullptr, nullptr};
    InTasks<Int8>(job, weights.bytes * rows < kAlone ? 1 : threads).run();
  });
}

}  // namespace ingot
