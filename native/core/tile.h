// A part of a matrix that a codec decodes for those who need little of it at a time. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kTileCols = 256;  // at most

// Rows `row` on and columns `first` on, decoded in `type` to rows `stride` values apart. `first` is a multiple of 32.
struct Tile {
  std::size_t row, rows;
  std::size_t first, cols;  // at least one
  void* out;
  std::size_t stride;
  Dtype type;
};

// A matrix of any codec: what decodes a tile of it, by the kernels of the instruction set in use.
struct TileSource {
  void (*decode)(const void* matrix, const Tile& tile);
  const void* matrix;
};

// Bands of streams (core/trellis.h) with the values that windows stand for; scales [rows, cols / group].
struct TrellisMatrix {
  std::size_t rows, cols, group, band;  // the last band may be lower
  int bits;
  const std::uint8_t* words;  // of all bands
  const float* values;
  const void* scales;
  Dtype scale_type;
};

// Indices (core/palette.h), row after row in one stream, whose rows all begin at a byte; runs of `run` rows share a table
// of entries in the type of the requested tiles.
struct PaletteMatrix {
  std::size_t rows, cols, run;
  int bits;
  const std::uint8_t* packed;
  const void* tables;
};

}  // namespace ingot
