// Matrices as bit streams that are decoded through a trellis (spec/trellis.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

constexpr int kTrellisBits = 12;  // of a window
constexpr std::size_t kTrellisStates = std::size_t{1} << kTrellisBits;

// The streams of a band of rows, one per column. Words of 16 bits, little-endian, are ordered by position, then by
// column.
struct TrellisBand {
  std::size_t rows, cols, group;  // at least 1; the group divides the columns
  int bits;                       // 2..4
  const std::uint8_t* words;      // ceil(rows * bits / 16) x cols words
};

// The values that windows can have, and the factors of a band, transposed: targets and windows are cols x rows, scales
// groups x rows.
struct TrellisColumns {
  std::size_t cols, rows, group;  // the last group may be shorter
  int bits;
  const float* values;  // kTrellisStates of them
  const float* weights;  // weights of each row's squared errors
  float* scales;
  std::uint16_t* windows;
};

// The factors (L + I) D (L + I)' of a band's part of G.
struct TrellisLinks {
  const float* below;  // L, strictly lower: rows x rows; null if rows are independent
  const float* diagonal;   // D
  const float* shift;  // corrections of targets for the errors of other bands: cols x rows; null if there are none
};

}  // namespace ingot
