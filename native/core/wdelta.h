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
