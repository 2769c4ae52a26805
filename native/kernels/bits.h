// Bit streams of 1- to 8-bit codes, both bit orders, once per instruction set. Eight codes of `kBits` bits fill `kBits`
// bytes; they are spread to one per byte, or gathered again, by three shift-and-mask steps on a 64-bit word, which
// compilers turn into vector code without help.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/neon.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kChunk = 1024;  // codes handled at a time; a multiple of 64

inline std::uint64_t little(std::uint64_t word) {
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

// One step: the low 2 * kField bits of each lane of 2 * kLane bits become two fields, kLane apart. Other bits must be
// 0.
template <int kField, int kLane>
inline std::uint64_t split(std::uint64_t word) {
  constexpr std::uint64_t lanes = kLane == 32 ? 1 : kLane == 16 ? 0x0000000100000001ull : 0x0001000100010001ull;
  constexpr std::uint64_t field = ((std::uint64_t{1} << kField) - 1) * lanes;
  if constexpr (2 * kField <= kLane) return (word | word << (kLane - kField)) & (field | field << kLane);
  return (word & field) | ((word >> kField) & field) << kLane;
}

template <int kBits>
inline std::uint64_t spread(std::uint64_t word) {
  if constexpr (kBits < 8) word &= (std::uint64_t{1} << (8 * kBits % 64)) - 1;
  return split<kBits, 8>(split<2 * kBits, 16>(split<4 * kBits, 32>(word)));
}

template <int kBits>
inline std::uint64_t gather(std::uint64_t word) {
  constexpr std::uint64_t ones = ((std::uint64_t{1} << kBits) - 1) * 0x0001000100010001ull;
  constexpr std::uint64_t two = ((std::uint64_t{1} << (2 * kBits)) - 1) * 0x0000000100000001ull;
  constexpr std::uint64_t four = (std::uint64_t{1} << (4 * kBits)) - 1;
  word = (word & ones) | ((word >> 8) & ones) << kBits;
  word = (word & two) | ((word >> 16) & two) << (2 * kBits);
  return (word & four) | ((word >> 32) & four) << (4 * kBits);
}

// Eight bytes at `p` as a little-endian number.
inline std::uint64_t load_word(const std::uint8_t* p) {
  std::uint64_t word;
  std::memcpy(&word, p, 8);
  return little(word);
}

// Both functions ignore other bits than the 8 * kBits bits of eight codes.
template <int kBits, bool kMsb>
inline std::uint64_t unpack_word(std::uint64_t word) {
  if constexpr (!kMsb) return spread<kBits>(word);
  return __builtin_bswap64(spread<kBits>(__builtin_bswap64(word) >> (64 - 8 * kBits)));
}

template <int kBits, bool kMsb>
inline std::uint64_t pack_word(std::uint64_t codes) {
  if constexpr (!kMsb) return gather<kBits>(codes);
  return __builtin_bswap64(gather<kBits>(__builtin_bswap64(codes)) << (64 - 8 * kBits));
}

// A buffer for the codes of one chunk and 16 more, one per byte, in order. It consists of words, so that vector stores
// may alias bytes without a copy.
struct Codes {
  alignas(64) std::uint64_t words[kChunk / 8 + 2];
  std::uint8_t* bytes() { return reinterpret_cast<std::uint8_t*>(words); }
};

// Unpacks the codes of `n` bytes, LSB first, where whole codes fill a byte: each byte becomes 8 / kBits bytes.
template <int kBits>
void unpack_bytes(const std::uint8_t* __restrict in, std::size_t n, Codes& codes) {
  std::uint8_t* __restrict out = codes.bytes();
  for (std::size_t i = 0; i < n; ++i) {
    if constexpr (kBits == 4) {
      std::uint16_t word = static_cast<std::uint16_t>((in[i] | in[i] << 4) & 0x0f0f);
      if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap16(word);
      std::memcpy(out + 2 * i, &word, 2);
    } else {
      std::uint32_t word = in[i];
      word = (word | word << 12) & 0x000f000fu;
      word = (word | word << 6) & 0x03030303u;
      if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
      std::memcpy(out + 4 * i, &word, 4);
    }
  }
}

#if defined(INGOT_NEON)
// The position of each of sixteen codes: the two bytes that contain it, as a 16-bit number, and its shift.
template <int kBits, bool kMsb>
struct Windows {
  std::uint8_t bytes[32];
  std::int16_t shifts[16];
  constexpr Windows() : bytes(), shifts() {
    for (int code = 0; code < 16; ++code) {
      const int position = code * kBits / 8, bit = code * kBits % 8;
      bytes[2 * code] = static_cast<std::uint8_t>(kMsb ? position + 1 : position);
      bytes[2 * code + 1] = static_cast<std::uint8_t>(kMsb ? position : position + 1);
      shifts[code] = static_cast<std::int16_t>(kMsb ? bit + kBits - 16 : -bit);
    }
  }
};

// Unpacks codes of less than a byte, sixteen at a time; returns the number of unpacked codes.
template <int kBits, bool kMsb>
std::size_t unpack_windows(const std::uint8_t* __restrict in, std::size_t bytes, std::uint8_t* __restrict out) {
  static constexpr Windows<kBits, kMsb> index;
  const uint8x16_t first = vld1q_u8(index.bytes), second = vld1q_u8(index.bytes + 16);
  const int16x8_t low = vld1q_s16(index.shifts), high = vld1q_s16(index.shifts + 8);
  const uint8x16_t mask = vdupq_n_u8((1 << kBits) - 1);
  std::size_t i = 0;
  for (; i / 8 * kBits + 16 <= bytes; i += 16) {
    const uint8x16_t all = vld1q_u8(in + i / 8 * kBits);
    const uint16x8_t one = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(all, first)), low);
    const uint16x8_t two = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(all, second)), high);
    vst1q_u8(out + i, vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(one), vreinterpretq_u8_u16(two)), mask));
  }
  return i;
}
#endif

