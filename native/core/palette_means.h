// The end of a Lloyd iteration: new means, and bounds of the error (spec/palette.md, "Vectors").
#pragma once
#include <cstddef>

namespace ingot {

// Partial sums and numbers of points for each of k centroids: `rows` of [k, size] and of [k], which are added up.
struct PaletteTotals {
  const double* totals;
  std::size_t rows, k, size;
};

// A lower and an upper bound of a squared error.
struct PaletteError {
  double low, high;
};

// Moves centroids to the means of their points; a centroid without points stays. Returns bounds of the squared error of
// the `n` points before the move: from the sum of their squares, `squares`, and from distances in f32, whose relative
// error is below 5e-7.
PaletteError palette_means(const PaletteTotals& totals, const float* centroids, double squares, std::size_t n,
                           float* after);

}  // namespace ingot
