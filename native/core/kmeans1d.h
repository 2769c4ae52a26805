// Exact one-dimensional k-means over weighted, sorted points (spec/palette.md, "Codebooks"). Doubles without contraction give the
// same result on every machine.
#pragma once
#include <cstddef>
#include <vector>

namespace ingot {

// Prefix sums over the points before i, for i from 0 to n, relative to a common centre: of weights, and of weights
// times values.
struct Prefix {
  std::vector<double> weight, sum;

  std::size_t points() const { return weight.size() - 1; }
  // The squared error of the points l to r - 1, without the sum of squares, which does not depend on the partition.
  double cost(std::size_t l, std::size_t r) const {
    const double s = sum[r] - sum[l];
    return -(s * s) / (weight[r] - weight[l]);
  }
};

// Divides the points into `k` runs (1 <= k <= n) of least squared error; returns the k + 1 bounds, 0 and n included.
// Weights must be positive.
std::vector<std::size_t> kmeans1d(const Prefix& prefix, std::size_t k);

// The same with dynamic programming by layers, in O(k n log n): for the rare inputs for which no penalty gives k runs,
// and for tests.
std::vector<std::size_t> kmeans1d_layers(const Prefix& prefix, std::size_t k);

}  // namespace ingot
