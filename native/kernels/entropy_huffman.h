// Canonical, length-limited Huffman coding of byte planes in four bit streams, once per instruction set.
#pragma once
#include "kernels/entropy.h"
#include "kernels/register_tables.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// Lengths of the codes of 256 byte values, 0 for absent values.
struct Lengths {
  Byte values[256];
};

// Finds optimal lengths of at most kLimit bits for two or more values by package-merge (Larmore and Hirschberg, "A fast
// algorithm for optimal length-limited Huffman codes", JACM 37(3), 1990). Ties: fewer first by value; at equal weight an
// item goes before a package.
inline void choose_lengths(const std::uint32_t* counts, Lengths& lengths) {
  std::uint64_t keys[256], packages[256], merged[512];
  bool items[kLimit][512];
  std::size_t n = 0;
  for (std::size_t value = 0; value < 256; ++value)
    if (counts[value]) keys[n++] = std::uint64_t{counts[value]} << 8 | value;
  sort_keys(keys, n);
  std::size_t pairs = 0;
  for (int level = 0; level < kLimit; ++level) {
    std::size_t size = 0, item = 0, package = 0;
    while (item < n || package < pairs) {
      const bool is_item = item < n && (package >= pairs || keys[item] >> 8 <= packages[package]);
      items[level][size] = is_item;
      merged[size++] = is_item ? keys[item++] >> 8 : packages[package++];
    }
    pairs = size / 2;
    for (std::size_t i = 0; i < pairs; ++i) packages[i] = merged[2 * i] + merged[2 * i + 1];
  }
  std::memset(&lengths, 0, sizeof lengths);
  std::size_t requested = 2 * n - 2;
  for (int level = kLimit; level-- > 0;) {
    std::size_t taken = 0;
    for (std::size_t i = 0; i < requested; ++i) taken += items[level][i];
    for (std::size_t i = 0; i < taken; ++i) ++lengths.values[keys[i] & 255];
    requested = 2 * (requested - taken);
  }
}

// Assigns canonical codes, first by length, then by value, in stream order: first bit lowest. Returns whether the lengths
// form a complete code.
inline bool assign_codes(const Lengths& lengths, std::uint16_t* codes) {
  std::uint32_t count[kLimit + 2] = {}, next[kLimit + 2] = {};
  for (std::size_t value = 0; value < 256; ++value) ++count[lengths.values[value]];
  count[0] = 0;
  for (int length = 1; length <= kLimit; ++length) next[length + 1] = (next[length] + count[length]) << 1;
  if (next[kLimit + 1] != 2u << kLimit) return false;
  for (std::size_t value = 0; value < 256; ++value) {
    const int length = lengths.values[value];
    if (length == 0) continue;
    std::uint32_t code = next[length]++, reversed = 0;
    for (int bit = 0; bit < length; ++bit) reversed |= (code >> bit & 1) << (length - 1 - bit);
    codes[value] = static_cast<std::uint16_t>(reversed);
  }
  return true;
}

// Counts of the values of each quarter: they determine the sizes of the streams before a bit is written.
struct Counts {
  std::uint32_t values[kStreams][256];
  std::uint32_t all[256];
};

inline void count_bytes(const Byte* plane, std::size_t n, Counts& counts) {
  const std::size_t quarter = quarter_of(n);
  const std::size_t even = n > 3 * quarter ? n - 3 * quarter : 0;  // common to all four quarters
  // Neighbours are often equal: two counters avoid waiting for the previous increment.
  std::uint32_t parity[kStreams][256] = {};
  std::size_t i = 0;
  for (; i + 2 <= even; i += 2)
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kStreams; ++s) {
      ++counts.values[s][plane[s * quarter + i]];
      ++parity[s][plane[s * quarter + i + 1]];
    }
  for (std::size_t s = 0; s < kStreams; ++s)
    for (std::size_t k = s * quarter + i; k < min_of((s + 1) * quarter, n); ++k) ++counts.values[s][plane[k]];
  for (std::size_t s = 0; s < kStreams; ++s)
    for (std::size_t value = 0; value < 256; ++value) counts.values[s][value] += parity[s][value];
}

constexpr std::size_t kPairsLeast = 16384;                // shorter planes are counted byte by byte
constexpr std::size_t kPairsMost = std::size_t{1} << 18;  // and longer ones, whose pair counts could exceed 16 bits
constexpr std::size_t kPairRun = 64;
constexpr std::size_t kPairTable = 64 * 64;  // counters of a quarter
constexpr unsigned kOther = 63;              // the index of zero among 64 values

// The least value above zero and the greatest; both zero if there is none.
struct Span {
  Byte low, high;
};

