// Decoding of a code (spec/affine.md, "Decoding"), once per instruction set.
#pragma once
#include "core/dtype.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

enum class Zero { none, point, offset };  // s * q, s * (q - z), s * q + z

inline Zero zero_of(const AffineLayout& layout, const void* zeros) {
  return zeros == nullptr ? Zero::none : layout.offset ? Zero::offset : Zero::point;
}

// The sign bit of signed codes, which are numbers in two's complement; 0 for unsigned codes.
inline int half_of(const AffineLayout& layout) { return layout.is_signed ? 1 << (layout.bits - 1) : 0; }

inline float number_of(std::uint8_t code, int half) { return static_cast<float>((code ^ half) - half); }

// Scales or zeros of a chunk in f32. Not inlined: many decoders call it, once for hundreds of codes.
[[maybe_unused, gnu::noinline]] void widen(const void* from, Dtype type, std::size_t first, std::size_t count, float* out) {
  load_floats_of(from, type, first, count, out);
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
