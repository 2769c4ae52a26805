// Splits elements into byte planes and combines them again, once per instruction set. An element is rotated left by one
// bit, so that its sign is the lowest bit and the exponent begins at the top; plane 0 has the highest bytes.
#pragma once
#include "kernels/entropy.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

template <class Word>
inline Word rotated_left(Word word) {
  return static_cast<Word>(word << 1 | word >> (8 * sizeof(Word) - 1));
}

template <class Word>
inline Word rotated_right(Word word) {
  return static_cast<Word>(word >> 1 | word << (8 * sizeof(Word) - 1));
}

constexpr std::size_t kSplitRun = 64;      // elements
constexpr std::size_t kSplitAhead = 2048;  // elements to prefetch

// Both planes of two bytes in one pass, in words of 16 bits, because compilers would widen the bytes.
inline void split_in_two(const void* in, std::size_t n, Byte* __restrict high, Byte* __restrict low) {
  const std::uint16_t* __restrict values = static_cast<const std::uint16_t*>(in);
  const auto run = [&](std::size_t start, std::size_t stop) {
    for (std::size_t i = start; i < stop; ++i) {
      const std::uint16_t up = static_cast<std::uint16_t>(values[i] >> 7);
      const std::uint16_t sign = static_cast<std::uint16_t>(values[i] >> 15);
      high[i] = static_cast<Byte>(up);
      low[i] = static_cast<Byte>(static_cast<std::uint16_t>(values[i] << 1) | sign);
    }
  };
  std::size_t i = 0;
  for (; i + kSplitRun <= n; i += kSplitRun) {
#if defined(__GNUC__)
    const std::uint16_t* const next = values + min_of(i + kSplitAhead, n - kSplitRun);
    __builtin_prefetch(next);
    __builtin_prefetch(next + kSplitRun / 2);
#endif
    run(i, i + kSplitRun);
  }
  run(i, n);
}

template <class Word>
inline void split(const void* in, std::size_t n, Byte* const* planes) {
  constexpr std::size_t block = 4096 / sizeof(Word);
  const Word* __restrict values = static_cast<const Word*>(in);
  for (std::size_t start = 0; start < n; start += block) {
    const std::size_t stop = min_of(start + block, n);
    for (std::size_t k = 0; k < sizeof(Word); ++k) {
      Byte* __restrict plane = planes[k];
      for (std::size_t i = start; i < stop; ++i)
        plane[i] = static_cast<Byte>(rotated_left(values[i]) >> (8 * (sizeof(Word) - 1 - k)));
    }
  }
}

template <class Word>
inline void join(const Byte* const* planes, std::size_t n, void* out) {
  Word* __restrict values = static_cast<Word*>(out);
  if constexpr (sizeof(Word) == 1) {
    const Byte* __restrict a = planes[0];
    for (std::size_t i = 0; i < n; ++i) values[i] = rotated_right(a[i]);
  } else if constexpr (sizeof(Word) == 2) {
    const Byte* __restrict a = planes[0];
    const Byte* __restrict b = planes[1];
    for (std::size_t i = 0; i < n; ++i) values[i] = rotated_right(static_cast<Word>(a[i] << 8 | b[i]));
  } else if constexpr (sizeof(Word) == 4) {
    const Byte* __restrict a = planes[0];
    const Byte* __restrict b = planes[1];
    const Byte* __restrict c = planes[2];
    const Byte* __restrict d = planes[3];
    for (std::size_t i = 0; i < n; ++i)
      values[i] = rotated_right(Word{a[i]} << 24 | Word{b[i]} << 16 | Word{c[i]} << 8 | Word{d[i]});
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      Word word = 0;
      for (std::size_t k = 0; k < sizeof(Word); ++k) word = word << 8 | planes[k][i];
      values[i] = rotated_right(word);
    }
  }
}

inline void split_values(const void* in, std::size_t width, std::size_t n, Byte* const* planes) {
  if (width == 1) return split<std::uint8_t>(in, n, planes);
  if (width == 2) return split_in_two(in, n, planes[0], planes[1]);
  if (width == 4) return split<std::uint32_t>(in, n, planes);
  return split<std::uint64_t>(in, n, planes);
}

inline void join_values(const Byte* const* planes, std::size_t width, std::size_t n, void* out) {
  if (width == 1) return join<std::uint8_t>(planes, n, out);
  if (width == 2) return join<std::uint16_t>(planes, n, out);
  if (width == 4) return join<std::uint32_t>(planes, n, out);
  return join<std::uint64_t>(planes, n, out);
}