inline Span span_of(const Byte* plane, std::size_t n) {
  Byte low = 255, high = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Byte before = static_cast<Byte>(plane[i] - 1);
    low = before < low ? before : low;
    high = plane[i] > high ? plane[i] : high;
  }
  return {static_cast<Byte>(low + 1), high};
}

// Adds the pair counts of a quarter to the counts of its values.
inline void add_pairs(const std::uint16_t* pairs, Span span, std::uint32_t* counts) {
  const std::size_t values = span.high - span.low + std::size_t{1};
  std::uint32_t positions[64] = {};
  const auto add_row = [&](std::size_t row) {
    const std::uint16_t* const __restrict of = pairs + 64 * row;
    std::uint32_t sum = 0;
    for (std::size_t k = 0; k < 64; ++k) sum += of[k];
    for (std::size_t k = 0; k < 64; ++k) positions[k] += of[k];
    counts[row == kOther ? 0 : span.low + row] += sum;
  };
  for (std::size_t row = 0; row < values; ++row) add_row(row);
  add_row(kOther);
  for (std::size_t k = 0; k < values; ++k) counts[span.low + k] += positions[k];
  counts[0] += positions[kOther];
}

// Counts pairs of neighbours if all values except zero are within 63 consecutive ones: half as many counters are
// updated.
inline void count_pairs(const Byte* plane, std::size_t n, Span span, std::uint16_t* pairs, Counts& counts) {
  const std::size_t quarter = quarter_of(n), last = n - 3 * quarter, runs = last / kPairRun;
  const std::size_t values = span.high - span.low + std::size_t{1};
  for (std::size_t s = 0; s < kStreams; ++s) {
    std::memset(pairs + s * kPairTable, 0, 64 * values * sizeof *pairs);
    std::memset(pairs + s * kPairTable + 64 * kOther, 0, 64 * sizeof *pairs);
  }
  for (std::size_t run = 0; run < runs; ++run) {
    alignas(64) std::uint16_t indices[kStreams][kPairRun / 2];
    for (std::size_t s = 0; s < kStreams; ++s) {
      const Byte* const __restrict in = plane + s * quarter + run * kPairRun;
      alignas(64) Byte position[kPairRun];
      for (std::size_t k = 0; k < kPairRun; ++k) {
        const Byte above = static_cast<Byte>(in[k] - span.low);
        position[k] = above < kOther ? above : static_cast<Byte>(kOther);
      }
      for (std::size_t k = 0; k < kPairRun / 2; ++k) {
        std::uint16_t both;
        std::memcpy(&both, position + 2 * k, sizeof both);
        indices[s][k] = static_cast<std::uint16_t>((both & 63) | both >> 8 << 6);
      }
    }
#pragma GCC unroll 8
    for (std::size_t k = 0; k < kPairRun / 2; ++k)
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kStreams; ++s) ++pairs[s * kPairTable + indices[s][k]];
  }
  for (std::size_t s = 0; s < kStreams; ++s) {
    for (std::size_t k = s * quarter + runs * kPairRun; k < min_of((s + 1) * quarter, n); ++k)
      ++counts.values[s][plane[k]];
    add_pairs(pairs + s * kPairTable, span, counts.values[s]);
  }
}

// Counts a plane of n values. `room` is null or scratch memory of 2 n bytes, aligned to two.
inline void count_plane(const Byte* plane, std::size_t n, Byte* room, Counts& counts) {
  std::memset(&counts, 0, sizeof counts);
  const bool fits = room && n >= kPairsLeast && n <= kPairsMost;
  const Span span = fits ? span_of(plane, n) : Span{1, 255};
  if (span.high - span.low < static_cast<int>(kOther) && span.low + kOther <= 256)
    count_pairs(plane, n, span, reinterpret_cast<std::uint16_t*>(room), counts);
  else
    count_bytes(plane, n, counts);
  for (std::size_t value = 0; value < 256; ++value)
    for (std::size_t s = 0; s < kStreams; ++s) counts.all[value] += counts.values[s][value];
}

struct HuffmanPlan {
  Lengths lengths;
  std::size_t first, last;
  std::size_t sizes[kStreams];
  std::size_t bytes;
};

// Plans the coding of a plane with two or more values.
inline void plan_huffman(const Counts& counts, HuffmanPlan& plan) {
  choose_lengths(counts.all, plan.lengths);
  plan.first = 0;
  while (!counts.all[plan.first]) ++plan.first;
  plan.last = 255;
  while (!counts.all[plan.last]) --plan.last;
  plan.bytes = 2 + (plan.last - plan.first + 2) / 2 + 3 * kStreams;
  for (std::size_t s = 0; s < kStreams; ++s) {
    std::uint64_t bits = 0;
    for (std::size_t value = 0; value < 256; ++value)
      bits += std::uint64_t{counts.values[s][value]} * plan.lengths.values[value];
    plan.sizes[s] = (bits + 7) / 8;
    plan.bytes += plan.sizes[s];
  }
}

