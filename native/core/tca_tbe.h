// Rows of a bf16 matrix in the triple-bitmap encoding (spec/tca_tbe.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Output: parts of the global tiles (64 x 64) that contain given rows, row of tiles by row of tiles.
struct TcaParts {
  std::uint16_t* counts;      // per tile: high bytes, fallback elements, padding included
  std::uint64_t* bitmaps[3];  // 64 words per tile: bits 0, 1, 2 of the codes
  std::uint8_t* high;
  std::uint16_t* fallback;
};

// The same parts as input.
struct TcaConst {
  const std::uint16_t* counts;
  const std::uint64_t* bitmaps[3];
  const std::uint8_t* high;
  const std::uint16_t* fallback;
};

struct TcaSizes {
  std::size_t high;      // bytes
  std::size_t fallback;  // elements
};

}  // namespace ingot