#if defined(__AVX2__)
#if defined(__AVX512BW__)
// Bytes of a register in an order in which interleaving with those of another in halves of 16 bytes gives pairs in
// order.
struct PairLanes {
  using Lanes = __m512i;
  static Lanes spread(const Byte* from) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(from));
  }
  static Lanes first(Lanes low, Lanes high) { return _mm512_unpacklo_epi8(low, high); }
  static Lanes second(Lanes low, Lanes high) { return _mm512_unpackhi_epi8(low, high); }
  static Lanes rotated_right(Lanes words) { return _mm512_or_si512(_mm512_srli_epi16(words, 1), _mm512_slli_epi16(words, 15)); }
  static void store(Byte* to, Lanes words) { _mm512_storeu_si512(to, words); }
  static void stream(Byte* to, Lanes words) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), words); }
};
#else
struct PairLanes {
  using Lanes = __m256i;
  static Lanes spread(const Byte* from) {
    return _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), 0xd8);
  }
  static Lanes first(Lanes low, Lanes high) { return _mm256_unpacklo_epi8(low, high); }
  static Lanes second(Lanes low, Lanes high) { return _mm256_unpackhi_epi8(low, high); }
  static Lanes rotated_right(Lanes words) { return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15)); }
  static void store(Byte* to, Lanes words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }
  static void stream(Byte* to, Lanes words) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), words); }
};
#endif

// Both planes of two bytes, a register of elements at a time. With `kPast`, results bypass the caches.
template <bool kPast>
inline void join_in_two(const Byte* const* planes, std::size_t n, Byte* out) {
  using Lanes = PairLanes::Lanes;
  constexpr std::size_t line = 64, turn = sizeof(Lanes);
  const std::size_t head = min_of(n, kPast ? (line - reinterpret_cast<std::uintptr_t>(out) % line) % line / 2 : 0);
  const auto put = [](Byte* to, Lanes words) {
    if constexpr (kPast)
      PairLanes::stream(to, PairLanes::rotated_right(words));
    else
      PairLanes::store(to, PairLanes::rotated_right(words));
  };
  join<std::uint16_t>(planes, head, out);
  std::size_t i = head;
  for (; i + turn <= n; i += turn) {
    const Lanes high = PairLanes::spread(planes[0] + i), low = PairLanes::spread(planes[1] + i);
    put(out + 2 * i, PairLanes::first(low, high));
    put(out + 2 * i + turn, PairLanes::second(low, high));
  }
  const Byte* const rest[] = {planes[0] + i, planes[1] + i};
  join<std::uint16_t>(rest, n - i, out + 2 * i);
}
#endif

// The six low bits of a block of at most kSixBlock bytes, in three runs of a quarter: run k has those of quarter k, and
// in its top bits two bits of the fourth quarter's, lowest first. Missing elements count as 0.
inline void pack_six(const Byte* in, std::size_t n, Byte* out) {
  const std::size_t quarter = (n + 3) / 4;
  Byte six[kSixBlock + 4];
  for (std::size_t i = 0; i < n; ++i) six[i] = in[i] & 63;
  for (std::size_t i = n; i < 4 * quarter; ++i) six[i] = 0;
  for (std::size_t k = 0; k < 3; ++k)
    for (std::size_t i = 0; i < quarter; ++i)
      out[k * quarter + i] = static_cast<Byte>(six[k * quarter + i] | (six[3 * quarter + i] >> (2 * k)) << 6);
}

// Sixteen bits of n elements, at most kSixBlock: ten bits from symbols above six low bits from `in`.
inline void join_six(const Byte* __restrict in, const std::uint16_t* __restrict symbols, std::size_t n, std::uint16_t* __restrict out) {
  const std::size_t quarter = (n + 3) / 4;
  std::uint16_t room[kSixBlock + 4];
  std::uint16_t* __restrict const six = n == 4 * quarter ? out : room;
  for (std::size_t i = 0; i < quarter; ++i) {
    const std::uint16_t a = in[i], b = in[quarter + i], c = in[2 * quarter + i];
    six[i] = a & 63;
    six[quarter + i] = b & 63;
    six[2 * quarter + i] = c & 63;
    six[3 * quarter + i] = static_cast<std::uint16_t>(a >> 6 | (b >> 6) << 2 | (c >> 6) << 4);
  }
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::uint16_t>(six[i] | symbols[i] << 6);
}

// Copies to memory that will not be read soon, bypassing the caches if there are instructions for that.
inline void copy_past_caches(Byte* out, const Byte* in, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t line = 64;
  const std::size_t head = min_of((line - reinterpret_cast<std::uintptr_t>(out) % line) % line, bytes);
  std::memcpy(out, in, head);
  std::size_t i = head;
  for (; i + line <= bytes; i += line) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
#else
    for (std::size_t k = i; k < i + line; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + k)));
#endif
  }
  std::memcpy(out + i, in + i, bytes - i);
#else
  std::memcpy(out, in, bytes);
#endif
}

// Makes the copies visible to other threads.
inline void finish_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace ingot::INGOT_ISA
