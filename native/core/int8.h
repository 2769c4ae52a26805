// Products of x in 8 bits with weights that stay packed (spec/affine.md, "Activations in 8 bits"). Plain data only, as in
// core/dtype.h.
#pragma once
#include "core/matmul.h"

namespace ingot {

constexpr std::size_t kInt8Block = 32;   // columns of x that share a step
constexpr std::size_t kInt8Sums = 4;     // of a product: block b goes to sum b mod 4
constexpr std::size_t kInt8Span = 8;     // fours of blocks that are unpacked at a time
constexpr std::size_t kInt8Rows = 64;    // of weights that a thread takes at a time
constexpr std::size_t kInt8Count = 264;  // rows of x that share unpacked weights: whole tiles of 4, 8 or 12
constexpr int kInt8Center = 1 << 15;     // the largest constant zero point that is taken

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
  bool dots;           // whether to use instructions for sums of products of bytes that not every processor has
  std::int8_t* codes;     // [fours * 4 * count, 32]
  float* steps;           // [fours * 4 * count]
  std::int32_t* starts;   // the same: what sums begin with
  float* sums;            // the same: of codes, by which zeros are multiplied; null where there are none
};

// The scratch memory of one thread.
struct alignas(64) Int8Scratch {
  std::uint8_t bytes[kInt8Rows * kInt8Span * 4 * kInt8Block];  // of codes
  float scales[kInt8Span * 4 * kInt8Rows];                     // of every block
  float zeros[kInt8Span * 4 * kInt8Rows];
  float sums[kInt8Count * kInt8Sums * kInt8Rows];
};

}  // namespace ingot
