// Matrices as bit streams through a trellis (spec/trellis.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

constexpr int kTrellisBits = 12;  // of a window
constexpr std::size_t kTrellisStates = std::size_t{1} << kTrellisBits;

// The streams of a band of rows, one for each column. Words of 16 bits, little-endian, lie by place and then by column.
struct TrellisBand {
  std::size_t rows, cols, group;  // at least 1; the group divides the columns
  int bits;                       // 2..4
  const std::uint8_t* words;      // ceil(rows * bits / 16) x cols words
};

// Values that windows may stand for, and what a band's are multiplied by, with columns and rows changed over: targets
// and windows are cols x rows, scales groups x rows.
struct TrellisColumns {
  std::size_t cols, rows, group;  // the last group may be shorter
  int bits;
  const float* values;  // kTrellisStates of them
  const float* weights;  // of each row's squared errors
  float* scales;
  std::uint16_t* windows;
};

// G of a band's rows with each other as (L + I) D (L + I)'.
struct TrellisLinks {
  const float* below;  // L, strictly lower: rows x rows; null where rows do not touch each other
  const float* diagonal;   // D
  const float* shift;  // of targets, by what rows of other bands became: cols x rows; null where there are none
};

// A band on its way down the objective tr(G D A D'), D = rounded - wanted.
struct TrellisDescent {
  const float* inputs;   // A: cols x cols
  const float* outputs;  // G of the band's rows with each other: rows x rows
  float* gradient;       // (G D A)' of the band before it changes: cols x rows; overwritten
  float* change;         // what is added to D': cols x rows
  std::size_t turn;      // the row at which searches begin
  Dtype scale_type;
  bool refit;  // scales too
};

}  // namespace ingot
