// Choice of scales and zero points: the arguments of the kernels (spec/affine.md, "Quantizers"). Plain data only, as in
// core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ingot {

constexpr int kCandidates = 24;  // shrink factors of the MSE search: 1 - k / 32 for k = 0 .. 23

struct AffineChoice {
  bool symmetric;    // scale from the largest magnitude, no zero point; else from minimum and maximum
  bool search;       // MSE search over all candidates; else the first
  bool provided;        // scales and zeros are inputs
  Dtype scale_type;  // f32, f16 or bf16
  float shift;       // of zero points: 2^(bits - 1) where codes that have them are two's complement, else 0
  bool offset = false;  // zeros are offsets, the minimum of a group: q = rint((w - z) / s)
  int zero_point = -1;  // of every code, where symmetric codes are unsigned; else -1
};

struct AffineStatus {
  enum Code : int { ok = 0, non_finite = 1, scale_overflow = 2 };
  Code code;
  // Index of the first element that is not finite, or the first element of a group whose scale overflows.
  std::size_t index;
};

// Minimum and maximum of the values and 0; `bad` is the index of the first value that is not finite, or `n`.
struct AffineRange {
  float low;
  float high;
  std::size_t bad;
};

}  // namespace ingot
