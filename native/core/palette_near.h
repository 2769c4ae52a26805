// Points and what is known of how far from changing their centroids they are (spec/palette.md, "Vectors"). Plain data only, as in
// core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Positions of centroids, and the decrease of the slacks of each centroid's points. The slack of a point is a lower bound
// of how much farther any other centroid is than its own, and at most its centroid's reach less twice the point's
// distance, which holds for all centroids farther from its own than the reach.
struct PaletteReach {
  const float* centroids;  // [k, size]
  std::size_t k;
  const float* reach;  // [k]
  const float* shrink;   // [k]
};

// The results of a step: exact sums change by the points that get another centroid.
struct PaletteSlacks {
  std::uint8_t* codes;  // of the points, each a centroid
  float* slacks;        // of the points; not positive: nothing is known
  double* sums;         // [k, size]
  double* counts;       // [k]
};

}  // namespace ingot
