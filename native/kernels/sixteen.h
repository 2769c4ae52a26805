// Sixteen bytes in a register: codes of blocks while they are converted to f32. Written with the compiler's vector
// types, and with intrinsics for single instructions that replace many.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

using Bytes16 = std::uint8_t __attribute__((vector_size(16)));
using Codes16 = std::int8_t __attribute__((vector_size(16)));
using Words4 = std::uint32_t __attribute__((vector_size(16)));
using Words2 = std::uint64_t __attribute__((vector_size(16)));

inline Bytes16 sixteen(const std::uint8_t* from) {
  Bytes16 result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// The bytes as signed integers, minus `zero`.
inline Codes16 less(Bytes16 q, int zero) { return reinterpret_cast<Codes16>(q - static_cast<std::uint8_t>(zero)); }

// Entries 0 to 15 of a table.
inline Codes16 entries(const std::int8_t* table, Bytes16 indices) {
  Codes16 result;
#if defined(__SSSE3__)
  result = reinterpret_cast<Codes16>(
      _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table)), reinterpret_cast<__m128i>(indices)));
#elif defined(__aarch64__)
  result = reinterpret_cast<Codes16>(vqtbl1q_s8(vld1q_s8(table), reinterpret_cast<uint8x16_t>(indices)));
#else
  for (int j = 0; j < 16; ++j) result[j] = table[indices[j]];
#endif
  return result;
}

// All bits of byte j are bit j.
inline Bytes16 spread(std::uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return reinterpret_cast<Bytes16>(_mm_movm_epi8(static_cast<__mmask16>(bits)));
#else
  constexpr std::uint64_t bit_of_lane = 0x0101010101010101;
  const Words2 both = {(bits & 255) * bit_of_lane, (bits >> 8 & 255) * bit_of_lane};
  const Bytes16 ones = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  return reinterpret_cast<Bytes16>((reinterpret_cast<Bytes16>(both) & ones) == ones);
#endif
}

// Negates where the mask is set.
inline Codes16 negated(Codes16 values, Bytes16 mask) {
  const Codes16 all = reinterpret_cast<Codes16>(mask);
  return (values ^ all) - all;
}

// out[j] = scale * q[j] - minimum, or only the product if there is no minimum.
#if defined(__AVX512F__)
template <bool kMinimum>
inline void widen(Codes16 q, float scale, float minimum, float* out) {
  __m512 values = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, reinterpret_cast<__m128i>(q)));
  values = _mm512_set1_ps(scale) * values;
  if constexpr (kMinimum) values = values - _mm512_set1_ps(minimum);
  _mm512_storeu_ps(out, values);
}
#elif defined(__AVX2__)
template <bool kMinimum>
inline void widen(Codes16 q, float scale, float minimum, float* out) {
  const auto eight = [=](__m128i low, float* to) {
    __m256 values = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)));
    if constexpr (kMinimum) values = _mm256_sub_ps(values, _mm256_set1_ps(minimum));
    _mm256_storeu_ps(to, values);
  };
  eight(reinterpret_cast<__m128i>(q), out);
  eight(_mm_srli_si128(reinterpret_cast<__m128i>(q), 8), out + 8);
}
#else
template <bool kMinimum>
__attribute__((noinline)) void widen(Codes16 q, float scale, float minimum, float* out) {
  for (int j = 0; j < 16; ++j) {
    const float value = scale * static_cast<float>(q[j]);
    out[j] = kMinimum ? value - minimum : value;
  }
}
#endif

inline void times(Codes16 q, float scale, float* out) { widen<false>(q, scale, 0, out); }
inline void times_less(Codes16 q, float scale, float minimum, float* out) { widen<true>(q, scale, minimum, out); }

}  // namespace
}  // namespace ingot::INGOT_ISA
