// How indices into codebooks lie in memory (spec/palette.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kBins = std::size_t{1} << 16;
constexpr std::size_t kPassed = 16;  // bins that are passed over at once where they weigh nothing

// Indices of `bits` each, one stream, first in the low bits, that begins at a byte. Runs of `run` indices share a
// codebook; the first one here is number `phase` of its run.
struct PaletteLayout {
  int bits;                  // 1..8
  std::size_t run;           // at least 1
  std::size_t phase;         // below run
  const std::uint32_t* ids;  // codebook of each run; null where there is one
};

// Points of `size` numbers each, 2 or 4.
struct PalettePoints {
  const float* points;
  std::size_t n;
  int size;
};

// A candidate for the beginning of the last run, and the end from which on it is best.
struct PaletteStart {
  std::uint32_t from, start;
};

// Sorted points that are cut into runs: sums up to and without point i of weights, and of weights times values, and what is found
// for the points before i: the least cost, and where the last run begins. All have n + 1 elements, but the queue n: scratch.
struct PaletteRuns {
  const double* weight;
  const double* sum;
  std::size_t n;  // at least 1
  double* best;
  std::uint32_t* from;
  PaletteStart* queue;
};

// The state of each point and centroid. `bounds` are lower bounds of the distance from a point to every centroid but that
// of its code; `moved` is the largest move of a centroid since then. Both are 0 if nothing is known yet.
struct PaletteFound {
  std::uint8_t* codes;  // of the points, read where there are bounds
  float* bounds;        // null: not kept
  float moved;
  double* sums;    // [k, size], added to
  double* counts;  // [k], added to
  bool moves = false;  // sums and counts are those of the codes as they come: only points that get another are added and taken away
};

}  // namespace ingot
