// Decodes the output of entropy_rans.h: a state determines its symbol by one look-up in the table of slots, and states
// that fall below kRansLeast read the next words. Once per instruction set.
#pragma once
#include "kernels/entropy_ans_read.h"
#include "kernels/entropy_rans.h"

#if defined(__AVX2__) && !defined(__AVX512BW__)
#include <array>
#endif

namespace ingot::INGOT_ISA {
namespace {

// An entry: a symbol, or its index; above it the slot's position among the symbol's slots; in the highest 12 bits their
// number, minus one if a symbol may have all slots, whose number would exceed 12 bits.
constexpr int kRansCountAt = 20;
template <int kBits>
constexpr int kRansValueBits = kRansCountAt - kBits;
template <int kBits>
constexpr std::uint32_t kRansLess = kBits < 12 ? 0 : 1;

struct RansStream {
  alignas(64) std::uint32_t states[kRansLanes];
  const Byte* p;
  const Byte* end;
  std::size_t decoded;     // symbols decoded so far
  std::size_t count;  // number of all symbols
  std::size_t bare;   // the first symbol without a word

  std::size_t remaining() const { return static_cast<std::size_t>(end - p); }
  // Returns how many groups of kRansLanes symbols, of the next `most` symbols, can be decoded without checking the
  // remaining words.
  std::size_t rounds(std::size_t limit) const {
    return decoded % kRansLanes || decoded >= bare
               ? 0
               : min_of(min_of(bare - decoded, limit) / kRansLanes, remaining() / (2 * kRansLanes));
  }
};

// Fills the table from frequencies in ascending order of symbols; `value(symbol)` is stored in the entries.
template <int kBits, class Value>
inline void fill_slots(const AnsFrequencies& from, std::uint32_t* table, Value value) {
  for (std::size_t symbol = from.first; symbol <= from.last; ++symbol) {
    const std::uint32_t freq = from.freq[symbol];
    if (!freq) continue;
    const std::uint32_t result = (freq - kRansLess<kBits>) << kRansCountAt | value(symbol);
    for (std::uint32_t i = 0; i < freq; ++i) *table++ = result | i << kRansValueBits<kBits>;
  }
}

// Reads the states of n symbols and the number of words, and moves `p` past these.
inline bool open_rans(const Byte*& p, const Byte* end, std::size_t n, RansStream& stream) {
  if (static_cast<std::size_t>(end - p) < kRansHead) return false;
  const std::size_t bytes = 2 * (p[0] | std::size_t{p[1]} << 8 | std::size_t{p[2]} << 16);
  p += 3;
  std::uint32_t smallest = ~0u;
  for (std::uint32_t& state : stream.states) {
    state = load_le<std::uint32_t>(p);
    smallest = state < smallest ? state : smallest;
    p += 4;
  }
  if (smallest < kRansLeast || static_cast<std::size_t>(end - p) < bytes) return false;
  stream.p = p;
  stream.end = p += bytes;
  stream.decoded = 0;
  stream.count = n;
  stream.bare = n < kRansBare ? 0 : n - kRansBare;
  return true;
}

// Decodes one symbol; returns false if its word is missing. `table` is the table of its context.
template <int kBits>
inline bool decode_slot(RansStream& s, const std::uint32_t* table, std::uint16_t& out) {
  const std::size_t i = s.decoded++;
  std::uint32_t& state = s.states[i % kRansLanes];
  std::uint32_t x = state;
  if (i >= s.bare && i < s.bare + kRansLanes) x -= kRansLeast;
  const std::uint32_t entry = table[x & ((1u << kBits) - 1)];
  x = ((entry >> kRansCountAt) + kRansLess<kBits>) * (x >> kBits) + (entry >> kRansValueBits<kBits> & ((1u << kBits) - 1));
  out = static_cast<std::uint16_t>(entry & ((1u << kRansValueBits<kBits>) - 1));
  if (i < s.bare && x < kRansLeast) {
    if (s.remaining() < 2) return false;
    x = x << 16 | load_le<std::uint16_t>(s.p);
    s.p += 2;
  }
  state = x;
  return true;
}

#if defined(__AVX512BW__)
// Sixteen entries, loaded one by one: many processors gather with microcode, which delays other instructions. Indices
// leave the register in pairs, because loading parts of a value that was stored in one piece takes longer.
inline __m512i look_up(const std::uint32_t* table, __m512i indices) {
  const auto four = [table](__m128i entries) {
    const std::uint64_t low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(entries)),
                        high = static_cast<std::uint64_t>(_mm_extract_epi64(entries, 1));
    const auto entry = [table](std::uint64_t i) { return static_cast<int>(table[i]); };
    return _mm_setr_epi32(entry(low & 0xffffffff), entry(low >> 32), entry(high & 0xffffffff), entry(high >> 32));
  };
  const auto eight = [&four](__m128i first, __m128i second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(four(first)), four(second), 1);
  };
  const __m256i low = eight(_mm512_castsi512_si128(indices), _mm512_extracti32x4_epi32(indices, 1));
  const __m256i high = eight(_mm512_extracti32x4_epi32(indices, 2), _mm512_extracti32x4_epi32(indices, 3));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Returns the next sixteen states from their entries. Reads 32 bytes, moves p past the consumed bytes.
template <int kBits>
inline __m512i next_states(__m512i x, __m512i entry, const Byte*& p) {
  const __m512i slot = _mm512_set1_epi32((1 << kBits) - 1);
  __m512i freq = _mm512_srli_epi32(entry, kRansCountAt);
  if constexpr (kRansLess<kBits>) freq = _mm512_add_epi32(freq, _mm512_set1_epi32(1));
  const __m512i position = _mm512_and_si512(_mm512_srli_epi32(entry, kRansValueBits<kBits>), slot);
  const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(x, kBits)), position);
  const __mmask16 takes = _mm512_cmplt_epu32_mask(next, _mm512_set1_epi32(kRansLeast));
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  p += 2 * static_cast<std::size_t>(__builtin_popcount(takes));
  return _mm512_mask_or_epi32(next, takes, _mm512_slli_epi32(next, 16), _mm512_maskz_expand_epi32(takes, words));
}

