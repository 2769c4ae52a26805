// Interleaved range coding by asymmetric numeral systems (Duda, arXiv:1311.2540, section 3) with 14-bit frequencies, 32-bit
// states and 16-bit words: eight states take turns and share one stream of words. Once per instruction set.
#pragma once
#include "kernels/entropy.h"

namespace ingot::INGOT_ISA {
namespace {

// log2 of a positive number with 12 fractional bits, by squaring; integers only, so that every machine chooses alike.
inline std::uint32_t log2_fixed(std::uint64_t value) {
  const int whole = 63 - std::countl_zero(value);
  std::uint64_t mantissa = whole > 31 ? value >> (whole - 31) : value << (31 - whole);
  std::uint32_t result = static_cast<std::uint32_t>(whole);
  for (int i = 0; i < 12; ++i) {
    mantissa = mantissa * mantissa >> 31;
    const std::uint32_t bit = static_cast<std::uint32_t>(mantissa >> 32);
    mantissa >>= bit;
    result = result << 1 | bit;
  }
  return result;
}

// Bytes that ideal coding takes, rounded up.
inline std::size_t ideal_bytes(const std::uint32_t* counts, std::size_t values) {
  std::uint64_t total = 0, bits = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  if (total == 0) return 0;
  const std::uint32_t whole = log2_fixed(total);
  for (std::size_t value = 0; value < values; ++value)
    if (counts[value]) bits += std::uint64_t{counts[value]} * (whole - log2_fixed(counts[value]));
  return (bits + (8 << 12) - 1) / (8 << 12);
}

struct RansPlan {
  std::uint16_t freq[kSymbols];
  std::size_t first, last;
  std::size_t table_bytes;
};

// Scales counts to frequencies that add up to 2^14, each at least 1: rounded to nearest, then the difference is taken one
// by one from, or given to, the most frequent in turn. Needs 1 to kDistinct symbols.
inline void plan_rans(const std::uint32_t* counts, std::size_t values, RansPlan& plan) {
  std::uint64_t total = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  std::uint64_t keys[kDistinct];
  std::size_t n = 0;
  std::int64_t left = kScale;
  for (std::size_t value = 0; value < values; ++value) {
    plan.freq[value] = 0;
    if (!counts[value]) continue;
    const std::uint64_t nearest = (std::uint64_t{counts[value]} * kScale + total / 2) / total;
    plan.freq[value] = static_cast<std::uint16_t>(nearest ? nearest : 1);
    left -= plan.freq[value];
    keys[n++] = (kEntropyMaxChunk - counts[value]) << 16 | value;
  }
  for (std::size_t value = values; value < kSymbols; ++value) plan.freq[value] = 0;
  sort_keys(keys, n);
  for (std::size_t i = 0; left != 0; i = (i + 1) % n) {
    std::uint16_t& freq = plan.freq[keys[i] & 0xffff];
    if (left < 0 && freq == 1) continue;
    freq = static_cast<std::uint16_t>(left < 0 ? freq - 1 : freq + 1);
    left += left < 0 ? 1 : -1;
  }
  plan.first = 0;
  while (!plan.freq[plan.first]) ++plan.first;
  plan.last = values - 1;
  while (!plan.freq[plan.last]) --plan.last;
  plan.table_bytes = 4;
  for (std::size_t value = plan.first; value <= plan.last; ++value) {
    plan.table_bytes += plan.freq[value] < 128 ? 1 : 2;
    if (!plan.freq[value]) {
      std::size_t run = 1;
      while (run < 256 && !plan.freq[value + run]) ++run;
      value += run - 1;
      ++plan.table_bytes;
    }
  }
}

// First and last symbol, then frequencies: below 128 one byte, else two with the high bits first and the top bit set; 0 is
// followed by how many more absent symbols there are.
inline Byte* write_frequencies(const RansPlan& plan, Byte* p) {
  store_le<std::uint16_t>(p, static_cast<std::uint16_t>(plan.first));
  store_le<std::uint16_t>(p + 2, static_cast<std::uint16_t>(plan.last));
  p += 4;
  for (std::size_t value = plan.first; value <= plan.last; ++value) {
    const unsigned freq = plan.freq[value];
    if (freq >= 128) *p++ = static_cast<Byte>(0x80 | freq >> 8);
    *p++ = static_cast<Byte>(freq);
    if (freq == 0) {
      std::size_t run = 1;
      while (run < 256 && !plan.freq[value + run]) ++run;
      value += run - 1;
      *p++ = static_cast<Byte>(run - 1);
    }
  }
  return p;
}

struct RansSlot {
  std::uint16_t freq;
  std::uint16_t start;
  std::uint16_t symbol;
  std::uint16_t unused;
};

struct RansTable {
  RansSlot slots[kDistinct];
  Byte index[kScale];
};

inline bool read_frequencies(const Byte*& p, const Byte* end, std::size_t values, RansTable& table) {
  if (end - p < 4) return false;
  const std::size_t first = load_le<std::uint16_t>(p), last = load_le<std::uint16_t>(p + 2);
  p += 4;
  if (first > last || last >= values) return false;
  std::size_t n = 0;
  std::uint32_t start = 0;
  for (std::size_t value = first; value <= last; ++value) {
    if (p == end) return false;
    std::uint32_t freq = *p++;
    if (freq >= 128) {
      if (p == end) return false;
      freq = (freq & 127) << 8 | *p++;
    }
    if (freq == 0) {
      if (p == end || value == first) return false;
      value += *p++;
      if (value >= last) return false;  // the last symbol occurs
      continue;
    }
    if (n == kDistinct || freq > kScale - start) return false;
    table.slots[n] = {static_cast<std::uint16_t>(freq), static_cast<std::uint16_t>(start), static_cast<std::uint16_t>(value), 0};
    std::memset(table.index + start, static_cast<int>(n++), freq);
    start += freq;
  }
  return start == kScale;
}

// Reads a table, the number of words, the states and the words; calls `put(block, values, count)` for every kSixBlock
// symbols in order.
template <class Put>
inline EntropyStatus read_rans(const Byte*& p, const Byte* end, std::size_t n, std::size_t values, RansTable& table, Put put) {
  if (!read_frequencies(p, end, values, table)) return EntropyStatus::table;
  constexpr std::size_t header = 3 + 4 * kLanes;
  if (static_cast<std::size_t>(end - p) < header) return EntropyStatus::stream;
  const std::size_t words = p[0] | std::size_t{p[1]} << 8 | std::size_t{p[2]} << 16;
  std::uint32_t x[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    x[lane] = load_le<std::uint32_t>(p + 3 + 4 * lane);
    if (x[lane] < kLow) return EntropyStatus::stream;
  }
  p += header;
  if (static_cast<std::size_t>(end - p) < 2 * words) return EntropyStatus::stream;
  const Byte *at = p, *const stop = p + 2 * words;
  p = stop;
  alignas(64) std::uint16_t block[kSixBlock];
  for (std::size_t start = 0; start < n; start += kSixBlock) {
    const std::size_t count = least(kSixBlock, n - start);
    std::size_t i = 0;
    for (; i + kLanes <= count && stop - at >= static_cast<std::ptrdiff_t>(2 * kLanes); i += kLanes) {
#pragma GCC unroll 8
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const std::uint32_t slot = x[lane] & (kScale - 1);
        const RansSlot found = table.slots[table.index[slot]];
        std::uint32_t next = found.freq * (x[lane] >> kScaleBits) + slot - found.start;
        const std::uint32_t filled = next << 16 | load_le<std::uint16_t>(at);
        const bool low = next < kLow;
        x[lane] = low ? filled : next;
        at += low ? 2 : 0;
        block[i + lane] = found.symbol;
      }
    }
    for (; i < count; ++i) {
      std::uint32_t& state = x[i % kLanes];
      const std::uint32_t slot = state & (kScale - 1);
      const RansSlot found = table.slots[table.index[slot]];
      state = found.freq * (state >> kScaleBits) + slot - found.start;
      block[i] = found.symbol;
      if (state >= kLow) continue;
      if (at == stop) return EntropyStatus::stream;
      state = state << 16 | load_le<std::uint16_t>(at);
      at += 2;
    }
    put(start, block, count);
  }
  if (at != stop) return EntropyStatus::stream;
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    if (x[lane] != kLow) return EntropyStatus::stream;
  return EntropyStatus::ok;
}

struct RansEncode {
  std::uint64_t reciprocal;  // of the frequency, times 2^64, rounded up
  std::uint64_t limit;       // states from here on give a word first
  std::uint32_t bias;
  std::uint32_t rest;  // 2^14 - frequency
};

inline void fill_encode(const RansPlan& plan, RansEncode* table) {
  std::uint32_t start = 0;
  for (std::size_t value = plan.first; value <= plan.last; ++value) {
    const std::uint32_t freq = plan.freq[value];
    if (!freq) continue;
    // x / freq = high half of x * reciprocal: exact for x < 2^32 and freq < 2^15. Where freq is 1 the quotient comes out
    // one too low, which the bias makes good.
    table[value] = {freq == 1 ? ~std::uint64_t{0} : ~std::uint64_t{0} / freq + 1, std::uint64_t{freq} << 18,
                    freq == 1 ? start + kScale - 1 : start, kScale - freq};
    start += freq;
  }
}

inline std::uint64_t high_half(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(a) * b >> 64);
}

