// The three strategies of .wdelta, spec/wdelta.md. Plain data only, as in core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Where the k largest magnitudes begin: bits of the smallest of them, how many are strictly larger, and the index of
// the first value that is NaN or infinite (n if there is none; then nothing else is valid).
struct TopBound {
  std::uint32_t bits;
  std::size_t above;
  std::size_t bad;
};

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