struct BitWriter {
  const Byte* in;
  const Byte* stop;
  Byte* p;
  Byte* end;
  std::uint64_t bits;
  unsigned bit_count;
};

inline void write_rest(BitWriter w, const std::uint32_t* table) {
  while (w.in < w.stop) {
    const std::uint32_t entry = table[*w.in++];
    w.bits |= std::uint64_t{entry & 0xffff} << w.bit_count;
    w.bit_count += entry >> 16;
    for (; w.bit_count >= 8; w.bit_count -= 8, w.bits >>= 8) *w.p++ = static_cast<Byte>(w.bits);
  }
  if (w.bit_count) *w.p = static_cast<Byte>(w.bits);
}

inline std::size_t safe_writes(const BitWriter& w) {
  const std::size_t values = static_cast<std::size_t>(w.stop - w.in), room = static_cast<std::size_t>(w.end - w.p);
  return room < 8 ? 0 : min_of(values / 4, (room - 8) / 6 + 1);
}

// Writes four values of two streams per iteration: at most 48 bits and 7 pending.
inline void write_turns(BitWriter& first, BitWriter& second, const std::uint32_t* table, std::size_t turns) {
  BitWriter a = first, b = second;
  const auto step = [table](BitWriter& w) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t entry = table[w.in[i]];
      w.bits |= std::uint64_t{entry & 0xffff} << w.bit_count;
      w.bit_count += entry >> 16;
    }
    w.in += 4;
    store_le<std::uint64_t>(w.p, w.bits);
    w.p += w.bit_count >> 3;
    w.bits >>= w.bit_count & ~7u;
    w.bit_count &= 7;
  };
  for (; turns; --turns) {
    step(a);
    step(b);
  }
  first = a;
  second = b;
}

#if defined(__AVX512BW__)
// Codes of at most kLimit bits below their lengths, by value: the contents of eight registers. If no two present values
// have the same low six bits, two registers suffice.
struct WideCodes {
  __m512i table[8];
  bool is_short = true;

  WideCodes(const std::uint16_t* codes, const Lengths& lengths) {
    alignas(64) std::uint16_t all[256], low[64] = {};
    for (std::size_t value = 0; value < 256; ++value) {
      all[value] = static_cast<std::uint16_t>(codes[value] | lengths.values[value] << kLimit);
      if (!lengths.values[value]) continue;
      is_short = is_short && !low[value % 64];
      low[value % 64] = all[value];
    }
    const std::uint16_t* const from = is_short ? low : all;
    for (std::size_t k = 0; k < (is_short ? 2 : 8); ++k) table[k] = _mm512_load_si512(from + 32 * k);
  }

