// The three strategies of .wdelta, spec/wdelta.md. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

struct FloatRange {
  float low, high;
};

// code = (value - low) / divisor * factor, limited to 0..15 and rounded to nearest even.
struct Int4Grid {
  float low, divisor, factor;
};

// tuned - base of `count` elements of `type` (f32, f16, bf16), computed in f32; without a base `tuned` are the differences.
struct Differences {
  const void* tuned;
  const void* base;
  std::size_t count;
  Dtype type;
};

// The output of the differences whose magnitude, as bits, is above `bound` (-1: all), and of the first `equals`
// differences that equal it. `offset` is added to their positions.
struct TopPlaces {
  std::int32_t bound;
  std::size_t equals;
  std::int64_t offset;
  std::int64_t* positions;
  float* values;
  std::size_t room;
};

// The number of differences in the output, or a larger number if there was no space; the first that is not finite (the
// number of differences if all are finite); the range of the others, (inf, -inf) if there are none; and the last of the
// others (-1).
struct TopFound {
  std::size_t count, bad;
  FloatRange others;
  std::int64_t last;
  float last_value;
};

// Values in the order of their positions, all inside the decoded slab. `width` is the size of an element.
struct Placed {
  const std::int64_t* positions;
  const void* values;
  std::size_t count;
};

// `count` elements of `type` (f32, f16, bf16) to which differences are added: out = round(base + d), or base - d if
// `less`; back = round(out - d) unless it is null.
struct Addition {
  const void* base;
  void* out;
  void* back;
  std::size_t count;
  Dtype type;
  bool less;
};

}  // namespace ingot
