#include <algorithm>
#include <cstdlib>
#include <optional>

#include "bind/products.h"
#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/affine_gemm.h"
#include "kernels/affine_matmul.h"

namespace {

using ingot::Dtype;
using ingot::GemmMode;
using ingot::MatmulLayout;
using ingot::MatmulOutput;
using ingot::MatmulWeights;
using ingot::ZeroKind;

constexpr std::size_t kMostColumns = 64;               // of x
constexpr std::size_t kTaskRows = 64;                  // that a thread takes at least: whole cache lines of output
struct Call {
  const MatmulLayout& at;
  const MatmulWeights& weights;
  const float* prepared;
  std::size_t count;
  bool exact;  // products of x and codes
  const MatmulOutput& out;
  decltype(&ingot::baseline::matmul_rows) rows;
  const ingot::Cuts cuts;

  static void task(void* self, std::size_t index) {
    const Call& call = *static_cast<Call*>(self);
    const std::size_t first = call.cuts.first(index) * kTaskRows, last = call.cuts.first(index + 1) * kTaskRows;
    call.rows(call.at, call.weights, call.prepared, call.count, call.exact, first, std::min(last, call.at.rows), call.out);
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
    const Product product(at_, x, bias, out, dtype, bias_dtype);
    require(product.count <= kMostColumns, "expected at most 64 x cols");
    nb::gil_scoped_release release;
    float* prepared = ingot::hold_scratch(product.count * at_.prepared);
    INGOT_KERNEL(matmul_prepare)(at_, product.x, product.out.type, product.count, prepared);
    const bool exact = product.count > 1 && mode(product) != GemmMode::plain;
    if (packed_.size() * product.count < ingot::kAlone) threads = 1;
    Call call{at_, weights_, prepared, product.count, exact, product.out, INGOT_KERNEL(matmul_rows),
              {(at_.rows + kTaskRows - 1) / kTaskRows, std::max<std::size_t>(threads, 1)}};
    ingot::run_tasks(call.cuts.tasks(), threads, &Call::task, &call);
  }

  void gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads) const {
    require(in_blocks_, "expected groups of whole blocks");
    const Product product(at_, x, bias, out, dtype, bias_dtype);
    nb::gil_scoped_release release;
    const GemmMode way = ingot::mode_here(mode(product));
    ingot::multiply_rows(weights(), product.x, product.count, product.out, way, threads);
  }

  void int8(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads, bool dots) const {
    require(in_blocks_, "expected groups of whole blocks");
    require(std::abs(at_.zero_point) <= ingot::kInt8Center, "expected a zero point of at most 2^15");
    const Product product(at_, x, bias, out, dtype, bias_dtype);
    dots = dots && ingot::has_dots(ingot::current_isa());
    nb::gil_scoped_release release;
    ingot::multiply_int8(weights(), product.x, product.count, product.out, dots, threads);
  }

 private:
  ingot::Weights weights() const { return {at_, weights_, nullptr, packed_.size()}; }

  // How products with x may be added, wherever: any product of it and a code is exact in f32 but for `plain`.
  GemmMode mode(const Product& product) const {
    const int half = at_.is_signed ? 1 << (at_.bits - 1) : 0, most = (1 << at_.bits) - 1;
    if (-half - at_.zero_point < -256 || most - half - at_.zero_point > 256) return GemmMode::plain;
    return INGOT_KERNEL(gemm_mode)(product.x, product.out.type, product.count * at_.cols, ingot::kCodesReach);
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
