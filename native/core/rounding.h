// Rounding of a matrix to a grid, with regard to the inputs that it multiplies (spec/quantizers.md).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kMostLevels = 256;

// The values of codes: scale * (level - zero), or scale * level + zero if zeros are offsets. Scales (and offsets) have
// an element type, or, if they are nested, are integers times a unit.
struct Grid {
  const float* levels;  // ascending, 2^bits of them
  std::size_t count;
  bool uniform;         // levels are consecutive integers
  bool offset;
  bool turned;          // scales may be negative
  Dtype scale_type;     // element type to which scales and offsets are rounded
  // Limits of nested ones: scale / unit, and offset / -unit from 0 on.
  float step_low = 0, step_high = 0, minimum_high = 0;
};

// Rows of a matrix: weights, and their stored form. Codes and weights are rows x cols, scales and zeros rows x groups;
// `group_of` has the group of each column.
struct Rounded {
  std::size_t rows, cols, groups;
  const std::int32_t* group_of;
  std::uint8_t* codes;
  float* scales;
  float* zeros;  // nullptr: none
  const float* units = nullptr;       // units of the scales, if they are nested
  const float* zero_units = nullptr;  // units of the offsets, if they are nested
};

// A block of rows in the coordinate descent of tr(G D A D'), with D = rounded - original.
struct Descent {
  const float* inputs;    // A: cols x cols
  const float* outputs;   // the block's part of G: rows x rows
  const float* gradient;  // G D A of the block before the descent: rows x cols
  float* product;         // D A of the block: rows x cols; kept up to date
  bool refit;             // whether scales and zeros change too
};

}  // namespace ingot
