// The memory layout of codebook indices (spec/palette.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kBins = std::size_t{1} << 16;
constexpr std::size_t kPassed = 16;  // bins without weight that are skipped at once

// Indices of `bits` each in one stream that begins at a byte, first index in the low bits. Runs of `run` indices share
// a codebook; the first index here has position `phase` in its run.
struct PaletteLayout {
  int bits;                  // 1..8
  std::size_t run;           // at least 1
  std::size_t phase;         // below run
  const std::uint32_t* ids;  // codebook of each run; null if there is only one
};

// Points of `size` numbers each, 2 or 4.
struct PalettePoints {
  const float* points;
  std::size_t n;
  int size;
};

// A candidate for the beginning of the last run, and the first end for which it is best.
struct PaletteStart {
  std::uint32_t from, start;
};

// Sorted points to be divided into runs: prefix sums of weights and of weights times values, and the results for the
// points before i: the least cost, and the beginning of the last run. All have n + 1 elements, except the queue, which
// has n and is scratch memory.
struct PaletteRuns {
  const double* weight;
  const double* sum;
  std::size_t n;  // at least 1
  double* best;
  std::uint32_t* from;
  PaletteStart* queue;
};

// The state of each point and centroid. `bounds` are lower bounds of the distance from a point to every centroid but
// its own; `moved` is the largest move of a centroid since then. Both are 0 if nothing is known yet.
struct PaletteFound {
  std::uint8_t* codes;  // of the points, read if there are bounds
  float* bounds;        // null: not stored
  float moved;
  double* sums;    // [k, size], added to
  double* counts;  // [k], added to
  // Sums and counts match the codes on entry: only points that change their centroid are added and subtracted.
  bool moves = false;
};

}  // namespace ingot
