#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "core/rounding.h"

#include <cmath>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "core/pool.h"

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutMatrix = Written<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutOwn = Written<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutCodes = Written<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = In<std::int32_t>;

// The values of a grid, and the storage of its scales.
struct PyGrid {
  std::vector<float> levels;
  ingot::Grid grid;

  PyGrid(const PyGrid&) = delete;  // the codebook values at the levels
  PyGrid(const In<float>& entries, bool uniform, std::string_view zeros, bool turned, std::string_view scales,
         std::tuple<float, float, float> steps)
      : levels(entries.data(), entries.data() + entries.size()) {
    require(levels.size() >= 2 && levels.size() <= ingot::kMostLevels && (levels.size() & (levels.size() - 1)) == 0,
            "expected 2^bits levels");
    for (std::size_t i = 1; i < levels.size(); ++i)
      require(uniform ? levels[i] == levels[i - 1] + 1 : levels[i] >= levels[i - 1], "expected levels that ascend");
    require(zeros == "none" || zeros == "points" || zeros == "offsets", "expected zeros none, points or offsets");
    require(zeros != "points" || uniform, "expected integers beside zero points");
    const auto [low, high, minimum] = steps;
    grid = {levels.data(), levels.size(), uniform, zeros == "offsets", turned, float_type(scales), low, high, minimum};
  }
};

constexpr std::size_t kColumns = 8 * ingot::kPanel;  // of a product that a thread computes at once

void multiply(const Matrix& a, const Matrix& b, const OutMatrix& out, std::size_t threads) {
  require(a.shape(1) == b.shape(0) && out.shape(0) == a.shape(0) && out.shape(1) == b.shape(1), "expected shapes that fit");
  nb::gil_scoped_release release;
  std::fill_n(out.data(), out.shape(0) * out.shape(1), 0.0f);
  ingot::in_ranges(b.shape(1), kColumns, threads, [&](std::size_t first, std::size_t last) {
    INGOT_KERNEL(matrix_multiply_add)(a.data(), a.shape(1), b.data() + first, b.shape(1), out.data() + first,
                                      out.shape(1), a.shape(0), a.shape(1), last - first);
  });
}

// out[:, to:to+count] += a[:, first:last] @ b[first:last, to:to+count]
void multiply_add(const Matrix& a, const Matrix& b, const OutMatrix& out, std::size_t first, std::size_t last,
                  std::size_t to, std::size_t count, std::size_t threads) {
  require(a.shape(0) == out.shape(0) && first <= last && last <= a.shape(1) && last <= b.shape(0), "expected shapes that fit");
  require(to <= out.shape(1) && count <= out.shape(1) - to && out.shape(1) == b.shape(1), "expected columns that are there");
  nb::gil_scoped_release release;
  ingot::in_ranges(count, kColumns, threads, [&](std::size_t start, std::size_t stop) {
    INGOT_KERNEL(matrix_multiply_add)(a.data() + first, a.shape(1), b.data() + first * b.shape(1) + to + start,
                                      b.shape(1), out.data() + to + start, out.shape(1), out.shape(0), last - first,
                                      stop - start);
  });
}

bool factor(const OutMatrix& a, const OutOwn& diagonal, std::size_t threads) {
  require(a.shape(0) == a.shape(1) && diagonal.size() == a.shape(0),
          "expected a square matrix and a number per column");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(matrix_factor)(a.data(), diagonal.data(), a.shape(0), threads);
}

std::size_t scales(const PyGrid& grid, const Matrix& values, std::size_t first, std::size_t last, const In<float>& weights,
                   const OutMatrix& result, const std::optional<OutMatrix>& zeros, std::size_t group) {
  require(first < last && last <= values.shape(1) && weights.size() == last - first, "expected a weight per column");
  require(result.shape(0) == values.shape(0) && group < result.shape(1), "expected a scale per group");
  require(!zeros || (zeros->shape(0) == result.shape(0) && zeros->shape(1) == result.shape(1)),
          "expected a zero per scale");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(rounding_scales)(grid.grid, values.data() + first, values.shape(1), values.shape(0), last - first,
                                       weights.data(), result.data() + group, zeros ? zeros->data() + group : nullptr,
                                       result.shape(1));
}

