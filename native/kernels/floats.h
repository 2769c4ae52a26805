// Conversions between the four float types, once per instruction set. All round to nearest, ties to even. A NaN stays a
// NaN: where bits are lost it is made quiet and keeps the high bits of its payload, as F16C does.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

#include "kernels/neon.h"

#if defined(__AVX2__) && defined(__F16C__)  // x86-64-v3 has both
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(h & 0x7fff) << 13;
  // Scaling by 2^112 moves the exponent bias from 15 to 127, and is exact for subnormals too.
  std::uint32_t bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  bits |= magnitude > 0x0f800000u ? 0x00400000u : 0u;
  return std::bit_cast<float>(bits | static_cast<std::uint32_t>(h & 0x8000) << 16);
}

inline std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-14 on: change the bias, add just under half of a unit, plus one if the kept part is odd.
  const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  // Below 2^-14 units are 2^-24: adding 0.5 moves the sum to where one f32 unit is that wide.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : rounded >> 13;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000u));
}

inline float bf16_to_f32(std::uint16_t b) { return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16); }

// For values that are not NaN.
inline std::uint16_t number_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded);
}

// Rounds to odd, so that rounding to 16 bits afterwards gives the result of rounding the double once (Boldo, Melquiond:
// "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", section 3).
inline float f64_to_odd_f32(double value) {
  const float near = static_cast<float>(value);
  const double back = static_cast<double>(near);
  std::uint32_t bits = std::bit_cast<std::uint32_t>(near);
  const double magnitude = std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) & 0x7fffffffffffffffull);
  const double got = std::bit_cast<double>(std::bit_cast<std::uint64_t>(back) & 0x7fffffffffffffffull);
  const bool inexact = got < magnitude || got > magnitude;
  const std::uint32_t parity = (bits - (got > magnitude ? 1u : 0u)) | 1u;
  bits = inexact ? parity : bits;
  return std::bit_cast<float>(bits);
}

// Conversions between an element type and f32.
template <Dtype kDtype>
struct Element;

template <>
struct Element<Dtype::f32> {
  using Type = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

template <>
struct Element<Dtype::f16> {
  using Type = std::uint16_t;
  static float load(std::uint16_t x) { return f16_to_f32(x); }
  static std::uint16_t store(float x) { return f32_to_f16(x); }
};

template <>
struct Element<Dtype::bf16> {
  using Type = std::uint16_t;
  static float load(std::uint16_t x) { return bf16_to_f32(x); }
  static std::uint16_t store(float x) { return f32_to_bf16(x); }
};

template <>
struct Element<Dtype::f64> {
  using Type = double;
  static float load(double x) { return static_cast<float>(x); }
  static double store(float x) { return static_cast<double>(x); }
};

template <Dtype kDtype>
using TypeOf = typename Element<kDtype>::Type;

#if defined(__AVX2__)
// Element<kDtype>::load of eight elements.
template <Dtype kDtype>
inline __m256 load_eight(const TypeOf<kDtype>* from) {
  if constexpr (kDtype == Dtype::f32) {
    return _mm256_loadu_ps(from);
  } else {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (kDtype == Dtype::f16) return _mm256_cvtph_ps(eight);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  }
}
#endif

// Widens `n` elements to f32 (f64 is rounded).
template <Dtype kDtype>
inline void load_block(const TypeOf<kDtype>* __restrict in, std::size_t n, float* __restrict out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if constexpr (kDtype == Dtype::f16)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load_eight<kDtype>(in + i));
#elif defined(INGOT_NEON)
  if constexpr (kDtype == Dtype::f16)
    for (; i + 8 <= n; i += 8) {
      const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(in + i));
      vst1q_f32(out + i, vcvt_f32_f16(vget_low_f16(eight)));
      vst1q_f32(out + i + 4, vcvt_high_f32_f16(eight));
    }