// Sixteen symbols; x are their states.
template <int kBits, bool kGather>
inline __m512i decode_sixteen(__m512i& x, const Byte*& p, __m512i indices, const std::uint32_t* table) {
  const __m512i slots = _mm512_add_epi32(_mm512_and_si512(x, _mm512_set1_epi32((1 << kBits) - 1)), indices);
  const __m512i entry = kGather ? _mm512_i32gather_epi32(slots, table, 4) : look_up(table, slots);
  x = next_states<kBits>(x, entry, p);
  return _mm512_and_si512(entry, _mm512_set1_epi32((1 << kRansValueBits<kBits>) - 1));
}
#elif defined(__AVX2__)
// For every set of lanes that read a word, the word of each of eight lanes.
constexpr auto kRansTakes = [] {
  std::array<std::array<std::uint8_t, 8>, 256> base{};
  for (std::size_t set = 0; set < 256; ++set)
    for (std::size_t lane = 0, next = 0; lane < 8; ++lane) {
      base[set][lane] = static_cast<std::uint8_t>(next);
      next += set >> lane & 1;
    }
  return base;
}();

// Eight symbols; like decode_sixteen, but for 16 bytes.
template <int kBits>
inline void decode_eight(__m256i& x, const Byte*& p, __m256i indices, const std::uint32_t* table, std::uint16_t* out) {
  const __m256i slot = _mm256_set1_epi32((1 << kBits) - 1);
  const __m256i slots = _mm256_add_epi32(_mm256_and_si256(x, slot), indices);
  const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), slots, 4);
  const __m256i freq = _mm256_add_epi32(_mm256_srli_epi32(entry, kRansCountAt), _mm256_set1_epi32(kRansLess<kBits>));
  const __m256i position = _mm256_and_si256(_mm256_srli_epi32(entry, kRansValueBits<kBits>), slot);
  const __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(x, kBits)), position);
  const __m256i takes = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
  const unsigned set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(takes)));
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i which = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kRansTakes[set].data())));
  p += 2 * __builtin_popcount(set);
  const __m256i taken = _mm256_or_si256(_mm256_slli_epi32(next, 16), _mm256_permutevar8x32_epi32(words, which));
  x = _mm256_blendv_epi8(next, taken, takes);
  const __m256i value = _mm256_and_si256(entry, _mm256_set1_epi32((1 << kRansValueBits<kBits>) - 1));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(value, value), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}
