#include "core/palette.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "core/kmeans1d.h"
#include "core/palette_means.h"
#include "kernels/palette_cells.h"
#include "kernels/palette_near.h"

namespace {

using ingot::Dtype;
using ingot::kBins;

using Doubles = Out<double>;
using InDoubles = In<double>;
using Ids = In<std::uint32_t>;

void require_stream(std::size_t nbytes, int bits, std::size_t n) {
  require(bits >= 1 && bits <= 8, "expected 1 to 8 bits");
  std::size_t total = 0;
  require(!__builtin_mul_overflow(n, static_cast<std::size_t>(bits), &total) && nbytes == total / 8 + (total % 8 != 0),
          "expected as many bytes as the indices fill");
}

void decode(const InBytes& packed, int bits, const InArray& tables, const std::optional<Ids>& ids, std::size_t run,
            std::size_t phase, const OutArray& out) {
  const std::size_t width = out.itemsize(), n = out.ndim() == 1 ? out.size() : out.size() / 2;
  require(out.ndim() == 1 || (out.ndim() == 2 && out.shape(1) == 2 && width == 8), "expected elements, or pairs of words");
  require_stream(packed.size(), bits, n);
  require(tables.ndim() == out.ndim() + 1 && tables.itemsize() == width && tables.shape(1) == std::size_t{1} << bits,
          "expected tables of 2^bits entries as wide as the output's");
  require(out.ndim() == 1 || tables.shape(2) == 2, "expected pairs of words");
  require(width == 2 || width == 4 || width == 8, "expected elements of 2, 4 or 8 bytes");
  require(run >= 1 && phase < run && tables.shape(0) >= 1, "expected runs of at least one index, and a table");
  if (ids) {
      require(ids->size() >= (phase + n) / run + ((phase + n) % run != 0), "expected a codebook for every run");
    for (std::size_t i = 0; i < ids->size(); ++i) require(ids->data()[i] < tables.shape(0), "expected numbers of codebooks");
  }
  const ingot::PaletteLayout at{bits, run, phase, ids ? ids->data() : nullptr};
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_decode)(at, packed.data(), tables.data(), n, out.data(), out.ndim() == 1 ? width : 16);
}

void unpack(const InBytes& packed, int bits, const OutBytes& out) {
  require_stream(packed.size(), bits, out.size());
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_unpack)(packed.data(), bits, out.size(), out.data());
}

void pack(const InBytes& codes, int bits, const OutBytes& out) {
  require_stream(out.size(), bits, codes.size());
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_pack)(codes.data(), bits, codes.size(), out.data());
}

std::size_t count(const InArray& values, std::string_view dtype, std::size_t cols,
                  const std::optional<InDoubles>& importance, int exponent, const Doubles& weights,
                  const std::optional<Doubles>& sums) {
  const Dtype type = float_type(dtype);
  require_elements(values, type, "expected aligned values of the named type");
  require(cols >= 1 && values.size() % cols == 0, "expected whole rows");
  require(!importance || importance->size() == cols, "expected a weight per column");
  require(weights.size() == kBins && (!sums || sums->size() == kBins), "expected 65536 bins");
  require(sums.has_value() == (type == Dtype::f32 || type == Dtype::f64), "expected sums for f32 and f64 alone");
  require(exponent >= -2000 && exponent <= 2000, "expected an exponent in range");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(palette_count)(values.data(), type, values.size(), cols, importance ? importance->data() : nullptr,
                                     exponent, weights.data(), sums ? sums->data() : nullptr);
}

// The values of the histogram's bins in ascending order, with their weights.
struct Points {
  std::unique_ptr<double[]> values, weights;
  std::size_t n = 0;
};

Points points_of(const double* weights, const double* sums, Dtype type) {
  const auto keys = std::make_unique_for_overwrite<std::uint16_t[]>(kBins);
  const std::size_t there = INGOT_KERNEL(palette_keys)(weights, keys.get());
  Points result{std::make_unique_for_overwrite<double[]>(there), std::make_unique_for_overwrite<double[]>(there)};
  if (!sums) {
    result.n =
        INGOT_KERNEL(palette_points)(weights, keys.get(), there, type, result.values.get(), result.weights.get());
    return result;
  }
  for (std::size_t i = 0; i < there; ++i) {
    const double weight = weights[keys[i]], value = sums[keys[i]] / weight;
    if (result.n && result.values[result.n - 1] == value) {  // -0 and +0
      result.weights[result.n - 1] += weight;
    } else {
      result.values[result.n] = value;
      result.weights[result.n++] = weight;
    }
  }
  return result;
}