// Units of scales and offsets that are stored as integers times a unit.
struct Units {
  std::optional<OutMatrix> scales, zeros;
};

ingot::Rounded rounded(const OutCodes& codes, const Groups& groups, const OutMatrix& scales,
                       const std::optional<OutMatrix>& zeros, const Units& units = {}) {
  const std::size_t count = scales.shape(1);
  require(scales.shape(0) == codes.shape(0) && groups.size() == codes.shape(1), "expected a group for every column");
  for (const std::optional<OutMatrix>* item : {&zeros, &units.scales, &units.zeros})
    require(!*item || ((*item)->shape(0) == scales.shape(0) && (*item)->shape(1) == count),
            "expected a zero, a unit per scale");
  require(!units.zeros || zeros, "expected units of zeros that are there");
  for (std::size_t i = 0; i < groups.size(); ++i)
    require(groups.data()[i] >= 0 && static_cast<std::size_t>(groups.data()[i]) < count, "expected numbers of groups");
  const auto data = [](const std::optional<OutMatrix>& array) { return array ? array->data() : nullptr; };
  return {codes.shape(0), codes.shape(1), count,        groups.data(),      codes.data(),
          scales.data(),  data(zeros),    data(units.scales), data(units.zeros)};
}

bool have_shapes(const OutCodes& codes, std::initializer_list<std::pair<std::size_t, std::size_t>> shapes) {
  for (const auto& [rows, cols] : shapes)
    if (rows != codes.shape(0) || cols != codes.shape(1)) return false;
  return true;
}

void require_codes(const ingot::Rounded& to, const PyGrid& grid) {
  for (std::size_t i = 0; i < to.rows * to.cols; ++i) require(to.codes[i] < grid.levels.size(), "expected codes of the grid");
}

void nearest(const PyGrid& grid, const Matrix& values, const OutCodes& codes, const Groups& groups, const OutMatrix& scales,
             const std::optional<OutMatrix>& zeros) {
  require(have_shapes(codes, {{values.shape(0), values.shape(1)}}), "expected matrices of one shape");
  const ingot::Rounded to = rounded(codes, groups, scales, zeros);
  nb::gil_scoped_release release;
  INGOT_KERNEL(rounding_nearest)(grid.grid, to, values.data());
}

void feedback(const PyGrid& grid, std::tuple<std::size_t, std::size_t, std::size_t> columns, const Matrix& target,
              const OutMatrix& targets, const Matrix& factor, const OutMatrix& errors, const OutCodes& codes,
              const Groups& groups, const OutMatrix& scales, const std::optional<OutMatrix>& zeros,
              const std::optional<Matrix>& below, const std::optional<OutMatrix>& shifts,
              const std::optional<OutMatrix>& changes, std::size_t from) {
  require(have_shapes(codes, {{target.shape(0), target.shape(1)}, {targets.shape(0), targets.shape(1)},
                        {errors.shape(0), errors.shape(1)}}), "expected matrices of one shape");
  require(factor.shape(0) == codes.shape(1) && factor.shape(1) == codes.shape(1), "expected a square factor");
  const auto [first, last, end] = columns;
  require(first <= last && last <= end && end <= codes.shape(1), "expected columns that are there");
  const ingot::Rounded to = rounded(codes, groups, scales, zeros);
  ingot::RowLinks links{};
  if (below) {
    require(shifts && changes && shifts->shape(0) == to.rows && changes->shape(0) == to.rows &&
                shifts->shape(1) == changes->shape(1) && from <= first && end - from <= shifts->shape(1),
            "expected a shift and a change of every target");
    require(below->shape(0) == to.rows && below->shape(1) == to.rows, "expected links of the rows");
    links = {below->data(), to.rows, shifts->data() + (first - from), changes->data() + (first - from), shifts->shape(1)};
  }
  nb::gil_scoped_release release;
  INGOT_KERNEL(rounding_feedback)
  (grid.grid, to, {first, last, end, target.data(), targets.data(), factor.data(), errors.data(), links});
}

