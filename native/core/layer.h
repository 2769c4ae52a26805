// The operations of a language model's decoder layer besides its products (spec/loading.md, "Layers in native calls").
// Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kAttendWidth = 512;    // limit on the columns of a head
constexpr std::size_t kAttendColumns = 16;   // the columns of a head are a multiple of this
constexpr std::size_t kAttendTokens = 256;   // tokens of a block of keys, for any number of threads

// Queries of each head, with the first `tokens` keys and values of that head.
struct Attend {
  const void* queries;  // [heads, rows, width]
  const void* keys;     // [heads, capacity, width]
  const void* values;   // like keys
  void* out;            // like queries
  std::size_t heads, rows, width, tokens, capacity;
  Dtype type;
  float scale;

  std::size_t segments() const { return (tokens + kAttendTokens - 1) / kAttendTokens; }
  // The state of a row after a segment: the largest score, the sum of exponentials, and the weighted sum of values.
  std::size_t part() const { return width + 2; }
};

}  // namespace ingot