std::size_t solve(const InDoubles& weights, const std::optional<InDoubles>& sums, std::string_view dtype,
                  const Doubles& centroids, bool layers) {
  const Dtype type = float_type(dtype);
  const std::size_t k = centroids.size();
  require(weights.size() == kBins && (!sums || sums->size() == kBins), "expected 65536 bins");
  require(sums || type == Dtype::f16 || type == Dtype::bf16, "expected sums for f32 and f64");
  require(k >= 1 && k <= 256, "expected 1 to 256 centroids");
  nb::gil_scoped_release release;
  const Points points = points_of(weights.data(), sums ? sums->data() : nullptr, type);
  const std::size_t n = points.n;
  if (n == 0) return 0;
  const double centre = points.values[0] / 2 + points.values[n - 1] / 2;
  ingot::Prefix at{std::vector<double>(n + 1), std::vector<double>(n + 1)};
  double weight = 0, sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    at.weight[i + 1] = weight += points.weights[i];
    at.sum[i + 1] = sum += points.weights[i] * (points.values[i] - centre);
  }
  const std::size_t runs = k < n ? k : n;
  const std::vector<std::size_t> bounds = layers ? ingot::kmeans1d_layers(at, runs) : ingot::kmeans1d(at, runs);
  for (std::size_t i = 0; i < runs; ++i) {
    const std::size_t l = bounds[i], r = bounds[i + 1];
    // A run of one value has that value as its mean; computing it from sums could round.
    centroids.data()[i] = r - l == 1 ? points.values[l] : centre + (at.sum[r] - at.sum[l]) / (at.weight[r] - at.weight[l]);
  }
  return runs;
}

void assign(const InArray& values, std::string_view dtype, const InDoubles& thresholds, const OutBytes& codes) {
  const Dtype type = float_type(dtype);
  require_elements(values, type, "expected aligned values of the named type");
  require(values.size() == codes.size() && thresholds.size() <= 255, "expected a code per value, and up to 255 thresholds");
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_assign)(values.data(), type, values.size(), thresholds.data(), thresholds.size() + 1, codes.data());
}

using Points32 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

double nearest(const Points32& points, const Points32& centroids, const OutBytes& codes, const Doubles& sums,
               const Doubles& counts, const std::optional<Out<float>>& bounds, float moved, bool moves) {
  const std::size_t size = points.shape(1), k = centroids.shape(0), n = points.shape(0);
  require((size == 2 || size == 4) && centroids.shape(1) == size, "expected points of 2 or 4 numbers, and centroids alike");
  require(k >= 1 && k <= 256 && sums.size() == k * size && counts.size() == k, "expected 1 to 256 centroids, and room for each");
  require(codes.size() == n && (!bounds || bounds->size() == n), "expected a code per point, and a bound if any");
  require(moved >= 0, "expected a distance");
  require(!moves || bounds, "expected bounds where points move");
  std::uint8_t limit = 0;
  for (std::size_t i = 0; bounds && i < n; ++i) limit = std::max(limit, codes.data()[i]);
  require(limit < k, "expected codes of centroids");
  const ingot::PalettePoints at{points.data(), n, static_cast<int>(size)};
  const ingot::PaletteFound found{codes.data(), bounds ? bounds->data() : nullptr, moved, sums.data(), counts.data(), moves};
  nb::gil_scoped_release release;
  return INGOT_KERNEL(palette_nearest)(at, centroids.data(), k, found);
}

void spread(const Points32& points, const InDoubles& draws, const Out<std::uint64_t>& chosen) {
  const std::size_t size = points.shape(1), k = chosen.size(), n = points.shape(0);
  require((size == 2 || size == 4) && n >= 1, "expected points of 2 or 4 numbers");
  require(k >= 1 && draws.size() == k - 1 && chosen.data()[0] < n, "expected a draw for every point but the first");
  const ingot::PalettePoints at{points.data(), n, static_cast<int>(size)};
  nb::gil_scoped_release release;
  const auto scratch = std::make_unique_for_overwrite<double[]>((3 + size / 2) * n + 1);  // in f64 and in f32
  INGOT_KERNEL(palette_spread)(at, draws.data(), k, chosen.data(), scratch.get());
}

