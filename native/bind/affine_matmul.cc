#include <algorithm>
#include <memory>
#include <new>
#include <optional>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/affine_matmul.h"

namespace {

using ingot::Dtype;
using ingot::MatmulLayout;
using ingot::MatmulOutput;
using ingot::MatmulWeights;
using ingot::ZeroKind;

constexpr std::size_t kMost = std::size_t{1} << 56;    // keeps products with bits and element sizes below 2^63
constexpr std::size_t kMostColumns = 64;               // of x
constexpr std::size_t kTaskRows = 64;                  // that a thread takes at a time: whole cache lines of output
constexpr std::size_t kSmall = std::size_t{1} << 15;  // bytes of codes, times columns, not worth a second thread

// Memory of the calling thread for its prepared x, kept between calls: at most 4.5 bytes per element and column.
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

struct Call {
  const MatmulLayout& at;
  const MatmulWeights& weights;
  const float* prepared;
  std::size_t count;
  const MatmulOutput& out;
  decltype(&ingot::baseline::matmul_rows) rows;

  static void task(void* self, std::size_t index) {
    const Call& call = *static_cast<Call*>(self);
    const std::size_t first = index * kTaskRows;
    call.rows(call.at, call.weights, call.prepared, call.count, first, std::min(first + kTaskRows, call.at.rows),
              call.out);
  }
};

class Matrix {
 public:
  Matrix(InBytes packed, InArray scales, std::optional<InArray> zeros, std::size_t rows, std::size_t cols,
         std::size_t group, int bits, bool is_signed, bool per_tensor, std::size_t row_bytes, bool offset,
         int zero_point, std::string_view scale_dtype)
      : packed_(packed), scales_(scales), zeros_(zeros) {
    require(bits == 4 || bits == 8, "expected 4 or 8 bits");
    require(cols >= 1 && cols <= kMost && rows <= kMost && row_bytes <= kMost && group >= 1, "expected sizes in range");
    require(row_bytes >= (cols * static_cast<std::size_t>(bits) + 7) / 8, "expected rows long enough for their codes");
    require(zero_point >= -(1 << 20) && zero_point <= 1 << 20, "expected a zero point in range");
    const std::size_t per_lane = 32 / static_cast<std::size_t>(bits);
    require(per_tensor || group >= cols || group % per_lane == 0, "expected groups of whole lanes");
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
    group = std::min(group, cols);
    const ZeroKind kind = !zeros ? ZeroKind::none : offset ? ZeroKind::offset : ZeroKind::point;
    const std::size_t width = ingot::kLanes * per_lane, blocks = cols / width + (cols % width != 0);
    at_ = {rows, cols, group, row_bytes, bits, is_signed, per_tensor, per_tensor || group >= cols, zero_point, kind,
           per_lane, blocks, (blocks * (per_lane + 1) + 1) * ingot::kLanes};
    weights_ = {packed_.data(), scales_.data(), zeros_ ? zeros_->data() : nullptr, type};
  }

  void matmul(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
              std::string_view bias_dtype, std::size_t threads) const {
    const Dtype type = float_type(dtype), bias_type = float_type(bias_dtype);
    require(type != Dtype::f64 && bias_type != Dtype::f64, "expected values of type f32, f16 or bf16");
    require(x.ndim() == 2 && x.shape(1) == at_.cols && x.shape(0) <= kMostColumns, "expected at most 64 x cols");
    require(out.ndim() == 2 && out.shape(0) == x.shape(0) && out.shape(1) == at_.rows, "expected an output of x's rows x rows");
    require_elements(x, type, "expected aligned values of the named type");
    require_elements(out, type, "expected an aligned output of the named type");
    if (bias) {
      require(bias->ndim() == 1 && bias->shape(0) == at_.rows, "expected one bias per row");
      require_elements(*bias, bias_type, "expected an aligned bias of the named type");
    }
    const MatmulOutput to{bias ? bias->data() : nullptr, bias_type, out.data(), type};
    const std::size_t count = x.shape(0);
    nb::gil_scoped_release release;
    float* prepared = scratch.hold(count * at_.prepared);
    INGOT_KERNEL(matmul_prepare)(at_, x.data(), type, count, prepared);
    Call call{at_, weights_, prepared, count, to, INGOT_KERNEL(matmul_rows)};
    if (packed_.size() * count < kSmall) threads = 1;
    ingot::run_tasks((at_.rows + kTaskRows - 1) / kTaskRows, threads, &Call::task, &call);
  }

 private:
  const InBytes packed_;
  const InArray scales_;
  const std::optional<InArray> zeros_;
  MatmulLayout at_;
  MatmulWeights weights_;
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
           "out[m, row] = sum over k of x[m, k] * w[row, k] + bias[row], in f32, rounded once; the same for any threads.");
}
