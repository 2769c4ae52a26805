// The three strategies of .wdelta, spec/wdelta.md. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

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

}  // namespace ingot
