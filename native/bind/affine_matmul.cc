#include <algorithm>

#include "bind/packed_matrix.h"
#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/affine_gemm.h"
#include "kernels/affine_matmul.h"

namespace {

using ingot::MatmulLayout;
using ingot::MatmulOutput;
using ingot::MatmulWeights;

constexpr std::size_t kMostColumns = 64;               // rows of x
constexpr std::size_t kTaskRows = 64;                  // minimum for a thread: complete cache lines of output
struct Call {
  const MatmulLayout& layout;
  const MatmulWeights& weights;
  const float* prepared;
  std::size_t count;
  bool exact;  // minimum number of products of x and codes for several threads
  const MatmulOutput& out;
  decltype(&ingot::baseline::matmul_rows) rows;
  const ingot::Cuts cuts;

  static void task(void* self, std::size_t index) {
    const Call& call = *static_cast<Call*>(self);
    const std::size_t first = call.cuts.first(index) * kTaskRows, last = call.cuts.first(index + 1) * kTaskRows;
    call.rows(call.layout, call.weights, call.prepared, call.count, call.exact, first, std::min(last, call.layout.rows),
              call.out);
  }
};

}  // namespace

void PackedMatrix::matmul(const InArray& x, const std::optional<InArray>& bias, const OutArray& out,
                          std::string_view dtype, std::string_view bias_dtype, std::size_t threads) const {
  require(direct_, "expected 4 or 8 bits and groups of whole lanes");
  const Product product(at_, x, bias, out, dtype, bias_dtype);
  require(product.count <= kMostColumns, "expected at most 64 x cols");
  nb::gil_scoped_release release;
  float* prepared = ingot::hold_scratch(product.count * at_.prepared);
  INGOT_KERNEL(matmul_prepare)(at_, product.x, product.out.type, product.count, prepared);
  const bool exact = product.count > 1 && mode(product) != ingot::GemmMode::plain;
  if (packed_.size() * product.count < ingot::kAlone) threads = 1;
  Call call{at_, weights_, prepared, product.count, exact, product.out, INGOT_KERNEL(matmul_rows),
            {(at_.rows + kTaskRows - 1) / kTaskRows, std::max<std::size_t>(threads, 1)}};
  ingot::run_tasks(call.cuts.tasks(), threads, &Call::task, &call);
}

void PackedMatrix::gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out,
                        std::string_view dtype, std::string_view bias_dtype, std::size_t threads) const {
  require(in_blocks_, "expected groups of whole blocks");
  const Product product(at_, x, bias, out, dtype, bias_dtype);
  nb::gil_scoped_release release;
  const ingot::GemmMode way = ingot::mode_here(mode(product));
  ingot::multiply_rows(weights(), product.x, product.count, product.out, way, threads);
}

void PackedMatrix::int8(const InArray& x, const std::optional<InArray>& bias, const OutArray& out,
                        std::string_view dtype, std::string_view bias_dtype, std::size_t threads, bool dots) const {
  require(in_blocks_, "expected groups of whole blocks");
  require(std::abs(at_.zero_point) <= ingot::kInt8Center, "expected a zero point of at most 2^15");
  const Product product(at_, x, bias, out, dtype, bias_dtype);
  dots = dots && ingot::has_dots(ingot::current_isa());
  nb::gil_scoped_release release;
  ingot::multiply_int8(weights(), product.x, product.count, product.out, dots, threads);
}

void bind_affine_matmul(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix", "Packed weights to multiply with; raises ValueError where sizes do not fit.")
      .def(nb::init<InBytes, InArray, std::optional<InArray>, std::size_t, std::size_t, std::size_t, int, bool, bool,
                    std::size_t, bool, int, std::string_view>(),
           nb::arg("packed"), nb::arg("scales"), nb::arg("zeros").none(), nb::kw_only(), nb::arg("rows"), nb::arg("cols"),
           nb::arg("group"), nb::arg("bits"), nb::arg("signed"), nb::arg("per_tensor"), nb::arg("row_bytes"),
           nb::arg("offset"), nb::arg("zero_point"), nb::arg("scale_dtype"))
      .def("matmul", guarded(&PackedMatrix::matmul), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"),
           "out[m, row] = sum over k of x[m, k] * w[row, k] + bias[row], in f32, rounded once; the same for any threads.")
      .def("gemm", guarded(&PackedMatrix::gemm), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), "As matmul, for any number of rows, in another order of sums.")
      .def("int8", guarded(&PackedMatrix::int8), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), nb::arg("dots") = true,
           "As gemm, of x rounded to 8 bits a block of 32 columns. Without dots, by no instructions beside the instruction "
           "set's own, which changes no bit.");
}
