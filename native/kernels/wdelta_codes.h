// Converts codes of 4 bits, and signs, to elements of two or four bytes; shared by decoding and adding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/neon.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// Two codes to two elements.
template <class T>
struct Pairs {
  struct Pair {
    T first, second;
  };
  Pair entries[256];
  T single[16];
  std::uint8_t planes[sizeof(T)][16];  // the bytes of an element, lowest first

  explicit Pairs(const T* table) {
    for (int code = 0; code < 16; ++code) {
      single[code] = table[code];
      std::uint8_t bytes[sizeof(T)];
      std::memcpy(bytes, table + code, sizeof bytes);
      for (std::size_t byte = 0; byte < sizeof(T); ++byte) planes[byte][code] = bytes[byte];
    }
    for (int byte = 0; byte < 256; ++byte) entries[byte] = {table[byte >> 4], table[byte & 15]};
  }

  // Decodes `n` codes that begin with code `first` of the stream.
  void expand(const std::uint8_t* packed, std::size_t first, std::size_t n, T* out) const {
    packed += first / 2;
    if (first % 2 && n) {
      *out++ = single[*packed++ & 15];
      --n;
    }
    for (std::size_t i = expand_many(packed, n / 2, out); i < n / 2; ++i)
      std::memcpy(out + 2 * i, &entries[packed[i]], sizeof(Pair));
    if (n % 2) out[n - 1] = single[packed[n / 2] >> 4];
  }

 private:
  // Decodes as many of `bytes` bytes as registers allow; returns their number.
  std::size_t expand_many(const std::uint8_t* packed, std::size_t bytes, T* out) const {
    std::size_t i = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 2) {  // low and high bytes apart
      const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(single));
      const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(single + 8));
      const __m128i mask = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
      const __m128i low = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask));
      const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
      const auto store = [&](__m128i codes, T* to) {
        const __m128i lows = _mm_shuffle_epi8(low, codes), highs = _mm_shuffle_epi8(high, codes);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(lows, highs));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm_unpackhi_epi8(lows, highs));
      };
      for (; i + 16 <= bytes; i += 16) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i));
        const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), nibble), odd = _mm_and_si128(both, nibble);
        store(_mm_unpacklo_epi8(even, odd), out + 2 * i);
        store(_mm_unpackhi_epi8(even, odd), out + 2 * i + 16);
      }
    }
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {  // masked forms, because GCC 12 warns of uninitialized values in the plain forms
      const __m512i table = _mm512_loadu_si512(single);
      const __m128i nibble = _mm_set1_epi8(15);
      for (; i + 8 <= bytes; i += 8) {
        const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i));
        const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), nibble), odd = _mm_and_si128(both, nibble);
        const __m512i codes = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_unpacklo_epi8(even, odd));
        _mm512_storeu_si512(out + 2 * i, _mm512_maskz_permutexvar_epi32(0xffff, codes, table));
      }
    }
#else
    if constexpr (sizeof(T) == 4) i = expand_planes(packed, bytes, out);
    if constexpr (sizeof(T) == 4) {  // bit 3 selects the half of the table
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(single));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(single + 8));
      const __m128i nibble = _mm_set1_epi8(15);
      for (; i + 4 <= bytes; i += 4) {
        int four;
        std::memcpy(&four, packed + i, sizeof four);
        const __m128i both = _mm_cvtsi32_si128(four);
        const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), nibble), odd = _mm_and_si128(both, nibble);
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd));
        const __m256i lows = _mm256_permutevar8x32_epi32(low, codes), highs = _mm256_permutevar8x32_epi32(high, codes);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
        const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(lows), _mm256_castsi256_ps(highs), upper);
        _mm256_storeu_ps(reinterpret_cast<float*>(out + 2 * i), chosen);
      }
    }
#endif
#elif defined(INGOT_NEON)
    const ByteTables<T, 1> table(single);
    for (; i + 16 <= bytes; i += 16) {
      const uint8x16_t both = vld1q_u8(packed + i), even = vshrq_n_u8(both, 4), odd = vandq_u8(both, vdupq_n_u8(15));
      table.store(vzip1q_u8(even, odd), out + 2 * i);
      table.store(vzip2q_u8(even, odd), out + 2 * i + 16);
    }
#else
    static_cast<void>(packed), static_cast<void>(bytes), static_cast<void>(out);
#endif
    return i;
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // Thirty-two codes at a time; each byte of their values is looked up separately.
  std::size_t expand_planes(const std::uint8_t* packed, std::size_t bytes, T* out) const {
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256i turns = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);  // so that interleaved halves are in order
    __m256i plane[4];
    for (std::size_t byte = 0; byte < 4; ++byte)
      plane[byte] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(planes[byte])));
    std::size_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i));
      const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), nibble), odd = _mm_and_si128(both, nibble);
      const __m256i in_order = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
      const __m256i codes = _mm256_permutevar8x32_epi32(in_order, turns);
      __m256i entries[4];
      for (std::size_t byte = 0; byte < 4; ++byte) entries[byte] = _mm256_shuffle_epi8(plane[byte], codes);
      const __m256i low[2] = {_mm256_unpacklo_epi8(entries[0], entries[1]),
                              _mm256_unpackhi_epi8(entries[0], entries[1])};
      const __m256i high[2] = {_mm256_unpacklo_epi8(entries[2], entries[3]),
                               _mm256_unpackhi_epi8(entries[2], entries[3])};
      auto* to = reinterpret_cast<__m256i*>(out + 2 * i);
      for (std::size_t half = 0; half < 2; ++half) {
        _mm256_storeu_si256(to + 2 * half, _mm256_unpacklo_epi16(low[half], high[half]));
        _mm256_storeu_si256(to + 2 * half + 1, _mm256_unpackhi_epi16(low[half], high[half]));
      }
    }
    return i;
  }
#endif
};

// masks[byte][j] is the sign bit where bit 7 - j of the byte is 0.
template <class T>
struct SignMasks {
  T entries[256][8];
  constexpr SignMasks() : entries() {
    for (int byte = 0; byte < 256; ++byte)
      for (int j = 0; j < 8; ++j)
        entries[byte][j] = (byte >> (7 - j)) & 1 ? T{0} : static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  }
};
template <class T>
constexpr SignMasks<T> kMasks;

template <class T>
using Eight __attribute__((vector_size(8 * sizeof(T)))) = T;

// Decodes `n` signs that begin with sign `first` of the stream: the scale, negated if the bit is 0.
template <class T>
void sign_row(const std::uint8_t* bits, std::size_t first, T scale, std::size_t n, T* out) {
  bits += first / 8;
  const unsigned shift = first % 8;
  std::size_t i = 0;
  Eight<T> scales = Eight<T>{} + scale, signs;
  const auto put = [&](unsigned byte) {
    std::memcpy(&signs, kMasks<T>.entries[byte], sizeof signs);
    signs ^= scales;
    std::memcpy(out + i, &signs, sizeof signs);
  };
  if (shift)
    for (; i + 8 <= n; i += 8, ++bits) put((bits[0] << shift | bits[1] >> (8 - shift)) & 255u);
  else
    for (; i + 8 <= n; i += 8, ++bits) put(bits[0]);
  for (std::size_t j = 0; i + j < n; ++j) {
    const std::size_t index = shift + j;
    const T sign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    out[i + j] = static_cast<T>(scale ^ ((bits[index / 8] >> (7 - index % 8)) & 1 ? T{0} : sign));
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