// Arrays of points in cells, checked for consistency.
template <class Cells, class Columns, class Starts, class Boxes>
Cells cells_of(const Columns& columns, const Starts& starts, const Boxes& boxes, std::size_t numbers) {
  require(numbers == 2 || numbers == 4, "expected points of 2 or 4 numbers");
  require(columns.size() % numbers == 0 && columns.size() / numbers > ingot::kBehind, "expected a column for each number");
  require(starts.size() > 1, "expected where cells begin");
  const std::size_t cells = starts.size() - 1, n = columns.size() / numbers - ingot::kBehind;
  require(cells >= ingot::kCellsOfPart && cells <= kBins && (cells & (cells - 1)) == 0, "expected 64 to 65536 cells");
  require(n < std::size_t{1} << 31, "expected fewer points");
  const Cells cells_out{static_cast<int>(numbers), n, cells, columns.data(), starts.data(), boxes.data()};
  require(boxes.size() == 2 * numbers * cells_out.boxes_of_a_row(), "expected two numbers for every side of a box");
  return cells_out;
}

double cells(const Points32& points, const Out<float>& columns, const Out<std::uint32_t>& starts, const Out<float>& boxes,
             const Out<std::uint16_t>& positions) {
  const auto to = cells_of<ingot::PaletteCellsToFill>(columns, starts, boxes, points.shape(1));
  require(points.shape(0) == to.n && positions.size() == to.n && to.n >= 1, "expected room for every point, and some");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(palette_cells)(points.data(), to, positions.data());
}

void cell_codes(const In<std::uint16_t>& positions, const Ids& starts, const InBytes& codes, const OutBytes& out) {
  const std::size_t n = positions.size(), cells = starts.size() ? starts.size() - 1 : 0;
  require(codes.size() == n && out.size() == n, "expected a code for every point");
  require(cells <= kBins && n < std::size_t{1} << 31, "expected up to 65536 cells, and fewer points");
  bool within = false;
  {
    nb::gil_scoped_release release;
    within = INGOT_KERNEL(palette_codes)(positions.data(), n, starts.data(), cells, codes.data(), out.data());
  }
  require(within, "expected cells that hold the points");
}

// The contents of the arrays are not checked here: cells outside the points are skipped, and codes and owners that are
// not centroids are treated like those of new points.
void step(const In<float>& columns, const Ids& starts, const In<float>& boxes, std::size_t first, std::size_t end,
          const Points32& centroids, const OutBytes& codes, const Out<std::uint16_t>& owners, const Doubles& sums,
          const Doubles& counts) {
  const std::size_t size = centroids.shape(1), k = centroids.shape(0);
  const auto all_cells = cells_of<ingot::PaletteCells>(columns, starts, boxes, size);
  require(k >= 1 && k <= 256 && sums.size() == k * size && counts.size() == k, "expected 1 to 256 centroids, and room for each");
  require(codes.size() == all_cells.n && owners.size() == all_cells.cells,
          "expected a code per point, and an owner per cell");
  require(first <= end && end <= all_cells.parts() && first % ingot::kPartsAtOnce == 0, "expected parts there are");
  require(end % ingot::kPartsAtOnce == 0 || end == all_cells.parts(), "expected sixteen parts at a time");
  const ingot::PaletteSteps to{codes.data(), owners.data(), sums.data(), counts.data()};
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_step)(all_cells, first, end, centroids.data(), k, to);
}

// Points, their codes and slacks, and the results for each of `k` centroids.
ingot::PaletteSlacks slacks_of(const Points32& points, const Points32& centroids, const OutBytes& codes, const Out<float>& slacks,
                               const Doubles& sums, const Doubles& counts) {
  const std::size_t size = points.shape(1), k = centroids.shape(0), n = points.shape(0);
  require((size == 2 || size == 4) && centroids.shape(1) == size, "expected points of 2 or 4 numbers, and centroids alike");
  require(k >= 1 && k <= 256 && sums.size() == k * size && counts.size() == k, "expected 1 to 256 centroids, and room for each");
  require(codes.size() == n && slacks.size() == n, "expected a code and a slack per point");
  return {codes.data(), slacks.data(), sums.data(), counts.data()};
}

