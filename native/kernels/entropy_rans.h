// Range asymmetric numeral systems (Duda, arXiv:1311.2540, "rANS") in kRansLanes interleaved states that share one stream of 16-bit words,
// as in Giesen, "Interleaved entropy coders" (arXiv:1402.3392): symbol i is of state i % kRansLanes. The order of words is that of symbols,
// so that any number of states can be handled side by side. Once per instruction set. spec/float_entropy.md defines the layout.
#pragma once
#include "kernels/entropy_ans.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
// GCC 12 takes the undefined vectors inside of its own intrinsics for a mistake (its bug 105593).
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kRansLanes = 32;
// Number of last symbols, which output no words and may leave a small state.
constexpr std::size_t kRansBare = 2 * kRansLanes;
constexpr std::uint32_t kRansLeast = 1u << 16;     // least state between other symbols
constexpr std::size_t kRansHead = 3 + 4 * kRansLanes;
// Smaller chunks are not coded in this way, because the head would be too large.
constexpr std::size_t kRansElements = std::size_t{1} << 16;
constexpr int kRansBits = 12;                                // for planes of floats: a table of 16 KiB
constexpr std::size_t kRansSymbols = 256;                    // limit on symbols if an entry has 2 x 12 other bits
// Limit of the encoder: with more symbols, frequencies of 12 bits lose too much.
constexpr std::size_t kRansChosen = 128;

// The number of bytes of coding with these frequencies, rounded up.
template <int kBits>
inline std::size_t coded_bytes(const std::uint32_t* counts, const AnsPlan& plan) {
  std::uint64_t bits = 0;
  for (std::size_t value = plan.first; value <= plan.last; ++value)
    if (counts[value]) bits += std::uint64_t{counts[value]} * ((kBits << 12) - log2_fixed(plan.freq[value]));
  return (bits + (8 << 12) - 1) / (8 << 12);
}

// The effect of symbols on states: the first slot of each, from bit 16 on, above the number of slots; and the
// reciprocal.
template <int kBits, std::size_t kCount>
struct RansCoder {
  std::uint32_t slots[kCount];
  std::uint64_t inverse[kCount];

  void fill(const AnsPlan& plan, std::size_t index = 0) {
    std::uint32_t start = 0;
    for (std::size_t symbol = plan.first; symbol <= plan.last; ++symbol) {
      const std::uint32_t freq = plan.freq[symbol];
      if (!freq) continue;
      slots[index + symbol] = start << 16 | freq;
      inverse[index + symbol] = ((std::uint64_t{1} << (32 + kBits)) + freq - 1) / freq;
      start += freq;
    }
  }
};

// States of an encoder; words are written from the end of a buffer to its front.
template <int kBits, std::size_t kCount>
struct RansWriter {
  const RansCoder<kBits, kCount>& coder;
  Byte* p;
  alignas(64) std::uint32_t states[kRansLanes] = {};

  // Encodes a symbol that outputs no word.
  void put_bare(std::size_t i, std::size_t symbol) {
    std::uint32_t& x = states[i % kRansLanes];
    const std::uint32_t freq = coder.slots[symbol] & 0xffff;
    x = (x / freq << kBits) + x % freq + (coder.slots[symbol] >> 16);
  }

  // The division of a state below freq * 2^(32 - kBits) is exact.
  void put(std::size_t i, std::size_t symbol) {
    std::uint32_t x = states[i % kRansLanes];
    const std::uint32_t freq = coder.slots[symbol] & 0xffff, gives = x >> (32 - kBits) >= freq;
    store_le<std::uint16_t>(p - 2, static_cast<std::uint16_t>(x));
    p -= 2 * gives;
    x >>= 16 * gives;
    const std::uint32_t quotient = static_cast<std::uint32_t>(x * coder.inverse[symbol] >> (32 + kBits));
    states[i % kRansLanes] = (quotient << kBits) + (x - quotient * freq) + (coder.slots[symbol] >> 16);
  }

#if defined(__AVX512BW__)
  // Sixteen symbols. Quotients, which are below 2^21, are rounded down twice, and so are at most one too small.
  void put_sixteen(__m512i& x, const std::uint16_t* symbols) {
    constexpr int down = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i indices = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)));
    const __m512i slots = _mm512_i32gather_epi32(indices, coder.slots, 4);
    const __m512i freq = _mm512_and_si512(slots, _mm512_set1_epi32(0xffff));
    const __mmask16 gives = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 32 - kBits), freq);
    const int count = __builtin_popcount(gives);
    const __m512i packed = _mm512_maskz_compress_epi32(gives, x);
    const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(count)), packed);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p - 32), _mm512_cvtepi32_epi16(words));
    p -= 2 * count;
    x = _mm512_mask_srli_epi32(x, gives, x, 16);
    const __m512 ratio = _mm512_div_round_ps(_mm512_cvt_roundepu32_ps(x, down), _mm512_cvtepi32_ps(freq), down);
    __m512i quotient = _mm512_cvttps_epi32(ratio);
    __m512i remainder = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, freq));
    const __mmask16 more = _mm512_cmpge_epu32_mask(remainder, freq);
    quotient = _mm512_mask_add_epi32(quotient, more, quotient, _mm512_set1_epi32(1));
    remainder = _mm512_mask_sub_epi32(remainder, more, remainder, freq);
    x = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(quotient, kBits), remainder), _mm512_srli_epi32(slots, 16));
  }
#endif

  // Encodes the symbols before `i`, a multiple of kRansLanes, backward.
  void put_rounds(std::size_t i, const std::uint16_t* symbols) {
#if defined(__AVX512BW__)
    static_assert(kRansLanes == 32);
    __m512i low = _mm512_load_si512(states), high = _mm512_load_si512(states + 16);
    for (; i; i -= kRansLanes) {
      put_sixteen(high, symbols + i - 16);
      put_sixteen(low, symbols + i - 32);
    }
    _mm512_store_si512(states, low);
    _mm512_store_si512(states + 16, high);
#else
    for (; i; --i) put(i - 1, symbols[i - 1]);
#endif
  }
};

// Encodes n symbols from the last to the first, then writes the number of words, states and words. `room` is scratch
// memory of 2 n + 512 bytes. Returns the end, or null if it would pass `end`.
template <int kBits, std::size_t kCount>
inline Byte* write_rans(const std::uint16_t* symbols, std::size_t n, const RansCoder<kBits, kCount>& coder, Byte* room, Byte* p,
                        const Byte* end) {
  Byte* const last = room + 64 + 2 * n;
  RansWriter<kBits, kCount> writer{coder, last};
  std::size_t i = n;
  for (; i > 0 && i + kRansBare > n; --i) writer.put_bare(i - 1, symbols[i - 1]);
  for (std::uint32_t& state : writer.states) state += kRansLeast;
  for (; i % kRansLanes; --i) writer.put(i - 1, symbols[i - 1]);
  writer.put_rounds(i, symbols);
  const std::size_t bytes = static_cast<std::size_t>(last - writer.p);
  if (static_cast<std::size_t>(end - p) < kRansHead + bytes) return nullptr;
  for (int byte = 0; byte < 3; ++byte) *p++ = static_cast<Byte>(bytes / 2 >> (8 * byte));
  for (const std::uint32_t state : writer.states) {
    store_le<std::uint32_t>(p, state);
    p += 4;
  }
  std::memcpy(p, writer.p, bytes);
  return p + bytes;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