#endif

// Decodes `rounds` times kRansLanes symbols; a word for each must be stored. With `kContexts`, `contexts[i]` is the
// first table entry for symbol i.
template <int kBits, bool kContexts>
[[gnu::noinline]] void decode_rounds(RansStream& s, const std::uint32_t* table, const std::uint16_t* contexts,
                                     std::uint16_t* out, std::size_t rounds) {
  s.decoded += rounds * kRansLanes;
  const Byte* p = s.p;
#if defined(__AVX512BW__)
  static_assert(kRansLanes == 32);
  const auto slots = [&](std::size_t i) {
    if constexpr (kContexts)
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts + i)));
    else
      return _mm512_setzero_si512();
  };
  __m512i low = _mm512_load_si512(s.states), high = _mm512_load_si512(s.states + 16);
  for (std::size_t i = 0; i < rounds * kRansLanes; i += kRansLanes) {
    const __m512i first =
        decode_sixteen<kBits, true>(low, p, slots(i), table);  // the two variants use different execution units
    const __m512i second = decode_sixteen<kBits, false>(high, p, slots(i + 16), table);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), _mm512_cvtepi32_epi16(second));
  }
  _mm512_store_si512(s.states, low);
  _mm512_store_si512(s.states + 16, high);
#elif defined(__AVX2__)
  const auto slots = [&](std::size_t i) {
    if constexpr (kContexts)
      return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts + i)));
    else
      return _mm256_setzero_si256();
  };
  __m256i x[kRansLanes / 8];
  for (std::size_t k = 0; k < kRansLanes / 8; ++k) x[k] = _mm256_load_si256(reinterpret_cast<const __m256i*>(s.states + 8 * k));
  for (std::size_t i = 0; i < rounds * kRansLanes; i += kRansLanes)
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kRansLanes / 8; ++k)
      decode_eight<kBits>(x[k], p, slots(i + 8 * k), table, out + i + 8 * k);
  for (std::size_t k = 0; k < kRansLanes / 8; ++k) _mm256_store_si256(reinterpret_cast<__m256i*>(s.states + 8 * k), x[k]);
#else
  constexpr std::uint32_t slot = (1u << kBits) - 1;
  std::uint32_t states[kRansLanes];  // a local copy: stores of symbols could alias the original
  std::memcpy(states, s.states, sizeof states);
  for (std::size_t i = 0; i < rounds * kRansLanes; i += kRansLanes)
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kRansLanes; ++k) {
      const std::uint32_t x = states[k], entry = table[(x & slot) + (kContexts ? contexts[i + k] : 0)];
      const std::uint64_t next = std::uint64_t{(entry >> kRansCountAt) + kRansLess<kBits>} * (x >> kBits) + (entry >> kRansValueBits<kBits> & slot);
      const std::uint64_t takes = (next - kRansLeast) >> 63, more = next << 16 | load_le<std::uint16_t>(p);
      p += 2 * takes;
      // Half of the symbols read a word: no branch.
      states[k] = static_cast<std::uint32_t>(next ^ ((next ^ more) & (0 - takes)));
      out[i + k] = static_cast<std::uint16_t>(entry & ((1u << kRansValueBits<kBits>) - 1));
    }
  std::memcpy(s.states, states, sizeof states);
#endif
  s.p = p;
}

// Decodes the next `count` symbols; returns false if words are missing.
template <int kBits, bool kContexts>
inline bool read_slots(RansStream& s, const std::uint32_t* table, const std::uint16_t* contexts, std::size_t count,
                       std::uint16_t* out) {
  const auto alone = [&](std::size_t i) {
    return decode_slot<kBits>(s, table + (kContexts ? contexts[i] : 0), out[i]);
  };
  std::size_t i = 0;
  for (; i < count && s.decoded % kRansLanes; ++i)
    if (!alone(i)) return false;
  while (const std::size_t rounds = s.rounds(count - i)) {
    decode_rounds<kBits, kContexts>(s, table, kContexts ? contexts + i : contexts, out + i, rounds);
    i += rounds * kRansLanes;
  }
  for (; i < count; ++i)
    if (!alone(i)) return false;
  return true;
}

