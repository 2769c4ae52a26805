// Points and what is known of how far from changing their centroids they are (spec/palette.md, "Vectors"). Plain data only, as in
// core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Where centroids lie, and what slacks of the points of each have lost since they were stated. The slack of a point says how much
// farther than its own any other centroid lies at least, and is no more than its centroid's reach less twice the point's
// distance: that holds for all centroids farther from its own than the reach.
struct PaletteReach {
  const float* centroids;  // [k, size]
  std::size_t k;
  const float* reach;  // [k]
  const float* lost;   // [k]
};

// What is found: sums, exact ones, change by the points that get another centroid.
struct PaletteSlacks {
  std::uint8_t* codes;  // of the points, each a centroid
  float* slacks;        // of the points; not positive: nothing is known
  double* sums;         // [k, size]
  double* counts;       // [k]
};

}  // namespace ingot
