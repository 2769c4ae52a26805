// Products of x in 8 bits with weights that stay packed (spec/affine.md, "Activations in 8 bits"). Plain data only, as in
// core/dtype.h.
#pragma once
#include "core/matmul.h"

namespace ingot {

constexpr std::size_t kInt8Block = 32;   // columns of x that share a step
constexpr std::size_t kInt8Sums = 4;     // number of partial sums; block b is added to sum b mod 4
constexpr std::size_t kInt8Span = 8;     // groups of four blocks that are unpacked at a time
constexpr std::size_t kInt8Rows = 64;    // rows of weights per task
constexpr std::size_t kInt8Count = 264;  // rows of x that share unpacked weights: complete tiles of 4, 8 or 12
constexpr int kInt8Center = 1 << 15;     // the largest supported constant zero point

// A row of x has `fours` * 4 blocks; past the last column it is 0. Prepared x is stored span by span, within a span tile by
// tile of rows; within a tile come blocks 0, 4, 8 ... of the span, then 1, 5, ... and so on, each with the tile's rows.
struct Int8Job {
  MatmulLayout layout;
  MatmulWeights weights;
  MatmulOutput out;
  const void* x;
  Dtype type;
  std::size_t count;   // rows of x, at most kInt8Count
  std::size_t fours;   // of blocks of a row
  std::size_t groups;  // of a row
  bool dots;           // whether to use dot-product instructions for bytes, which not every processor has
  std::int8_t* codes;     // [fours * 4 * count, 32]
  float* steps;           // [fours * 4 * count]
  std::int32_t* starts;   // the same: the initial values of sums
  float* sums;            // the same: sums of codes, to be multiplied by zeros; null if there are none
};

// The scratch memory of one thread.
struct alignas(64) Int8Scratch {
  std::uint8_t bytes[kInt8Rows * kInt8Span * 4 * kInt8Block];  // of codes
  float scales[kInt8Span * 4 * kInt8Rows];                     // of every block
  float zeros[kInt8Span * 4 * kInt8Rows];
  float sums[kInt8Count * kInt8Sums * kInt8Rows];
};

}  // namespace ingot