double guess(const Points32& points, const Points32& centroids, const OutBytes& codes, const Out<float>& slacks,
             const Doubles& sums, const Doubles& counts) {
  const auto slack = slacks_of(points, centroids, codes, slacks, sums, counts);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(palette_guess)({points.data(), points.shape(0), static_cast<int>(points.shape(1))}, centroids.data(),
                                     centroids.shape(0), slack);
}

void reach(const std::optional<Points32>& before, const Points32& after, const Out<float>& to,
           const Out<float>& shrink) {
  const std::size_t k = after.shape(0), size = after.shape(1);
  require((size == 2 || size == 4) && k >= 1 && k <= 256, "expected 1 to 256 centroids of 2 or 4 numbers");
  require(!before || (before->shape(0) == k && before->shape(1) == size), "expected as many centroids before");
  require(to.size() == k && shrink.size() == k, "expected two numbers per centroid");
  INGOT_KERNEL(palette_reach)
  (before ? before->data() : nullptr, after.data(), k, static_cast<int>(size), to.data(), shrink.data());
}

void near(const Points32& points, const Points32& centroids, const In<float>& reach, const In<float>& shrink,
          const OutBytes& codes, const Out<float>& slacks, const Doubles& sums, const Doubles& counts) {
  const auto slack = slacks_of(points, centroids, codes, slacks, sums, counts);
  const std::size_t k = centroids.shape(0);
  require(reach.size() == k && shrink.size() == k, "expected two numbers per centroid");
  std::uint8_t limit = 0;
  for (std::size_t i = 0; i < codes.size(); ++i) limit = std::max(limit, codes.data()[i]);
  require(limit < k, "expected codes of centroids");
  nb::gil_scoped_release release;
  INGOT_KERNEL(palette_near)({points.data(), points.shape(0), static_cast<int>(points.shape(1))},
                             {centroids.data(), k, reach.data(), shrink.data()}, slack);
}

std::pair<double, double> means(const Doubles& totals, const Points32& centroids, double squares, std::size_t n,
                                const Out<float>& after) {
  const std::size_t k = centroids.shape(0), size = centroids.shape(1);
  require(k >= 1 && k <= 256 && size >= 1 && size <= 4, "expected 1 to 256 centroids of up to 4 numbers");
  require(after.size() == k * size && totals.size() % (k * (size + 1)) == 0, "expected sums and numbers, and room, for each");
  const ingot::PaletteTotals found{totals.data(), totals.size() / (k * (size + 1)), k, size};
  const ingot::PaletteError error = ingot::palette_means(found, centroids.data(), squares, n, after.data());
  return {error.low, error.high};
}

// Elements of `width` bytes and the mask that covers them.
template <class Array>
int mask_width(const InBytes& mask, std::size_t n, const Array& values) {
  const std::size_t width = values.itemsize();
  require(mask.size() == n / 8 + (n % 8 != 0), "expected a bit of mask per element");
  require(width == 1 || width == 2 || width == 4 || width == 8, "expected elements of 1, 2, 4 or 8 bytes");
  return static_cast<int>(width);
}

std::size_t mask_count(const InBytes& mask, std::size_t n) {
  require(mask.size() == n / 8 + (n % 8 != 0), "expected a bit of mask per element");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(mask_count)(mask.data(), n);
}

void mask_expand(const InBytes& mask, const InArray& values, const OutArray& out) {
  const int width = mask_width(mask, out.size(), out);
  require(values.itemsize() == out.itemsize(), "expected values as wide as the output's");
  nb::gil_scoped_release release;
  INGOT_KERNEL(mask_expand)(mask.data(), out.size(), values.data(), values.size(), out.data(), width);
}

void mask_clear(const InBytes& mask, const OutArray& out) {
  const int width = mask_width(mask, out.size(), out);
  nb::gil_scoped_release release;
  INGOT_KERNEL(mask_clear)(mask.data(), out.size(), out.data(), width);
}

