// Keys and values of attention in packed blocks (spec/kv-cache.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kKvMost = 1024;  // rows, and columns, of a block
// Partial sums of a product with zeros; a group has a multiple of this number of columns.
constexpr std::size_t kKvLanes = 16;

// Matrices of codes [heads, capacity, rows, cols]; the first `count` blocks of each head are in use. Rows are affine
// codes, low bits first, with offsets (w = s * q + z) for groups of columns. Keys are stored in rows of channels,
// values in rows of tokens.
struct KvBlocks {
  const std::uint8_t* packed;
  const std::uint16_t* scales;  // f16 [heads, capacity, rows, groups]
  const std::uint16_t* zeros;   // like scales
  std::size_t capacity, count;
  std::size_t rows, cols, group, groups;
  std::size_t row_bytes;
  int bits;  // 2, 4 or 8
};

}  // namespace ingot
