// Ranges and codes of groups of values with sixteen lanes of AVX-512; the results equal those of affine_quantize.cc
// element by element.
#pragma once
#if defined(__AVX512BW__)
#include "kernels/affine_choose.h"

namespace ingot::INGOT_ISA {
namespace {

// Loads sixteen values, or the first `there` of them and zeros.
template <Dtype kDtype>
inline __m512 sixteen_floats(const TypeOf<kDtype>* in, std::size_t there = 16) {
  const auto mask = static_cast<__mmask16>((1u << there) - 1);
  if constexpr (kDtype == Dtype::f32) return _mm512_maskz_loadu_ps(mask, in);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, in);
  if constexpr (kDtype == Dtype::f16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

struct KeyRange {
  std::int32_t low, high;
};

// Minimum and maximum of the order-preserving integers of the values, from `start` on.
template <Dtype kDtype>
inline KeyRange key_range(const TypeOf<kDtype>* in, std::size_t n, KeyRange start) {
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
  __m512i lows = _mm512_set1_epi32(start.low), highs = _mm512_set1_epi32(start.high);
  const auto take = [&](__m512 values, __mmask16 there) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i keys = _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitude));
    lows = _mm512_mask_min_epi32(lows, there, lows, keys);
    highs = _mm512_mask_max_epi32(highs, there, highs, keys);
  };
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) take(sixteen_floats<kDtype>(in + i), 0xffff);
  if (i < n) take(sixteen_floats<kDtype>(in + i, n - i), static_cast<__mmask16>((1u << (n - i)) - 1));
  return {_mm512_reduce_min_epi32(lows), _mm512_reduce_max_epi32(highs)};
}

// Codes of `n` values; up to 15 after them are overwritten.
template <Dtype kDtype>
inline void level_run(const TypeOf<kDtype>* in, std::size_t n, const AffineGrid& grid, int bits, std::uint8_t* codes) {
  const __m512 offset = _mm512_set1_ps(grid.offset), scale = _mm512_set1_ps(grid.scale);
  const __m512 low = _mm512_set1_ps(grid.low), high = _mm512_set1_ps(grid.high), round = _mm512_set1_ps(kRound);
  const __m512i zero = _mm512_set1_epi32(static_cast<std::int32_t>(grid.zero)), mask = _mm512_set1_epi32((1 << bits) - 1);
  for (std::size_t i = 0; i < n; i += 16) {
    const __m512 values = n - i < 16 ? sixteen_floats<kDtype>(in + i, n - i) : sixteen_floats<kDtype>(in + i);
    const __m512 level = _mm512_div_ps(_mm512_sub_ps(values, offset), scale);
    // Like `a > b ? a : b` and `a < b ? a : b`, these return the second operand if the first is NaN.
    const __m512 rounded = _mm512_add_ps(_mm512_min_ps(_mm512_max_ps(level, low), high), round);
    const __m512i code = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rounded), zero), mask);  // its low bits
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