// Writes table, number of words, states and words for n symbols `get(i)`; `words` has room for n + 1. Returns the end, or
// null where it would pass `end`.
template <class Get>
inline Byte* write_rans(const RansPlan& plan, std::size_t n, std::uint16_t* words, Byte* p, const Byte* end, Get get) {
  RansEncode table[kSymbols];
  fill_encode(plan, table);
  std::uint32_t x[kLanes];
  for (std::uint32_t& state : x) state = kLow;
  std::uint16_t* w = words + n + 1;
  const auto step = [&](std::uint32_t& state, std::size_t i) {
    const RansEncode& e = table[get(i)];
    w[-1] = static_cast<std::uint16_t>(state);
    const bool full = state >= e.limit;
    w -= full;
    const std::uint32_t rest = full ? state >> 16 : state;
    state = rest + static_cast<std::uint32_t>(high_half(rest, e.reciprocal)) * e.rest + e.bias;
  };
  std::size_t i = n;
  for (; i % kLanes; --i) step(x[(i - 1) % kLanes], i - 1);
  for (; i; i -= kLanes)
#pragma GCC unroll 8
    for (std::size_t back = 1; back <= kLanes; ++back) step(x[kLanes - back], i - back);
  const std::size_t count = static_cast<std::size_t>(words + n + 1 - w);
  if (static_cast<std::size_t>(end - p) < plan.table_bytes + 3 + 4 * kLanes + 2 * count) return nullptr;
  p = write_frequencies(plan, p);
  for (int byte = 0; byte < 3; ++byte) *p++ = static_cast<Byte>(count >> (8 * byte));
  for (std::size_t lane = 0; lane < kLanes; ++lane, p += 4) store_le<std::uint32_t>(p, x[lane]);
  for (std::size_t k = 0; k < count; ++k) store_le<std::uint16_t>(p + 2 * k, w[k]);
  return p + 2 * count;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
