// The end of a step of Lloyd's: new means and bounds of the error (spec/palette.md, "Vectors").
#pragma once
#include <cstddef>

namespace ingot {

// Sums of points and numbers of points for each of k centroids: `rows` of [k, size] and [k], which are added up.
struct PaletteTotals {
  const double* totals;
  std::size_t rows, k, size;
};

// Two numbers between which a squared error lies.
struct PaletteError {
  double low, high;
};

// Moves centroids to the means of their points; one without points stays where it is. Returns the squared error of `n` points before,
// whose squares add up to `squares`, as distances in f32, wrong by less than 5e-7, add up to it.
PaletteError palette_means(const PaletteTotals& totals, const float* centroids, double squares, std::size_t n,
                           float* after);

}  // namespace ingot
