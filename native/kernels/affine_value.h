// Decoding of a code (spec/affine.md, "Decoding"), once per instruction set.
#pragma once
#include "core/dtype.h"

namespace ingot::INGOT_ISA {
namespace {

enum class Zero { none, point, offset };  // s * q, s * (q - z), s * q + z

inline Zero zero_of(const AffineLayout& layout, const void* zeros) {
  return zeros == nullptr ? Zero::none : layout.offset ? Zero::offset : Zero::point;
}

// Each step is rounded to f32 (no contraction: see CMakeLists.txt).
template <Zero kZero>
inline float scaled(float q, float scale, float zero) {
  if constexpr (kZero == Zero::point) return scale * (q - zero);
  if constexpr (kZero == Zero::offset) return scale * q + zero;
  return scale * q;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
