// What a decoder layer of a language model computes around its products (spec/loading.md, "Layers in native calls"). Plain
// data only, as in core/dtype.h.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

constexpr std::size_t kAttendWidth = 512;    // columns of a head, at most
constexpr std::size_t kAttendColumns = 16;   // they come in so many
constexpr std::size_t kAttendTokens = 256;   // whose keys are seen together: results do not depend on threads

// A few queries of each head with the first `tokens` keys and values of that head.
struct Attend {
  const void* queries;  // [heads, rows, width]
  const void* keys;     // [heads, capacity, width]
  const void* values;   // as keys
  void* out;            // as queries
  std::size_t heads, rows, width, tokens, capacity;
  Dtype type;
  float scale;

  std::size_t segments() const { return (tokens + kAttendTokens - 1) / kAttendTokens; }
  // Of what a segment leaves of one row: the largest score, the sum of powers, and the weighted values.
  std::size_t part() const { return width + 2; }
};

}  // namespace ingot