#endif
  for (; i < n; ++i) out[i] = Element<kDtype>::load(in[i]);
}

#if defined(__AVX2__)
// number_to_bf16 for eight, in the high halves of lanes.
inline __m256i eight_numbers(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
}

// Element<kDtype>::store for eight values.
template <Dtype kDtype>
inline __m128i store_eight(__m256 values) {
  if constexpr (kDtype == Dtype::f16)
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i bits = _mm256_castps_si256(values), rounded = eight_numbers(values);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
#if defined(__AVX512F__)
// number_to_bf16 for sixteen.
inline __m256i sixteen_numbers(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

// Element<kDtype>::store for sixteen.
template <Dtype kDtype>
inline __m256i store_sixteen(__m512 values) {
  if constexpr (kDtype == Dtype::f16) return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
#endif
#elif defined(INGOT_NEON)
// Element<kDtype>::store for eight values.
template <Dtype kDtype>
inline uint16x8_t store_eight(float32x4_t low, float32x4_t high) {
  if constexpr (kDtype == Dtype::f16)
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
  const uint32x4_t one = vdupq_n_u32(1), half = vdupq_n_u32(0x7fff);
  const uint32x4_t first = vreinterpretq_u32_f32(low), second = vreinterpretq_u32_f32(high);
  const auto lsb = [=](uint32x4_t bits) { return vandq_u32(vshrq_n_u32(bits, 16), one); };
  const uint16x8_t rounded =
      vaddhn_high_u32(vaddhn_u32(vaddq_u32(first, half), lsb(first)), vaddq_u32(second, half), lsb(second));
  const uint16x8_t numbers = vuzp1q_u16(vreinterpretq_u16_u32(vceqq_f32(low, low)), vreinterpretq_u16_u32(vceqq_f32(high, high)));
  const uint16x8_t bits = vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high));
  return vbslq_u16(numbers, rounded, vorrq_u16(bits, vdupq_n_u16(0x40)));
}
#endif

// Rounds `n` f32 values to the element type.
template <Dtype kDtype>
inline void store_block(const float* __restrict in, std::size_t n, TypeOf<kDtype>* __restrict out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if constexpr (kDtype == Dtype::f16 || kDtype == Dtype::bf16)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), store_eight<kDtype>(_mm256_loadu_ps(in + i)));
#elif defined(INGOT_NEON)
  if constexpr (kDtype == Dtype::f16 || kDtype == Dtype::bf16)
    for (; i + 8 <= n; i += 8) vst1q_u16(out + i, store_eight<kDtype>(vld1q_f32(in + i), vld1q_f32(in + i + 4)));
#endif
  for (; i < n; ++i) out[i] = Element<kDtype>::store(in[i]);
}

// Reads elements of an array of a type known at run time: f32, f16 or bf16.
inline void load_floats_of(const void* from, Dtype type, std::size_t first, std::size_t count, float* out) {
  switch (type) {
    case Dtype::f16:
      return load_block<Dtype::f16>(static_cast<const std::uint16_t*>(from) + first, count, out);
    case Dtype::bf16:
      return load_block<Dtype::bf16>(static_cast<const std::uint16_t*>(from) + first, count, out);
    default:
      return load_block<Dtype::f32>(static_cast<const float*>(from) + first, count, out);
  }
}

// Reads element `i` of an array of a type known at run time.
inline float load_at(const void* data, Dtype dtype, std::size_t i) {
  switch (dtype) {
    case Dtype::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case Dtype::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case Dtype::f64:
      return static_cast<float>(static_cast<const double*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

inline void store_at(void* data, Dtype dtype, std::size_t i, float value) {
  switch (dtype) {
    case Dtype::f16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_f16(value);
      break;
    case Dtype::bf16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_bf16(value);
      break;
    case Dtype::f64:
      static_cast<double*>(data)[i] = static_cast<double>(value);
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

inline bool is_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace
}  // namespace ingot::INGOT_ISA