using Words = Written<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ingot::PairedMatrix paired(const Words& words, std::size_t depth, std::size_t cols) {
  require(depth <= (std::size_t{1} << 31) && cols <= (std::size_t{1} << 31) &&
              words.size() == (cols + ingot::kPanel - 1) / ingot::kPanel * ((depth + 1) / 2) * ingot::kPanel,
          "expected a word for two elements of a column, in full panels");
  return {words.data(), depth, cols};
}

// A scale by a power of two is exact.
void require_unit(float unit) {
  int exponent = 0;
  require(unit > 0 && std::isfinite(1 / unit) && std::frexp(unit, &exponent) == 0.5f, "expected a power of two");
}

void pack_pairs(const Matrix& rows, std::size_t first, std::size_t depth, float unit, const Words& words) {
  require(first <= depth && rows.shape(0) <= depth - first, "expected rows that are there");
  require_unit(unit);
  const ingot::PairedMatrix to = paired(words, depth, rows.shape(1));
  nb::gil_scoped_release release;
  INGOT_KERNEL(pairs_pack)(rows.data(), rows.shape(1), first, rows.shape(0), 1 / unit, to);
}

// out[:, :count] += a[:, first:last] @ the rows of the packed matrix from `row` on, of which the first `count` columns
// are used.
void multiply_pairs(const Matrix& a, std::pair<std::size_t, std::size_t> columns, const Words& words, std::size_t depth,
                    std::size_t row, std::pair<std::size_t, std::size_t> to, float factor, float unit,
                    const OutMatrix& out, std::size_t threads) {
  const auto [first, last] = columns;
  require(a.shape(0) == out.shape(0) && first <= last && last <= a.shape(1), "expected shapes that fit");
  require(row % 2 == 0 && row <= depth && last - first <= depth - row, "expected an even row, and rows that are there");
  require(to.first % ingot::kPanel == 0 && to.first <= to.second && to.second <= out.shape(1), "expected full panels");
  require_unit(factor);
  require_unit(unit);
  const ingot::PairedMatrix b = paired(words, depth, out.shape(1));
  nb::gil_scoped_release release;
  ingot::in_ranges(to.second - to.first, kColumns, threads, [&, first = first, last = last](std::size_t start, std::size_t stop) {
    const std::size_t panels = (to.first + start) / ingot::kPanel * ((depth + 1) / 2) * ingot::kPanel;
    INGOT_KERNEL(pairs_multiply_add)
    (a.data() + first, a.shape(1), {b.words + panels, depth, stop - start}, row, last - first, 1 / factor, unit,
     out.data() + to.first + start, out.shape(1), a.shape(0));
  });
}

void descend(const PyGrid& grid, const Matrix& inputs, const Words& pairs, const std::optional<Matrix>& outputs,
             const Matrix& gradient, const OutMatrix& product, const OutMatrix& change, float unit, bool refit, const OutCodes& codes,
             const Groups& groups, const OutMatrix& scales, const std::optional<OutMatrix>& zeros,
             const std::optional<OutMatrix>& units, const std::optional<OutMatrix>& zero_units, std::size_t threads) {
  const std::size_t rows = codes.shape(0), cols = codes.shape(1);
  require(inputs.shape(0) == cols && inputs.shape(1) == cols &&
              (!outputs || (outputs->shape(0) == rows && outputs->shape(1) == rows)),
          "expected factors of the block's columns and rows");
  require(have_shapes(codes, {{gradient.shape(0), gradient.shape(1)}, {product.shape(0), product.shape(1)},
                        {change.shape(0), change.shape(1)}}),
          "expected matrices of one shape");
  require_unit(unit);
  const ingot::Rounded to = rounded(codes, groups, scales, zeros, {units, zero_units});
  require_codes(to, grid);
  const ingot::PairedMatrix paired_inputs = paired(pairs, cols, cols);
  nb::gil_scoped_release release;
  INGOT_KERNEL(rounding_descend)
  (grid.grid, to,
   {inputs.data(), paired_inputs, outputs ? outputs->data() : nullptr, gradient.data(), product.data(), change.data(),
    unit, refit, threads});
}

}  // namespace

