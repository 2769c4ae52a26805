// Float operations in a register of the machine's width that have an instruction, but that compilers translate to
// several.
#pragma once
#include <cstring>

#include "kernels/vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

using Floats = float __attribute__((vector_size(kVectorBytes)));

constexpr std::size_t kWidth = kVectorBytes / sizeof(float);

inline Floats load_floats(const float* from) {
  Floats result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
// As many doubles as a register holds. GCC 12 uses several instructions for a vector's conversion.
inline Doubles load_doubles(const float* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(from));
#elif defined(__AVX__)
  return _mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  float __attribute__((vector_size(kVectorBytes / 2))) found;
  std::memcpy(&found, from, sizeof found);
  return __builtin_convertvector(found, Doubles);
#endif
}
inline void store_floats(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
inline Floats all(float value) { return Floats{} + value; }
// The same, but -0 stays -0: a move instead of an addition.
inline Floats splat(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX__)
  return _mm256_set1_ps(value);
#else
  return Floats{value, value, value, value};
#endif
}
// Compilers translate `a > b ? a : b` to a comparison and a selection; x86 has one instruction. Returns the second
// operand if either is NaN.
#if defined(__AVX512F__)
inline Floats larger(Floats a, Floats b) { return _mm512_maskz_max_ps(0xffff, a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_maskz_min_ps(0xffff, a, b); }
#elif defined(__AVX__)
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#elif defined(__SSE2__)
inline Floats larger(Floats a, Floats b) { return _mm_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm_min_ps(a, b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif
inline Floats magnitude(Floats a) {
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7fffffff);
}
inline bool all_below(Floats a, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, all(limit), _CMP_LT_OQ) == 0xffff;
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps(a, all(limit), _CMP_LT_OQ)) == 0xff;
#else
  bool result = true;
  for (std::size_t lane = 0; lane < kWidth; ++lane) result &= a[lane] < limit;
  return result;
#endif
}
// A bit for each lane of `a` that is not above that of `b`, first lane in the lowest bit.
inline std::uint32_t none_above(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
#elif defined(__AVX__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)));
#elif defined(__SSE2__)
  return static_cast<std::uint32_t>(_mm_movemask_ps(_mm_cmple_ps(a, b)));
#else
  std::uint32_t result = 0;
  for (std::size_t lane = 0; lane < kWidth; ++lane) result |= static_cast<std::uint32_t>(a[lane] <= b[lane]) << lane;
  return result;
#endif
}
// The least lane; no lane may be NaN.
inline float least_of(Floats a) {
#if defined(__AVX512F__)
  return _mm512_reduce_min_ps(a);
#else
  alignas(kVectorBytes) float lanes[kWidth];
  store_floats(lanes, a);
  for (std::size_t width = kWidth / 2; width; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane] < lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
#endif
}
// sum + a * b, fused if that product is `kExact`: then both ways round once.
template <bool kExact>
inline Floats plus_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  if constexpr (kExact) return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
  if constexpr (kExact) return _mm256_fmadd_ps(a, b, sum);
#endif
  return sum + a * b;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
