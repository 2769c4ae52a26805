#include "core/trellis.h"

#include <optional>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using ingot::Dtype;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutMatrix = Written<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutWindows = Written<std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_bits(int bits) { require(bits >= 2 && bits <= 4, "expected 2 to 4 bits"); }

void decode(const InBytes& words, int bits, std::size_t rows, std::size_t group, const In<float>& values, const Matrix& scales,
            std::size_t first, const OutArray& out, std::string_view dtype) {
  const Dtype type = float_type(dtype);
  require_bits(bits);
  require(type != Dtype::f64 && out.ndim() == 2, "expected a matrix as target, in f32, f16 or bf16");
  require_elements(out, type, "expected an aligned output of the named type");
  const std::size_t count = out.shape(0), cols = out.shape(1);
  require(rows >= 1 && cols >= 1 && group >= 1 && cols % group == 0, "expected rows, columns and a group that divides them");
  require(first <= rows && count <= rows - first, "expected rows of the band");
  require(values.size() == ingot::kTrellisStates, "expected 4096 values");
  require(scales.shape(0) == count && scales.shape(1) == cols / group, "expected a scale for every group");
  std::size_t positions = 0, bytes = 0;
  require(!__builtin_mul_overflow(rows, static_cast<std::size_t>(bits), &positions), "expected fewer rows");
  positions = positions / 16 + (positions % 16 != 0);
  require(
      !__builtin_mul_overflow(2 * positions, cols, &bytes) && positions < ~std::size_t{0} / 2 && words.size() == bytes,
      "expected as many bytes as the streams fill");
  const ingot::TrellisBand band{rows, cols, group, bits, words.data()};
  nb::gil_scoped_release release;
  INGOT_KERNEL(trellis_decode)(band, values.data(), scales.data(), first, count, out.data(), type);
}

ingot::TrellisColumns columns(int bits, std::size_t group, const In<float>& values, const In<float>& weights,
                              const OutMatrix& scales, const OutWindows& windows) {
  const std::size_t cols = windows.shape(0), rows = windows.shape(1);
  require_bits(bits);
  require(cols >= 1 && rows >= 1 && group >= 1, "expected rows, columns and a group of them");
  require(values.size() == ingot::kTrellisStates, "expected 4096 values");
  require(weights.size() == rows, "expected a weight for every row");
  require(scales.shape(0) == (cols - 1) / group + 1 && scales.shape(1) == rows, "expected a scale for every group");
  return {cols, rows, group, bits, values.data(), weights.data(), scales.data(), windows.data()};
}

template <class Array>
bool have_shapes(const Array& array, const OutWindows& windows) {
  return array.shape(0) == windows.shape(0) && array.shape(1) == windows.shape(1);
}

void search(int bits, std::size_t group, const In<float>& values, const In<float>& weights, const OutMatrix& scales,
            const OutWindows& windows, const Matrix& target, bool open) {
  const ingot::TrellisColumns to = columns(bits, group, values, weights, scales, windows);
  require(have_shapes(target, windows), "expected matrices of one shape");
  nb::gil_scoped_release release;
  INGOT_KERNEL(trellis_search)(to, target.data(), open);
}

// Optional links of rows.
ingot::TrellisLinks links(const ingot::TrellisColumns& to, const std::optional<Matrix>& below,
                          const std::optional<In<float>>& diagonal, const std::optional<Matrix>& shift) {
  if (!below || !diagonal) return {nullptr, nullptr, nullptr};
  require(below->shape(0) == to.rows && below->shape(1) == to.rows && diagonal->size() == to.rows,
          "expected links of the band's rows");
  require(!shift || (shift->shape(0) == to.cols && shift->shape(1) == to.rows), "expected a shift of every target");
  return {below->data(), diagonal->data(), shift ? shift->data() : nullptr};
}

void feedback(int bits, std::size_t group, const In<float>& values, const In<float>& weights, const OutMatrix& scales,
              const OutWindows& windows, std::size_t first, std::size_t last, const Matrix& target,
              const OutMatrix& targets, const Matrix& factor, const OutMatrix& errors,
              const std::optional<Matrix>& below, const std::optional<In<float>>& diagonal,
              const std::optional<Matrix>& shift) {
  const ingot::TrellisColumns to = columns(bits, group, values, weights, scales, windows);
  require(have_shapes(target, windows) && have_shapes(targets, windows) && have_shapes(errors, windows),
          "expected matrices of one shape");
  require(factor.shape(0) == to.cols && factor.shape(1) == to.cols, "expected a square factor");
  require(first <= last && last <= to.cols, "expected columns that are there");
  const ingot::TrellisLinks linked = links(to, below, diagonal, shift);
  nb::gil_scoped_release release;
  INGOT_KERNEL(trellis_feedback)(to, linked, first, last, target.data(), targets.data(), factor.data(), errors.data());
}

}  // namespace

void bind_trellis(nb::module_& m) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  define(m, "trellis_decode", &decode, array("words"), nb::arg("bits"), nb::arg("rows"), nb::arg("group"), array("values"),
         array("scales"), nb::arg("first"), array("out"), nb::arg("dtype"),
         "Decode rows of a band of `rows` rows to scale * value, rounded once.");
  define(m, "trellis_search", &search, nb::arg("bits"), nb::arg("group"), array("values"), array("weights"), array("scales"),
         array("windows"), array("wanted"), nb::arg("open"),
         "The windows of least error of every column; with open of streams that do not go round.");
  define(m, "trellis_feedback", &feedback, nb::arg("bits"), nb::arg("group"), array("values"), array("weights"),
         array("scales"), array("windows"), nb::arg("first"), nb::arg("last"), array("wanted"), array("targets"),
         array("factor"), array("errors"), nb::arg("below").noconvert() = nb::none(),
         nb::arg("diagonal").noconvert() = nb::none(), nb::arg("shift").noconvert() = nb::none(),
         "Search columns one after the other, each error added to the targets of the next.");
}
