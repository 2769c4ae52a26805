// Multiplies codes of small floats, and of tables of sixteen, by a scale: one at a time, and many with the look-ups of
// each instruction set.
#pragma once
#include "core/scaled.h"

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

// A number of one sign bit, `kExponent` and `kMantissa` bits without infinities, computed with integers, so that no
// subnormal is multiplied.
inline float e4m3_to_f32(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const int integer = mantissa + (exponent != 0 ? 8 : 0);
  const std::uint32_t power = static_cast<std::uint32_t>((exponent != 0 ? exponent : 1) + 117) << 23;  // 2^(e - 10)
  const float magnitude = static_cast<float>(integer) * std::bit_cast<float>(power);
  std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  bits = (code & 0x7f) == 0x7f ? 0x7fc00000u : bits;
  return std::bit_cast<float>(bits | static_cast<std::uint32_t>(code & 0x80) << 24);
}

inline float e5m2_to_f32(std::uint8_t code) {
  const int exponent = code >> 2 & 31, mantissa = code & 3;
  const int integer = mantissa + (exponent != 0 ? 4 : 0);
  const std::uint32_t power = static_cast<std::uint32_t>((exponent != 0 ? exponent : 1) + 110) << 23;  // 2^(e - 17)
  const float magnitude = static_cast<float>(integer) * std::bit_cast<float>(power);
  std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  const std::uint32_t special = mantissa != 0 ? 0x7fc00000u : 0x7f800000u;
  bits = exponent == 31 ? special : bits;
  return std::bit_cast<float>(bits | static_cast<std::uint32_t>(code & 0x80) << 24);
}

template <ScaledValues kValues>
inline float value_of(std::uint8_t code, const float* table) {
  if constexpr (kValues == ScaledValues::e4m3) return e4m3_to_f32(code);
  if constexpr (kValues == ScaledValues::e5m2) return e5m2_to_f32(code);
  if constexpr (kValues == ScaledValues::i8) return static_cast<float>(static_cast<std::int8_t>(code));
  return table[code];
}

// Codes below 16 of a group: the sixteen products are computed once and looked up. `table` has 16 entries.
template <Dtype kDtype>
void look_up(const std::uint8_t* __restrict codes, std::size_t n, float scale, const float* __restrict table,
             TypeOf<kDtype>* __restrict out);

#if defined(__AVX512BW__)

// The magnitudes of E4M3 as bf16, which represents all of them: code 127 is NaN.
struct Magnitudes {
  alignas(64) std::uint16_t bits[128];
  constexpr Magnitudes() : bits{} {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      int power = exponent + 120, kept = mantissa;  // 2^(e - 7) with bf16's bias of 127
      if (exponent == 0 && mantissa != 0) {
        for (power = 121; kept < 8; --power) kept <<= 1;
        kept &= 7;
      }
      bits[code] = static_cast<std::uint16_t>(code == 127 ? 0x7fc0 : code == 0 ? 0 : power << 7 | kept << 4);
    }
  }
};
constexpr Magnitudes kMagnitudes;