void mask_select(const InBytes& mask, const InArray& values, const OutArray& out) {
  const int width = mask_width(mask, values.size(), values);
  require(values.itemsize() == out.itemsize(), "expected an output as wide as the values");
  nb::gil_scoped_release release;
  INGOT_KERNEL(mask_select)(mask.data(), values.size(), values.data(), out.data(), out.size(), width);
}

}  // namespace

// No input may be converted, because the function would silently get a copy.
void bind_palette(nb::module_& m) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto maybe = [](const char* name) { return nb::arg(name).noconvert().none(); };
  define(m, "palette_decode", &decode, array("packed"), nb::arg("bits"), array("tables"), maybe("ids"), nb::arg("run"),
        nb::arg("phase"), array("out"), "Look indices up; tables and output as unsigned integers, 16 bytes as pairs.");
  define(m, "palette_unpack", &unpack, array("packed"), nb::arg("bits"), array("out"), "Indices of a stream, a byte each.");
  define(m, "palette_pack", &pack, array("codes"), nb::arg("bits"), array("out"), "One stream, first index in the low bits.");
  define(m, "palette_count", &count, array("values"), nb::arg("dtype"), nb::arg("cols"), maybe("importance"),
        nb::arg("exponent"), array("weights"), maybe("sums"),
        "Add values to 65536 bins; returns the index of the first that is not finite, or how many there are.");
  define(m, "palette_solve", &solve, array("weights"), maybe("sums"), nb::arg("dtype"), array("centroids"),
        nb::arg("layers") = false,
        "Find the centroids of least squared error, ascending; returns how many there are: no more than values.");
  define(m, "palette_assign", &assign, array("values"), nb::arg("dtype"), array("thresholds"), array("codes"),
        "How many thresholds lie below each value.");
  define(m, "palette_nearest", &nearest, array("points"), array("centroids"), array("codes"), array("sums"), array("counts"),
        maybe("bounds") = nb::none(), nb::arg("moved") = 0.0F,
        nb::arg("moves") = false,
        "The nearest centroid of each point; adds to sums and counts; returns the squared error. With bounds, points whose "
        "code cannot have changed since keep it; where points move, sums and counts are those of the codes given.");
  define(m, "palette_spread", &spread, array("points"), array("draws"), array("chosen"),
        "Choose points one by one, each drawn by its squared distance from those before; the first is given.");
  define(m, "palette_cells", &cells, array("points"), array("columns"), array("starts"), array("boxes"),
        array("places"), "Put points into cells, and say where those lie; returns the sum of the squares of all numbers.");
  define(m, "palette_codes", &cell_codes, array("places"), array("starts"), array("codes"), array("out"),
        "The codes of points in the order that they had before they were put into cells.");
  define(m, "palette_step", &step, array("columns"), array("starts"), array("boxes"), nb::arg("first"), nb::arg("end"),
        array("centroids"), array("codes"), array("owners"), array("sums"), array("counts"),
        "The nearest centroid of each point in some parts: codes, owners of cells, sums and counts change.");
  define(m, "palette_guess", &guess, array("points"), array("centroids"), array("codes"), array("slacks"), array("sums"),
        array("counts"),
        "A centroid for each point that is near it as a rule; adds to sums and counts; returns the sum of all squares.");
  define(m, "palette_reach", &reach, maybe("before"), array("after"), array("reach"), array("lost"),
        "How far centroids reach, or, where they moved, what slacks of their points lost.");
  define(m, "palette_near", &near, array("points"), array("centroids"), array("reach"), array("lost"), array("codes"),
        array("slacks"), array("sums"), array("counts"),
        "The nearest centroid of each point: codes, slacks, sums and counts change.");
  define(m, "palette_means", &means, array("totals"), array("centroids"), nb::arg("squares"), nb::arg("n"), array("after"),
        "Move centroids to the means of their points; returns two numbers between which the squared error before lies.");
  define(m, "mask_count", &mask_count, array("mask"), nb::arg("n"), "How many of the first n bits are set.");
  define(m, "mask_expand", &mask_expand, array("mask"), array("values"), array("out"), "Place values where the mask has a bit, 0 elsewhere.");
  define(m, "mask_clear", &mask_clear, array("mask"), array("out"), "Put 0 where the mask has no bit.");
  define(m, "mask_select", &mask_select, array("mask"), array("values"), array("out"), "Gather the values where the mask has a bit.");
}