// Returns whether all words were consumed and the last states are the encoder's first ones.
inline bool ended(const RansStream& s) {
  std::uint32_t invalid = s.p != s.end;
  for (std::size_t lane = 0; lane < kRansLanes; ++lane) invalid |= s.states[lane] ^ (lane < s.count ? 0 : kRansLeast);
  return !invalid;
}

// A plane of floats, or two, before decoding: entries of the table have indices of the occurring symbols.
struct RansPlane {
  RansStream stream;
  alignas(64) std::uint16_t values[kRansSymbols];
  std::size_t distinct;
  std::uint32_t table[1u << kRansBits];
};

// Reads a table and the states of n symbols below `values`, and moves `p` past the words.
inline EntropyStatus open_rans(const Byte*& p, const Byte* end, std::size_t values, std::size_t n, RansPlane& plane) {
  AnsFrequencies result;
  if (!read_frequencies<kRansBits>(p, end, values, result)) return EntropyStatus::table;
  plane.distinct = 0;
  for (std::size_t symbol = result.first; symbol <= result.last; ++symbol) {
    if (!result.freq[symbol]) continue;
    if (plane.distinct == kRansSymbols) return EntropyStatus::table;
    plane.values[plane.distinct++] = static_cast<std::uint16_t>(symbol);
  }
  std::uint32_t number = 0;
  fill_slots<kRansBits>(result, plane.table, [&number](std::size_t) { return number++; });
  return open_rans(p, end, n, plane.stream) ? EntropyStatus::ok : EntropyStatus::stream;
}

#if defined(__AVX512BW__)
// Symbols by their indices, of which there are at most 64 kHalves.
template <std::size_t kHalves>
inline void find_symbols(const std::uint16_t* values, std::uint16_t* block, std::size_t n) {
  __m512i table[2 * kHalves];
  for (std::size_t k = 0; k < 2 * kHalves; ++k) table[k] = _mm512_load_si512(values + 32 * k);
  for (std::size_t i = 0; i < n; i += 32) {
    const __m512i indices = _mm512_load_si512(block + i);
    __m512i result = _mm512_permutex2var_epi16(table[0], indices, table[1]);
#pragma GCC unroll 4
    for (std::size_t k = 1; k < kHalves; ++k) {
      const __mmask32 here = _mm512_cmpge_epu16_mask(indices, _mm512_set1_epi16(static_cast<short>(64 * k)));
      result = _mm512_mask_mov_epi16(result, here, _mm512_permutex2var_epi16(table[2 * k], indices, table[2 * k + 1]));
    }
    _mm512_store_si512(block + i, result);
  }
}
#endif

// The symbols of kSixBlock indices; n of them are used.
inline void find_symbols(const RansPlane& plane, std::uint16_t* block, std::size_t n) {
#if defined(__AVX512BW__)
  if (plane.distinct <= 64) return find_symbols<1>(plane.values, block, n);
  return plane.distinct <= 128 ? find_symbols<2>(plane.values, block, n) : find_symbols<4>(plane.values, block, n);
#else
  for (std::size_t i = 0; i < n; ++i) block[i] = plane.values[block[i]];
#endif
}

// Decodes n symbols. Calls `put(start, symbols, count)` for every kSixBlock of them in order.
template <class Put>
inline EntropyStatus decode_rans(RansPlane& plane, std::size_t n, Put put) {
  alignas(64) std::uint16_t block[kSixBlock];
  for (std::size_t start = 0; start < n; start += kSixBlock) {
    const std::size_t count = min_of(kSixBlock, n - start);
    if (!read_slots<kRansBits, false>(plane.stream, plane.table, nullptr, count, block)) return EntropyStatus::stream;
    find_symbols(plane, block, count);
    put(start, block, count);
  }
  return ended(plane.stream) ? EntropyStatus::ok : EntropyStatus::stream;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
