// e to the power x, to within two units in the last place, the same on every instruction set.
#pragma once
#include <initializer_list>

#include "kernels/affine_matmul_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

// Uses the polynomial of Cephes' expf (Moshier): x = n ln 2 + r. The result below -87 is that of -87, above 88 that of
// 88, and of NaN is NaN.
inline Floats exponential(Floats x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  x = smaller(splat(88.0f), larger(splat(-87.0f), x));  // returns the second operand if either is NaN
  const Floats n = (x * splat(1.44269504088896341f) + splat(kRound)) - splat(kRound);
  const Floats r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Floats p = splat(1.9875691500e-4f);
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + splat(next);
  p = p * (r * r) + r + splat(1.0f);
  // n may be any integer for NaN: 2^n then multiplies a NaN.
  const Words integer = std::bit_cast<Words>(n + splat(kRound)) << 23;
  return p * std::bit_cast<Floats>(integer + (127u << 23));
}

}  // namespace
}  // namespace ingot::INGOT_ISA