// Unpacks `n` codes (at most kChunk) from ceil(n * kBits / 8) bytes.
template <int kBits, bool kMsb>
void unpack(const std::uint8_t* __restrict in, std::size_t n, Codes& codes) {
  const std::size_t bytes = (n * kBits + 7) / 8, count = (n + 7) / 8;
  if constexpr (!kMsb && (kBits == 2 || kBits == 4)) return unpack_bytes<kBits>(in, bytes, codes);
  const std::size_t full = bytes < 8 ? 0 : (bytes - 8) / kBits + 1;  // words that can be loaded as eight bytes
  // Two loops: loads at irregular distances, which compilers do not vectorize, and the remaining computation, which
  // they do.
  std::uint64_t raw[kChunk / 8];
  std::size_t i = 0, from = 0;
#if defined(INGOT_NEON)
  if constexpr (kBits < 8) i = from = unpack_windows<kBits, kMsb>(in, bytes, codes.bytes()) / 8;
#endif
#if defined(__AVX2__)
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, kBits, kBits + 1, kBits + 2,
                                                                  kBits + 3, kBits + 4, kBits + 5, kBits + 6, kBits + 7));
  for (; (i + 2) * kBits + 16 <= bytes; i += 4) {
    const std::uint8_t* p = in + i * kBits;
    const __m256i four = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(p + 2 * kBits),
                                             reinterpret_cast<const __m128i*>(p));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(raw + i), _mm256_shuffle_epi8(four, order));
  }
#endif
  for (; i < full; ++i) raw[i] = load_word(in + i * kBits);
  for (; i < count; ++i) {
    std::uint8_t last[8] = {};
    const std::size_t remaining = bytes - i * kBits;
    std::memcpy(last, in + i * kBits, remaining < 8 ? remaining : 8);
    raw[i] = load_word(last);
  }
  for (i = from; i < count; ++i) codes.words[i] = little(unpack_word<kBits, kMsb>(raw[i]));
}

#if defined(__AVX512BW__)
// Packs two codes per byte, sixty-four at a time; the bytes after the last code must be zero up to the end of its byte.
template <bool kMsb>
void pack_pairs(const std::uint8_t* codes, std::size_t n, std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < n; i += 64) {
    const std::size_t bytes = n - i < 64 ? (n - i + 1) / 2 : 32;
    const __mmask32 there = bytes < 32 ? (std::uint32_t{1} << bytes) - 1 : ~std::uint32_t{0};
    const __m512i pairs = _mm512_maskz_loadu_epi16(there, codes + i);
    const __m512i both = kMsb ? _mm512_or_si512(_mm512_slli_epi16(pairs, 4), _mm512_srli_epi16(pairs, 8))
                              : _mm512_or_si512(pairs, _mm512_srli_epi16(pairs, 4));
    _mm256_mask_storeu_epi8(out + i / 2, there, _mm512_cvtepi16_epi8(both));
  }
}
#endif

// Packs `n` codes (at most kChunk, each below 2^kBits) to ceil(n * kBits / 8) bytes; unused bits of the last are zero.
template <int kBits, bool kMsb>
void pack(Codes& codes, std::size_t n, std::uint8_t* __restrict out) {
  const std::size_t full = n / 8, count = (n + 7) / 8;
  for (std::size_t i = n; i < count * 8; ++i) codes.bytes()[i] = 0;
#if defined(__AVX512BW__)
  if constexpr (kBits == 4) return pack_pairs<kMsb>(codes.bytes(), n, out);
#endif
  for (std::size_t i = 0; i < count; ++i) codes.words[i] = little(pack_word<kBits, kMsb>(little(codes.words[i])));
  for (std::size_t i = 0; i < full; ++i) std::memcpy(out + i * kBits, &codes.words[i], kBits);
  if (n % 8) std::memcpy(out + full * kBits, &codes.words[full], (n % 8 * kBits + 7) / 8);
}

using Unpack = void (*)(const std::uint8_t*, std::size_t, Codes&);
using Pack = void (*)(Codes&, std::size_t, std::uint8_t*);

template <bool kMsb>
Unpack unpacker(int bits) {
  constexpr Unpack table[] = {unpack<1, kMsb>, unpack<2, kMsb>, unpack<3, kMsb>, unpack<4, kMsb>,
                              unpack<5, kMsb>, unpack<6, kMsb>, unpack<7, kMsb>, unpack<8, kMsb>};
  return table[bits - 1];
}

template <bool kMsb>
Pack packer(int bits) {
  constexpr Pack table[] = {pack<1, kMsb>, pack<2, kMsb>, pack<3, kMsb>, pack<4, kMsb>,
                            pack<5, kMsb>, pack<6, kMsb>, pack<7, kMsb>, pack<8, kMsb>};
  return table[bits - 1];
}

}  // namespace
}  // namespace ingot::INGOT_ISA