  // Codes and lengths of 32 values.
  template <bool kFew>
  __m512i look_up(const Byte* in) const {
    const __mmask32 all = ~__mmask32{0};
    const __m512i indices = _mm512_maskz_cvtepu8_epi16(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
    if constexpr (kFew) return _mm512_permutex2var_epi16(table[0], indices, table[1]);
    return look_up_wide(table, indices);
  }
};

constexpr std::size_t kWideTurn = 32;                              // values of an iteration
constexpr std::size_t kWideBytes = kWideTurn * kLimit / 8 + 16;  // bytes that it may write, margins included

// The number of iterations of write_wide that cannot write past the end.
inline std::size_t safe_wide(const BitWriter& w) {
  const std::size_t values = static_cast<std::size_t>(w.stop - w.in), room = static_cast<std::size_t>(w.end - w.p);
  return min_of(values / kWideTurn, room / kWideBytes);
}

inline void append(BitWriter& w, std::uint64_t value, std::uint64_t length) {
  w.bits |= value << w.bit_count;
  w.bit_count += static_cast<unsigned>(length);
  store_le<std::uint64_t>(w.p, w.bits);
  w.p += w.bit_count >> 3;
  w.bits >>= w.bit_count & ~7u;
  w.bit_count &= 7;
}

// Combines the codes of four neighbours in registers, for two streams, then appends the words: at most 48 bits and 7
// pending. If there are few values, whose codes are short, eight neighbours are combined, unless they take more than 56
// bits: with 7 pending bits they must stay below a word, the limit of shifts in `append`.
template <bool kFew>
inline void write_wide(BitWriter& single, BitWriter& two, const WideCodes& codes, std::size_t turns) {
  using Pairs = std::uint32_t __attribute__((vector_size(64)));
  using Fours = std::uint64_t __attribute__((vector_size(64)));
  struct Joined {
    alignas(64) std::uint64_t bits[8], lengths[8];            // of four values
    alignas(64) std::uint64_t eight_bits[8], eight_lengths[8];  // of eight, at every second position
  } joined[2];
  BitWriter a = single, b = two;
  // Returns whether any eight codes take too many bits.
  const auto join = [&](BitWriter& w, Joined& to) {
    constexpr std::uint32_t code = (1u << kLimit) - 1;
    const Pairs result = reinterpret_cast<Pairs>(codes.look_up<kFew>(w.in));
    const Pairs first = result >> kLimit & 15, both = first + (result >> (16 + kLimit));
    const Fours pairs = reinterpret_cast<Fours>((result & code) | (result >> 16 & code) << first);
    const Fours length = reinterpret_cast<Fours>(both), low = length & 0xffffffff;
    const Fours four = (pairs & 0xffffffff) | pairs >> 32 << low, all = low + (length >> 32);
    std::memcpy(to.bits, &four, sizeof four);
    std::memcpy(to.lengths, &all, sizeof all);
    w.in += kWideTurn;
    if constexpr (!kFew) return true;
    const auto next = [](Fours x) {
      const __m512i y = reinterpret_cast<__m512i>(x);
      return reinterpret_cast<Fours>(_mm512_maskz_unpackhi_epi64(0xff, y, y));
    };
    const Fours eight = four | next(four) << all, sum = all + next(all);
    std::memcpy(to.eight_bits, &eight, sizeof eight);
    std::memcpy(to.eight_lengths, &sum, sizeof sum);
    return _mm512_cmpgt_epu64_mask(reinterpret_cast<__m512i>(sum), _mm512_set1_epi64(56)) != 0;
  };
  for (; turns; --turns) {
    const bool over = join(a, joined[0]), also = join(b, joined[1]);
    if (over | also) [[unlikely]] {
#pragma GCC unroll 8
      for (std::size_t k = 0; k < 8; ++k) {
        append(a, joined[0].bits[k], joined[0].lengths[k]);
        append(b, joined[1].bits[k], joined[1].lengths[k]);
      }
      continue;
    }
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 8; k += 2) {
      append(a, joined[0].eight_bits[k], joined[0].eight_lengths[k]);
      append(b, joined[1].eight_bits[k], joined[1].eight_lengths[k]);
    }
  }
  single = a;
  two = b;
}
#endif

// Writes a planned plane of n values; exactly plan.bytes.
inline void write_huffman(const Byte* plane, std::size_t n, const HuffmanPlan& plan, Byte* p) {
  std::uint16_t codes[256] = {};
  assign_codes(plan.lengths, codes);
  std::uint32_t table[256];
  for (std::size_t value = 0; value < 256; ++value)
    table[value] = codes[value] | std::uint32_t{plan.lengths.values[value]} << 16;
  *p++ = static_cast<Byte>(plan.first);
  *p++ = static_cast<Byte>(plan.last);
  for (std::size_t value = plan.first; value <= plan.last; value += 2) {
    const unsigned high = value < plan.last ? plan.lengths.values[value + 1] : 0;
    *p++ = static_cast<Byte>(plan.lengths.values[value] | high << 4);
  }
  BitWriter writers[kStreams];
  Byte* bytes = p + 3 * kStreams;
  const std::size_t quarter = quarter_of(n);
  for (std::size_t s = 0; s < kStreams; ++s) {
    for (int i = 0; i < 3; ++i) *p++ = static_cast<Byte>(plan.sizes[s] >> (8 * i));
    writers[s] = {
        plane + min_of(s * quarter, n), plane + min_of((s + 1) * quarter, n), bytes, bytes + plan.sizes[s], 0, 0};
    bytes += plan.sizes[s];
  }
#if defined(__AVX512BW__)
  const WideCodes wide(codes, plan.lengths);
  for (std::size_t s = 0; s < kStreams; s += 2)
    while (const std::size_t turns = min_of(safe_wide(writers[s]), safe_wide(writers[s + 1])))
      if (wide.is_short)
        write_wide<true>(writers[s], writers[s + 1], wide, turns);
      else
        write_wide<false>(writers[s], writers[s + 1], wide, turns);
#endif
  for (std::size_t s = 0; s < kStreams; s += 2)
    while (const std::size_t turns = min_of(safe_writes(writers[s]), safe_writes(writers[s + 1])))
      write_turns(writers[s], writers[s + 1], table, turns);
  for (std::size_t s = 0; s < kStreams; ++s) write_rest(writers[s], table);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