void bind_rounding(nb::module_& m) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto maybe = [](const char* name) { return nb::arg(name).noconvert().none(); };
  nb::class_<PyGrid>(m, "RoundingGrid", "The levels that codes stand for, and the type of the scales that multiply them.")
      .def(nb::init<const In<float>&, bool, std::string_view, bool, std::string_view, std::tuple<float, float, float>>(),
           array("levels"), nb::arg("uniform"), nb::arg("zeros"), nb::arg("turned"), nb::arg("scales"),
           nb::arg("steps") = std::make_tuple(0.0f, 0.0f, 0.0f));
  define(m, "matrix_multiply", &multiply, array("a"), array("b"), array("out"), nb::arg("threads") = 1,
         "out = a @ b in f32, sums in one order.");
  define(m, "matrix_multiply_add", &multiply_add, array("a"), array("b"), array("out"), nb::arg("first"), nb::arg("last"),
         nb::arg("to"), nb::arg("count"), nb::arg("threads") = 1,
         "out[:, to:to+count] += a[:, first:last] @ b[first:last, to:to+count].");
  define(m, "matrix_factor", &factor, array("a"), array("own"), nb::arg("threads") = 1,
         "a = (U + I) D (U + I)': strictly upper U in place, D in own, sums in f64; false where there are none.");
  define(m, "rounding_scales", &scales, nb::arg("grid"), array("values"), nb::arg("first"), nb::arg("last"), array("weights"),
         array("scales"), maybe("zeros"), nb::arg("group"),
         "Search a group's scale in every row; returns the first row whose scale the type cannot hold, or how many there are.");
  define(m, "rounding_nearest", &nearest, nb::arg("grid"), array("values"), array("codes"), array("groups"), array("scales"),
         maybe("zeros"), "The nearest code of every value.");
  define(m, "rounding_feedback", &feedback, nb::arg("grid"), nb::arg("columns"), array("wanted"), array("targets"),
         array("factor"), array("errors"), array("codes"), array("groups"), array("scales"), maybe("zeros"),
         maybe("below") = nb::none(), maybe("shifts") = nb::none(), maybe("changes") = nb::none(), nb::arg("start") = 0,
         "Round columns one after the other, each error added to the targets of the next, and of earlier rows.");
  define(m, "pairs_pack", &pack_pairs, array("rows"), nb::arg("first"), nb::arg("depth"), nb::arg("unit"), array("words"),
         "Store rows of a matrix, over a power of two, in bf16 for `pairs_multiply_add`.");
  define(m, "pairs_multiply_add", &multiply_pairs, array("a"), nb::arg("columns"), array("words"), nb::arg("depth"),
         nb::arg("row"), nb::arg("to"), nb::arg("factor"), nb::arg("unit"), array("out"), nb::arg("threads") = 1,
         "Columns `to` of out += (columns of a / factor in bf16) @ (packed rows from `row`) * unit, sums in one order.");
  define(m, "rounding_descend", &descend, nb::arg("grid"), array("inputs"), array("pairs"), maybe("outputs"),
         array("gradient"), array("product"), array("change"), nb::arg("unit"), nb::arg("refit"), array("codes"), array("groups"), array("scales"), maybe("zeros"),
         maybe("units") = nb::none(), maybe("zero_units") = nb::none(), nb::arg("threads") = 1,
         "Move each code of a block of rows to the least of the error under two factors, and its groups' scales and zeros.");
}
