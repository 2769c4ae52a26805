#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/affine_gemm.h"
#include "kernels/affine_int8.h"
#include "kernels/affine_matmul.h"

namespace {

using ingot::Dtype;
using ingot::GemmJob;
using ingot::GemmMode;
using ingot::GemmScratch;
using ingot::Int8Job;
using ingot::Int8Scratch;
using ingot::MatmulLayout;
using ingot::MatmulOutput;
using ingot::MatmulWeights;
using ingot::ZeroKind;

constexpr std::size_t kMost = std::size_t{1} << 56;    // keeps products with bits and element sizes below 2^63
constexpr std::size_t kMostColumns = 64;               // of x
constexpr std::size_t kTaskRows = 64;                  // that a thread takes at a time: whole cache lines of output
constexpr std::size_t kSmall = std::size_t{1} << 15;  // bytes of codes, times columns, not worth a second thread

// Memory of the calling thread for its prepared x, kept between calls: at most 4.5 bytes per element of 64 rows of x, or 4
// of 256, and what threads work in.
class Scratch {
 public:
  float* hold(std::size_t count) {
    if (count > size_) {
      memory_.reset();
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

thread_local Scratch scratch;

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

// Products of many rows of x: they are packed, a tile a task, then multiplied, `kGemmRows` rows of the weights a task.
class Gemm {
 public:
  // `memory` holds `floats(...)`.
  Gemm(const GemmJob& job, std::size_t threads, float* memory)
      : job_(job), threads_(threads), scratch_(reinterpret_cast<GemmScratch*>(memory)), slots_(threads) {
    float* rest = memory + threads * kScratch;
    job_.sums = job.at.zero == ZeroKind::none ? nullptr : rest;
    job_.packed = rest + (job_.sums ? job.groups * ingot::kGemmCount : 0);
  }

  static std::size_t floats(const GemmJob& job, std::size_t threads) {
    const std::size_t rows = (job.count + 31) / 32 * 32;  // AMX takes whole tiles
    return threads * kScratch + job.groups * ingot::kGemmCount + rows * job.blocks * ingot::kGemmBlock;
  }

  static std::size_t tasks(const MatmulLayout& at) { return (at.rows + ingot::kGemmRows - 1) / ingot::kGemmRows; }

  void run() {
    const std::size_t tile = INGOT_KERNEL(gemm_tile)(job_.mode);
    ingot::run_tasks((job_.count + tile - 1) / tile, threads_, &Gemm::pack, this);
    ingot::run_tasks(tasks(job_.at), threads_, &Gemm::rows, this);
  }

 private:
  static constexpr std::size_t kScratch = sizeof(GemmScratch) / sizeof(float);

  static void pack(void* self, std::size_t index) { INGOT_KERNEL(gemm_pack)(static_cast<Gemm*>(self)->job_, index); }

  static void rows(void* self, std::size_t index) {
    Gemm& gemm = *static_cast<Gemm*>(self);
    const std::size_t first = index * ingot::kGemmRows, slot = gemm.slots_.take();
    INGOT_KERNEL(gemm_rows)
    (gemm.job_, first, std::min(first + ingot::kGemmRows, gemm.job_.at.rows), gemm.scratch_[slot]);
    gemm.slots_.give(slot);
  }

  GemmJob job_;
  const std::size_t threads_;
  GemmScratch* const scratch_;
  Slots slots_;
};

// Products of x in 8 bits: a tile of x a task, then `kInt8Rows` rows of the weights a task.
class Int8 {
 public:
  // `memory` holds `floats(...)`.
  Int8(const Int8Job& job, std::size_t threads, float* memory)
      : job_(job), threads_(threads), scratch_(reinterpret_cast<Int8Scratch*>(memory)), slots_(threads) {
    if (job.count <= kFew) each_ = std::max<std::size_t>(1, tasks(job.at) / (4 * threads));
    const std::size_t blocks = places(job);
    job_.codes = reinterpret_cast<std::int8_t*>(memory + threads * kScratch);
    job_.steps = memory + threads * kScratch + blocks * kCodes;
    job_.starts = reinterpret_cast<std::int32_t*>(job_.steps + blocks);
    job_.sums = job.at.zero == ZeroKind::none ? nullptr : job_.steps + 2 * blocks;
  }

  static std::size_t floats(const Int8Job& job, std::size_t threads) {
    return threads * kScratch + places(job) * (kCodes + 3);
  }

  static std::size_t tasks(const MatmulLayout& at) { return (at.rows + ingot::kInt8Rows - 1) / ingot::kInt8Rows; }

  void run() {
    const std::size_t tile = INGOT_KERNEL(int8_tile)();
    ingot::run_tasks((job_.count + tile - 1) / tile, threads_, &Int8::prepare, this);
    ingot::run_tasks((tasks(job_.at) + each_ - 1) / each_, threads_, &Int8::rows, this);
  }

 private:
  static constexpr std::size_t kScratch = sizeof(Int8Scratch) / sizeof(float);
  static constexpr std::size_t kCodes = ingot::kInt8Block / sizeof(float);

  static std::size_t places(const Int8Job& job) { return job.fours * ingot::kInt8Sums * job.count; }

  static void prepare(void* self, std::size_t index) { INGOT_KERNEL(int8_prepare)(static_cast<Int8*>(self)->job_, index); }

  static void rows(void* self, std::size_t index) {
    Int8& product = *static_cast<Int8*>(self);
    const std::size_t all = product.job_.at.rows, step = ingot::kInt8Rows * product.each_;
    const std::size_t stop = std::min((index + 1) * step, all), slot = product.slots_.take();
    for (std::size_t first = index * step; first < stop; first += ingot::kInt8Rows)
      INGOT_KERNEL(int8_rows)(product.job_, first, std::min(first + ingot::kInt8Rows, stop), product.scratch_[slot]);
    product.slots_.give(slot);
  }

  // Rows of x for which reading weights takes longest: a thread reads as many of them in a row as may be.
  static constexpr std::size_t kFew = 4;

  Int8Job job_;
  std::size_t each_ = 1;  // `kInt8Rows` rows of the weights that one task takes
  const std::size_t threads_;
  Int8Scratch* const scratch_;
  Slots slots_;
};

struct Call {
  const MatmulLayout& at;
  const MatmulWeights& weights;
  const float* prepared;
  std::size_t count;
  bool exact;  // products of x and codes
  const MatmulOutput& out;
  decltype(&ingot::baseline::matmul_rows) rows;

  static void task(void* self, std::size_t index) {
    const Call& call = *static_cast<Call*>(self);
    const std::size_t first = index * kTaskRows;
    call.rows(call.at, call.weights, call.prepared, call.count, call.exact, first, std::min(first + kTaskRows, call.at.rows),
              call.out);
  }
};

class Matrix {
 public:
  Matrix(InBytes packed, InArray scales, std::optional<InArray> zeros, std::size_t rows, std::size_t cols,
         std::size_t group, int bits, bool is_signed, bool per_tensor, std::size_t row_bytes, bool offset,
         int zero_point, std::string_view scale_dtype)
      : packed_(packed), scales_(scales), zeros_(zeros) {
    require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "expected 2, 3, 4 or 8 bits");
    require(cols >= 1 && cols <= kMost && rows <= kMost && row_bytes <= kMost && group >= 1, "expected sizes in range");
    require(row_bytes >= (cols * static_cast<std::size_t>(bits) + 7) / 8, "expected rows long enough for their codes");
    require(zero_point >= -(1 << 20) && zero_point <= 1 << 20, "expected a zero point in range");
    const std::size_t per_lane = 32 / static_cast<std::size_t>(bits);
    direct_ = 32 % bits == 0 && bits >= 4 && (per_tensor || group >= cols || group % per_lane == 0);
    in_blocks_ = per_tensor || group >= cols || group % ingot::kGemmBlock == 0;
    require(direct_ || in_blocks_, "expected groups of whole lanes or blocks");
    std::size_t bytes = 0, count = 0;
    require(!__builtin_mul_overflow(rows, row_bytes, &bytes) && packed.size() == bytes,
            "expected rows * row_bytes packed bytes");
    require(!__builtin_mul_overflow(rows, cols / group + (cols % group != 0), &count), "expected fewer groups");
    const Dtype type = float_type(scale_dtype);
    require(type != Dtype::f64, "expected scales of type f32, f16 or bf16");
    require_elements(scales, type, "expected aligned scales of the named type");
    require(scales.size() == (per_tensor ? 1 : count), "expected one scale per group");
    if (zeros) {
      require_elements(*zeros, type, "expected aligned zeros of the scales' type");
      require(zeros->size() == scales.size(), "expected one zero per scale");
    }
    group = per_tensor ? cols : std::min(group, cols);
    const ZeroKind kind = !zeros ? ZeroKind::none : offset ? ZeroKind::offset : ZeroKind::point;
    const std::size_t width = ingot::kLanes * per_lane, blocks = cols / width + (cols % width != 0);
    at_ = {rows, cols, group, row_bytes, bits, is_signed, per_tensor, per_tensor || group >= cols, zero_point, kind,
           per_lane, blocks, (blocks * (per_lane + 1) + 1) * ingot::kLanes};
    weights_ = {packed_.data(), scales_.data(), zeros_ ? zeros_->data() : nullptr, type};
  }

  void matmul(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
              std::string_view bias_dtype, std::size_t threads) const {
    require(direct_, "expected 4 or 8 bits and groups of whole lanes");
    require(x.ndim() == 2 && x.shape(0) <= kMostColumns, "expected at most 64 x cols");
    const Dtype type = float_type(dtype);
    const MatmulOutput to = output(x, bias, out, type, float_type(bias_dtype));
    const std::size_t count = x.shape(0);
    nb::gil_scoped_release release;
    float* prepared = scratch.hold(count * at_.prepared);
    INGOT_KERNEL(matmul_prepare)(at_, x.data(), type, count, prepared);
    const bool exact = count > 1 && mode(x.data(), type, count * at_.cols) != GemmMode::plain;
    Call call{at_, weights_, prepared, count, exact, to, INGOT_KERNEL(matmul_rows)};
    if (packed_.size() * count < kSmall) threads = 1;
    ingot::run_tasks((at_.rows + kTaskRows - 1) / kTaskRows, threads, &Call::task, &call);
  }

  void gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads) const {
    const std::size_t blocks = blocks_of(ingot::kGemmBlock), groups = blocks_of(at_.group);
    in_parts(x, bias, out, dtype, bias_dtype, ingot::kGemmCount, [&](const Part& part) {
      const GemmMode found = mode(part.x, part.out.type, part.rows * at_.cols);
      const GemmJob job{at_, weights_, part.out, part.x, part.out.type, part.rows, blocks, groups, found, nullptr, nullptr};
      const std::size_t some = std::max<std::size_t>(1, std::min(threads, Gemm::tasks(at_)));
      Gemm(job, some, scratch.hold(Gemm::floats(job, some))).run();
    });
  }

  void int8(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads, bool dots) const {
    require(std::abs(at_.zero_point) <= ingot::kInt8Center, "expected a zero point of at most 2^15");
    const std::size_t fours = blocks_of(ingot::kInt8Block * ingot::kInt8Sums), groups = blocks_of(at_.group);
    dots = dots && ingot::has_dots(ingot::current_isa());
    in_parts(x, bias, out, dtype, bias_dtype, ingot::kInt8Count, [&](const Part& part) {
      const Int8Job job{at_, weights_, part.out, part.x, part.out.type, part.rows, fours, groups, dots,
                        nullptr, nullptr, nullptr, nullptr};
      std::size_t some = std::max<std::size_t>(1, std::min(threads, Int8::tasks(at_)));
      if (packed_.size() * part.rows < kSmall) some = 1;
      Int8(job, some, scratch.hold(Int8::floats(job, some))).run();
    });
  }

 private:
  // Some rows of x, and where their products go.
  struct Part {
    const void* x;
    std::size_t rows;
    MatmulOutput out;
  };

  // Calls `multiply` for so many rows of x at a time, without the interpreter's lock.
  template <class Multiply>
  void in_parts(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
                std::string_view bias_dtype, std::size_t most, const Multiply& multiply) const {
    require(in_blocks_, "expected groups of whole blocks");
    require(x.ndim() == 2, "expected rows of x");
    const Dtype type = float_type(dtype);
    const MatmulOutput to = output(x, bias, out, type, float_type(bias_dtype));
    const std::size_t count = x.shape(0), size = type == Dtype::f32 ? 4 : 2;
    nb::gil_scoped_release release;
    for (std::size_t m = 0; m < count; m += most) {
      MatmulOutput part = to;
      part.values = static_cast<std::uint8_t*>(to.values) + m * at_.rows * size;
      multiply(Part{static_cast<const std::uint8_t*>(x.data()) + m * at_.cols * size, std::min(most, count - m), part});
    }
  }

  // Of so many columns, the last filled up.
  std::size_t blocks_of(std::size_t columns) const { return at_.cols / columns + (at_.cols % columns != 0); }

  MatmulOutput output(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, Dtype type,
                      Dtype bias_type) const {
    require(type != Dtype::f64 && bias_type != Dtype::f64, "expected values of type f32, f16 or bf16");
    require(x.shape(1) == at_.cols, "expected x of as many columns as the weights");
    require(out.ndim() == 2 && out.shape(0) == x.shape(0) && out.shape(1) == at_.rows, "expected an output of x's rows x rows");
    require_elements(x, type, "expected aligned values of the named type");
    require_elements(out, type, "expected an aligned output of the named type");
    if (bias) {
      require(bias->ndim() == 1 && bias->shape(0) == at_.rows, "expected one bias per row");
      require_elements(*bias, bias_type, "expected an aligned bias of the named type");
    }
    return {bias ? bias->data() : nullptr, bias_type, out.data(), type};
  }

  // The fastest that gives the bits of the plain one.
  GemmMode mode(const void* x, Dtype type, std::size_t n) const {
    const int half = at_.is_signed ? 1 << (at_.bits - 1) : 0, most = (1 << at_.bits) - 1;
    if (-half - at_.zero_point < -256 || most - half - at_.zero_point > 256) return GemmMode::plain;
    const GemmMode found = INGOT_KERNEL(gemm_mode)(x, type, n);
    const bool tiles = ingot::current_isa() == ingot::Isa::v4 && ingot::has_tiles();
    return found == GemmMode::tiles && !tiles ? GemmMode::fused : found;
  }

  const InBytes packed_;
  const InArray scales_;
  const std::optional<InArray> zeros_;
  MatmulLayout at_;
  MatmulWeights weights_;
  bool direct_ = false, in_blocks_ = false;  // the products that take this layout
};

}  // namespace

void bind_affine_matmul(nb::module_& m) {
  nb::class_<Matrix>(m, "PackedMatrix", "Packed weights to multiply with; raises ValueError where sizes do not fit.")
      .def(nb::init<InBytes, InArray, std::optional<InArray>, std::size_t, std::size_t, std::size_t, int, bool, bool,
                    std::size_t, bool, int, std::string_view>(),
           nb::arg("packed"), nb::arg("scales"), nb::arg("zeros").none(), nb::kw_only(), nb::arg("rows"), nb::arg("cols"),
           nb::arg("group"), nb::arg("bits"), nb::arg("signed"), nb::arg("per_tensor"), nb::arg("row_bytes"),
           nb::arg("offset"), nb::arg("zero_point"), nb::arg("scale_dtype"))
      .def("matmul", guarded(&Matrix::matmul), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"),
           "out[m, row] = sum over k of x[m, k] * w[row, k] + bias[row], in f32, rounded once; the same for any threads.")
      .def("gemm", guarded(&Matrix::gemm), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), "As matmul, for any number of rows, in another order of sums.")
      .def("int8", guarded(&Matrix::int8), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), nb::arg("dots") = true,
           "As gemm, of x rounded to 8 bits a block of 32 columns. Without dots, by no instructions beside the instruction "
           "set's own, which changes no bit.");
}
