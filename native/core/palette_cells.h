// Points that lie in cells, for Lloyd's steps (spec/palette.md, "Vectors"). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kCellsOfPart = 64;  // cells in a row that are looked at together first
constexpr std::size_t kPartsAtOnce = 16;
constexpr std::size_t kBehind = 16;  // elements that may be read behind the last point

// Points of `size` numbers each, 2 or 4, cell by cell: n + kBehind elements for each number. Boxes are rows of
// `boxes_of_a_row()` elements: middle and half of the width for each number, of every cell, then of every part, the last
// repeated up to kPartsAtOnce.
template <class Float, class Start>
struct PaletteCellsOf {
  int size;
  std::size_t n, cells;  // a power of two from kCellsOfPart to 2^16
  Float* columns;
  Start* starts;  // cells + 1: where the points of each cell begin
  Float* boxes;

  std::size_t stride() const { return n + kBehind; }
  std::size_t parts() const { return cells / kCellsOfPart; }
  std::size_t boxes_of_a_row() const { return cells + (parts() < kPartsAtOnce ? kPartsAtOnce : parts()); }
};
using PaletteCells = PaletteCellsOf<const float, const std::uint32_t>;
using PaletteCellsToFill = PaletteCellsOf<float, std::uint32_t>;

constexpr std::uint16_t kMixed = 256, kNobody = 257;  // instead of the centroid that all points of a cell have

// The results of a step: sums change by the points that get another centroid.
struct PaletteSteps {
  std::uint8_t* codes;    // of the points, n
  std::uint16_t* owners;  // of the cells
  double* sums;           // [k, size]
  double* counts;         // [k]
};

}  // namespace ingot
