// How codes times scales lie in memory (spec/scaled_codebook.md). Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// The value of a code: an entry of a table, or, at 8 bits, a number.
enum class ScaledValues { table, e4m3, e5m2, i8 };

// Elements are numbered in row-major order of rows of `cols`; the first one here is number `phase` of its row. Each row
// has a scale for `group` columns, its last group may be shorter; `scales` begins with that of element 0.
struct ScaledLayout {
  std::size_t cols, group;  // at least 1
  std::size_t phase;        // below cols
  int bits;                 // 1..8
  bool high_first;          // bits is 4, and the first code of a byte lies in its high bits
  ScaledValues values;
  const float* table;             // 2^bits entries; null for other values than a table's
  const float* scales;            // null where scales are bytes
  const std::uint8_t* scale_bytes;
  const float* scale_table;       // what the 256 bytes stand for
};

}  // namespace ingot
