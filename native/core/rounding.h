// Rounding of a matrix to a grid, with regard to the inputs that it multiplies (spec/quantizers.md).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/matrix_pairs.h"

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

// Rows that depend on each other under G = (L + I) D (L + I)'. Shifts and changes are those of the rounded columns.
struct RowLinks {
  const float* below;  // L, strictly lower: rows x rows; nullptr if rows are independent
  std::size_t below_stride;
  float* shifts;   // what later rows add to targets
  float* changes;  // targets without shifts - rounded
  std::size_t stride;
};

// Columns `first` to `last` that are rounded; their errors move targets up to column `end`.
struct Feedback {
  std::size_t first, last, end;
  const float* original;
  float* targets;
  const float* factor;  // U, strictly upper: cols x cols
  float* errors;        // original - rounded
  RowLinks links;
};

// A block of rows in the coordinate descent of tr(G D A D'), with D = rounded - original.
struct Descent {
  const float* inputs;    // A: cols x cols
  PairedMatrix pairs;     // A
  const float* outputs;   // the block's part of G: rows x rows; nullptr: the identity
  const float* gradient;  // G D A of the block before the descent: rows x cols
  float* product;         // D A of the block: rows x cols; kept up to date
  float* change;          // scratch: rows x cols
  float unit;             // a power of two about the largest weight
  bool refit;             // whether scales and zeros change too
  std::size_t threads;    // of products
};

}  // namespace ingot