// Codes of E4M3, thirty-two at a time: each is looked up as bf16, and multiplied in f32. Returns the number of
// processed codes; none if the scale is NaN, because preserving its payload needs other rounding.
template <Dtype kDtype>
std::size_t convert_e4m3(const std::uint8_t* __restrict codes, std::size_t n, float scale,
                         TypeOf<kDtype>* __restrict out) {
  if (scale != scale) return 0;
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512i first = _mm512_load_si512(kMagnitudes.bits), second = _mm512_load_si512(kMagnitudes.bits + 32);
  const __m512i third = _mm512_load_si512(kMagnitudes.bits + 64), fourth = _mm512_load_si512(kMagnitudes.bits + 96);
  const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000)), upper = _mm512_set1_epi16(0x40);
  const auto product = [&](__m512i bits) { return _mm512_mul_ps(factor, _mm512_castsi512_ps(bits)); };
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i indices = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    const __m512i low = _mm512_permutex2var_epi16(first, indices, second),
                  high = _mm512_permutex2var_epi16(third, indices, fourth);
    const __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(indices, upper), high);
    const __m512i value = _mm512_or_si512(magnitude, _mm512_and_si512(_mm512_slli_epi16(indices, 8), sign));
    if constexpr (kDtype == Dtype::bf16) {  // separated and joined in lanes of eight
      const __m512i ones = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff), none = _mm512_setzero_si512();
      const auto rounded = [&](__m512i bits) {
        const __m512i result = _mm512_castps_si512(product(bits));
        const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(result, 16), ones);
        return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(result, half), lsb), 16);
      };
      _mm512_storeu_si512(out + i, _mm512_packus_epi32(rounded(_mm512_unpacklo_epi16(none, value)),
                                                       rounded(_mm512_unpackhi_epi16(none, value))));
    } else {
      for (int part = 0; part < 2; ++part) {
        const __m256i half = part == 0 ? _mm512_castsi512_si256(value) : _mm512_extracti64x4_epi64(value, 1);
        const __m512 result = product(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        if constexpr (kDtype == Dtype::f32) _mm512_storeu_ps(out + i + 16 * part, result);
        if constexpr (kDtype == Dtype::f16)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16 * part), store_sixteen<kDtype>(result));
      }
    }
  }
  return i;
}

// The products of every magnitude of E4M3 with the scale of one position in a row, which the rows of a block share.
struct Products {
  float scale = std::numeric_limits<float>::quiet_NaN();
  bool is_filled = false;
  alignas(64) std::uint16_t bits[128];
};

// Looks up codes of E4M3 in their rounded products; the sign of a code changes that of its product.
inline void look_up_e4m3(const std::uint8_t* __restrict codes, std::size_t n, const Products& products,
                         std::uint16_t* __restrict out) {
  const std::uint16_t* bits = products.bits;
  const __m512i first = _mm512_load_si512(bits), second = _mm512_load_si512(bits + 32);
  const __m512i third = _mm512_load_si512(bits + 64), fourth = _mm512_load_si512(bits + 96);
  const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000)), upper = _mm512_set1_epi16(0x40);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i indices = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    const __m512i low = _mm512_permutex2var_epi16(first, indices, second),
                  high = _mm512_permutex2var_epi16(third, indices, fourth);
    const __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(indices, upper), high);
    _mm512_storeu_si512(out + i, _mm512_xor_si512(magnitude, _mm512_and_si512(_mm512_slli_epi16(indices, 8), sign)));
  }
  for (; i < n; ++i) out[i] = static_cast<std::uint16_t>(bits[codes[i] & 127] ^ (codes[i] & 0x80) << 8);
}

template <Dtype kDtype>
void look_up(const std::uint8_t* __restrict codes, std::size_t n, float scale, const float* __restrict table,
             TypeOf<kDtype>* __restrict out) {
  const __m512 products = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_load_ps(table));
  std::size_t i = 0;
  const auto sixteen = [&](std::size_t index) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + index));
  };
  if constexpr (kDtype == Dtype::f32) {
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(sixteen(i)), products));
    alignas(64) float tail[16];
    _mm512_store_ps(tail, products);
    for (; i < n; ++i) out[i] = tail[codes[i]];
  } else {
    const __m256i entries = store_sixteen<kDtype>(products);
    const __m512i both = _mm512_broadcast_i64x4(entries);
    for (; i + 32 <= n; i += 32) {
      const __m512i indices = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
      _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(indices, both));
    }
    for (; i + 16 <= n; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                          _mm256_permutexvar_epi16(_mm256_cvtepu8_epi16(sixteen(i)), entries));
    if (i == n) return;
    alignas(32) std::uint16_t tail[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(tail), entries);
    for (; i < n; ++i) out[i] = tail[codes[i]];
  }
}

#elif defined(__AVX2__)

