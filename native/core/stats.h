// Measures of the difference of two arrays. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>

namespace ingot {

// Sums in double over the pairs that are both finite: element i is added to partial sum i % 8; the partial sums are
// added in halves.
struct PairStats {
  std::size_t finite;  // number of pairs in the sums
  double squared_error;
  double squared_reference;
  double squared_other;
  double dot;
  double max_abs;
  // Pairs with one value that is not finite, or with two such values that differ (all NaN are equal).
  std::size_t incomparable;
  std::size_t different;  // values whose bits as doubles differ: -0 differs from 0, all NaN are equal
};

}  // namespace ingot
