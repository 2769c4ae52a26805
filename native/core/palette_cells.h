// Points in cells, for Lloyd's iterations (spec/palette.md, "Vectors"). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kCellsOfPart = 64;  // consecutive cells that are tested together first
constexpr std::size_t kPartsAtOnce = 16;
constexpr std::size_t kBehind = 16;  // elements that may be read after the last point

// Points of `size` coordinates each, 2 or 4, cell by cell: n + kBehind elements for each coordinate. Boxes are rows of
// `boxes_of_a_row()` elements: centre and half width for each coordinate, of every cell, then of every part, the last
// repeated up to kPartsAtOnce.
template <class Float, class Start>
struct PaletteCellsOf {
  int size;
  std::size_t n, cells;  // a power of two from kCellsOfPart to 2^16
  Float* columns;
  Start* starts;  // cells + 1: the first point of each cell
  Float* boxes;

  std::size_t stride() const { return n + kBehind; }
  std::size_t parts() const { return cells / kCellsOfPart; }
  std::size_t boxes_of_a_row() const { return cells + (parts() < kPartsAtOnce ? kPartsAtOnce : parts()); }
};
using PaletteCells = PaletteCellsOf<const float, const std::uint32_t>;
using PaletteCellsToFill = PaletteCellsOf<float, std::uint32_t>;

constexpr std::uint16_t kMixed = 256, kNobody = 257;  // code of a cell whose points have different centroids

// The results of an iteration: sums change by the points that change their centroid.
struct PaletteSteps {
  std::uint8_t* codes;    // of the points, n
  std::uint16_t* owners;  // of the cells
  double* sums;           // [k, size]
  double* counts;         // [k]
};

}  // namespace ingot
