// Points with lower bounds on their distance from a change of centroid (spec/palette.md, "Vectors"). Plain data only,
// as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Positions of centroids, and the decrease of the slacks of each centroid's points. The slack of a point is a lower
// bound of the difference between its distance to any other centroid and to its own. It is at most its centroid's reach
// minus twice the point's distance, which is a bound for all centroids farther from its own than the reach.
struct PaletteReach {
  const float* centroids;  // [k, size]
  std::size_t k;
  const float* reach;  // [k]
  const float* shrink;   // [k]
};

// The results of an iteration: exact sums change by the points that change their centroid.
struct PaletteSlacks {
  std::uint8_t* codes;  // of the points, each a centroid
  float* slacks;        // of the points; not positive: nothing is known
  double* sums;         // [k, size]
  double* counts;       // of the points; not positive if nothing is known
};

}  // namespace ingot
