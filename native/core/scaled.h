// The memory layout of codes with scales (spec/scaled_codebook.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// The value of a code: an entry of a table, or, for 8 bits, a float.
enum class ScaledValues { table, e4m3, e5m2, i8 };

// Elements are numbered in row-major order, in rows of `cols`; the first element here has position `phase` in its row.
// Each row has a scale per `group` columns, and its last group may be shorter; `scales` begins with the scale of
// element 0.
struct ScaledLayout {
  std::size_t cols, group;  // at least 1
  std::size_t phase;        // below cols
  int bits;                 // 1..8
  bool high_first;          // bits is 4, and the first code of a byte lies in its high bits
  ScaledValues values;
  const float* table;             // 2^bits entries; null if values are not from a table
  const float* scales;            // null if scales are bytes
  const std::uint8_t* scale_bytes;
  const float* scale_table;       // the values of the 256 bytes
};

}  // namespace ingot