template <Dtype kDtype>
void look_up(const std::uint8_t* __restrict codes, std::size_t n, float scale, const float* __restrict table,
             TypeOf<kDtype>* __restrict out) {
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256 first = _mm256_mul_ps(factor, _mm256_load_ps(table)), second = _mm256_mul_ps(factor, _mm256_load_ps(table + 8));
  std::size_t i = 0;
  if constexpr (kDtype == Dtype::f32) {
    for (; i + 8 <= n; i += 8) {
      const __m256i indices = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28));  // moves to bit 3
      _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, indices),
                                                 _mm256_permutevar8x32_ps(second, indices), high));
    }
    if (i == n) return;
    alignas(32) float tail[16];
    _mm256_store_ps(tail, first);
    _mm256_store_ps(tail + 8, second);
    for (; i < n; ++i) out[i] = tail[codes[i]];
  } else {
    // Low and high bytes of the sixteen entries are looked up separately and interleaved.
    const __m128i ones = store_eight<kDtype>(first), two = store_eight<kDtype>(second), mask = _mm_set1_epi16(0xff);
    const __m256i low =
        _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(ones, mask), _mm_and_si128(two, mask)));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(ones, 8), _mm_srli_epi16(two, 8)));
    for (; i + 32 <= n; i += 32) {
      const __m256i indices =
          _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)), 0xd8);
      const __m256i lows = _mm256_shuffle_epi8(low, indices),
                    highs = _mm256_shuffle_epi8(high, indices);  // interleaved within halves
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_unpacklo_epi8(lows, highs));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), _mm256_unpackhi_epi8(lows, highs));
    }
    for (; i + 16 <= n; i += 16) {
      const __m128i indices = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i lows = _mm_shuffle_epi8(_mm256_castsi256_si128(low), indices);
      const __m128i highs = _mm_shuffle_epi8(_mm256_castsi256_si128(high), indices);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_unpacklo_epi8(lows, highs));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i + 8), _mm_unpackhi_epi8(lows, highs));
    }
    if (i == n) return;
    alignas(16) std::uint16_t tail[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(tail), ones);
    _mm_store_si128(reinterpret_cast<__m128i*>(tail + 8), two);
    for (; i < n; ++i) out[i] = tail[codes[i]];
  }
}

#else

template <Dtype kDtype>
void look_up(const std::uint8_t* __restrict codes, std::size_t n, float scale, const float* __restrict table,
             TypeOf<kDtype>* __restrict out) {
  TypeOf<kDtype> products[16];
  float exact[16];
  for (int i = 0; i < 16; ++i) exact[i] = scale * table[i];
  store_block<kDtype>(exact, 16, products);
  std::size_t i = 0;
#if defined(INGOT_NEON)
  i = ByteTables<TypeOf<kDtype>, 1>(products).store_all(codes, n, out);
#endif
  for (; i < n; ++i) out[i] = products[codes[i]];
}

#if defined(INGOT_NEON)
// Codes of E4M3, sixteen at a time: interpreted as f16, they are 2^-8 of their value, also if subnormal. Returns the
// number of processed codes; none if the scale is NaN, as above.
template <Dtype kDtype>
std::size_t convert_e4m3(const std::uint8_t* __restrict codes, std::size_t n, float scale,
                         TypeOf<kDtype>* __restrict out) {
  if (scale != scale) return 0;
  const float32x4_t factor = vdupq_n_f32(scale), unit = vdupq_n_f32(256.0f);
  const uint16x8_t kept = vdupq_n_u16(0xbf80), magnitude = vdupq_n_u16(0x3f80), quiet = vdupq_n_u16(0x7e00);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(vld1_u8(codes + i)), 7);
    const uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(wide), kept);
    const uint16x8_t nan = vceqq_u16(vandq_u16(bits, magnitude), magnitude);
    const float16x8_t half = vreinterpretq_f16_u16(vbslq_u16(vshrq_n_u16(nan, 1), quiet, bits));
    const float32x4_t low = vmulq_f32(factor, vmulq_f32(vcvt_f32_f16(vget_low_f16(half)), unit));
    const float32x4_t high = vmulq_f32(factor, vmulq_f32(vcvt_high_f32_f16(half), unit));
    if constexpr (kDtype == Dtype::f32) {
      vst1q_f32(out + i, low);
      vst1q_f32(out + i + 4, high);
    } else {
      vst1q_u16(out + i, store_eight<kDtype>(low, high));
    }
  }
  return i;
}
#endif

#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
