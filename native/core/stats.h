// How far two arrays are apart. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>

namespace ingot {

// Sums over the pairs of which both are finite, in double: element i goes to partial sum i % 8, which are then added in
// halves.
struct PairStats {
  std::size_t finite;  // pairs in the sums
  double squared_error;
  double squared_reference;
  double squared_other;
  double dot;
  double max_abs;
  std::size_t incomparable;        // one is not finite, or neither is and they differ (all NaN count as one value)
  std::size_t different;  // values whose bits as doubles differ: -0 is not 0, all NaN are one value
};

}  // namespace ingot
