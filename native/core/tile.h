// A part of a matrix that a codec decodes for callers that need only a little at a time. Plain data only, as in
// core/dtype.h.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kTileCols = 256;  // at most

// Rows from `row` on and columns from `first` on, decoded as `type`, with `stride` values between rows. `first` is a
// multiple of 32.
struct Tile {
  std::size_t row, rows;
  std::size_t first, cols;  // at least one
  void* out;
  std::size_t stride;
  Dtype type;
};

// A matrix of any codec, with the function of the active instruction set that decodes a tile.
struct TileSource {
  void (*decode)(const void* matrix, const Tile& tile);
  const void* matrix;
};

// Bands of streams (core/trellis.h) with the values of windows; scales [rows, cols / group].
struct TrellisMatrix {
  std::size_t rows, cols, group, band;  // the last band may be lower
  int bits;
  const std::uint8_t* words;  // of all bands
  const float* values;
  const void* scales;
  Dtype scale_type;
};

// Indices (core/palette.h), row after row in one stream; every row begins at a byte. Runs of `run` rows share a table
// of entries in the type of the requested tiles.
struct PaletteMatrix {
  std::size_t rows, cols, run;
  int bits;
  const std::uint8_t* packed;
  const void* tables;
};

}  // namespace ingot
