// Rounding a matrix to a grid with regard to what it multiplies (spec/quantizers.md).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kMostLevels = 256;

// The values that codes stand for: scale * (level - zero), or scale * level + zero where zeros are offsets. Scales (and
// offsets) are numbers of a type, or, where they are nested, integers times a unit.
struct Grid {
  const float* levels;  // ascending, 2^bits of them
  std::size_t count;
  bool uniform;         // levels are integers one apart
  bool offset;
  bool turned;          // scales may be negative
  Dtype scale_type;     // to which scales and offsets are rounded
  float step_low = 0, step_high = 0, minimum_high = 0;  // of nested ones: scale / unit, and offset / -unit from 0 on
};

// Rows of a matrix: weights, and how they are stored. Codes and weights are rows x cols, scales and zeros rows x groups;
// `group_of` says which group a column belongs to.
struct Rounded {
  std::size_t rows, cols, groups;
  const std::int32_t* group_of;
  std::uint8_t* codes;
  float* scales;
  float* zeros;  // nullptr: none
  const float* units = nullptr;       // of each scale, where they are nested
  const float* zero_units = nullptr;  // of each offset
};

// A block of rows on their way down the objective tr(G D A D'), D = rounded - wanted.
struct Descent {
  const float* inputs;    // A: cols x cols
  const float* outputs;   // G of the block's rows with each other: rows x rows
  const float* gradient;  // G D A of the block before it changes: rows x cols
  float* product;         // D A of the block: rows x cols; kept up to date
  bool refit;             // scales too, and zeros
};

}  // namespace ingot
