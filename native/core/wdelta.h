// The three strategies of .wdelta, spec/wdelta.md. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

struct FloatRange {
  float low, high;
};

// code = (value - low) / divisor * factor, cut to 0..15 and rounded to nearest even.
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

// The output of differences whose magnitude, as bits, is above `bound` (-1: all), and of the first `equals` that equal it.
// `offset` is added to their positions.
struct TopPlaces {
  std::int32_t bound;
  std::size_t equals;
  std::int64_t offset;
  std::int64_t* positions;
  float* values;
  std::size_t room;
};

// How many went there, or more than there was room for; the first that is not finite among them (the number of differences
// where all are); the range of the others, (inf, -inf) where there are none, and the last of these (-1).
struct TopFound {
  std::size_t count, bad;
  FloatRange others;
  std::int64_t last;
  float last_value;
};

// Values in the order of their positions, all inside the slab that is decoded. `width` is the size of an element.
struct Placed {
  const std::int64_t* positions;
  const void* values;
  std::size_t count;
};

// `count` elements of `type` (f32, f16, bf16) to which differences are added: out = round(base + d), or base - d where
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
