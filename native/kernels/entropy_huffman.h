// Canonical, length-limited Huffman coding of byte planes in four bit streams, once per instruction set.
#pragma once
#include "kernels/entropy.h"

namespace ingot::INGOT_ISA {
namespace {

// Lengths of the codes of 256 byte values, 0 for those that do not occur.
struct Lengths {
  Byte of[256];
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
  std::size_t wanted = 2 * n - 2;
  for (int level = kLimit; level-- > 0;) {
    std::size_t taken = 0;
    for (std::size_t i = 0; i < wanted; ++i) taken += items[level][i];
    for (std::size_t i = 0; i < taken; ++i) ++lengths.of[keys[i] & 255];
    wanted = 2 * (wanted - taken);
  }
}

// Canonical codes, first by length, then by value, as they lie in the stream: first bit lowest. Returns whether the
// lengths make a complete code.
inline bool assign_codes(const Lengths& lengths, std::uint16_t* codes) {
  std::uint32_t count[kLimit + 2] = {}, next[kLimit + 2] = {};
  for (std::size_t value = 0; value < 256; ++value) ++count[lengths.of[value]];
  count[0] = 0;
  for (int length = 1; length <= kLimit; ++length) next[length + 1] = (next[length] + count[length]) << 1;
  if (next[kLimit + 1] != 2u << kLimit) return false;
  for (std::size_t value = 0; value < 256; ++value) {
    const int length = lengths.of[value];
    if (length == 0) continue;
    std::uint32_t code = next[length]++, reversed = 0;
    for (int bit = 0; bit < length; ++bit) reversed |= (code >> bit & 1) << (length - 1 - bit);
    codes[value] = static_cast<std::uint16_t>(reversed);
  }
  return true;
}

// A look-up yields the whole codes in the next kWindow bits: entry = bits taken, up to six values, how many.
constexpr std::uint32_t kMost = 6;

// Fills the table of a complete code: a code, then what the table of a window shorter by the code's length yields.
template <int kWindow>
inline void fill_table(const Lengths& lengths, const std::uint16_t* codes, std::uint64_t* table) {
  constexpr std::uint64_t one = std::uint64_t{1} << 56, ends = std::uint64_t{255} << 56 | 255, kept = 0x0000ffffffffff00;
  std::uint64_t shorter[std::size_t{1} << kWindow] = {};  // the table of window w begins at 2^w
  Byte values[256];
  std::size_t n = 0;
  for (std::size_t value = 0; value < 256; ++value)
    if (lengths.of[value]) values[n++] = static_cast<Byte>(value);
  for (int window = 1; window <= kWindow; ++window) {
    std::uint64_t* const target = window < kWindow ? shorter + (std::size_t{1} << window) : table;
    for (std::size_t i = 0; i < n; ++i) {
      const Byte value = values[i];
      const int length = lengths.of[value];
      if (length > window) continue;
      const std::size_t size = std::size_t{1} << (window - length);
      const std::uint64_t* const rest = shorter + size;
      const std::uint64_t first = one + (std::uint64_t{value} << 8) + static_cast<std::uint64_t>(length);
      for (std::size_t k = 0; k < size; ++k) {
        std::uint64_t entry = rest[k];
        if (entry >> 56 == kMost) entry -= one + lengths.of[entry >> 48 & 255];  // its last value has no room
        target[codes[value] | k << length] = (entry & ends) + ((entry & kept) << 8) + first;
      }
    }
  }
}

struct BitStream {
  const Byte* p;
  const Byte* end;
  Byte* out;
  Byte* stop;
  unsigned ahead;  // bits of *p that are taken
};

// How often the loop without checks may run: each turn takes at most 7 bytes and writes kWrites values and 8 bytes more.
template <std::size_t kWrites>
inline std::size_t safe_turns(const BitStream& s) {
  const std::size_t bytes = static_cast<std::size_t>(s.end - s.p), room = static_cast<std::size_t>(s.stop - s.out);
  if (bytes < 8 || room < kWrites + 8) return 0;
  return least((bytes - 8) / 7 + 1, (room - 8) / kWrites);
}

template <int kWindow>
inline void decode_turns(BitStream* streams, const std::uint64_t* table, std::size_t turns) {
  constexpr int lookups = 56 / kWindow;
  constexpr std::uint64_t mark = std::uint64_t{1} << 63, mask = (1u << kWindow) - 1;
  const Byte* p[kStreams];
  Byte* out[kStreams];
  std::uint64_t bits[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) {
    p[s] = streams[s].p;
    out[s] = streams[s].out;
    bits[s] = (load_le<std::uint64_t>(p[s]) | mark) >> streams[s].ahead;
  }
  for (;;) {
#pragma GCC unroll 8
    for (int i = 0; i < lookups; ++i) {
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kStreams; ++s) {
        const std::uint64_t entry = table[bits[s] & mask];
        bits[s] >>= entry & 63;
        store_le<std::uint64_t>(out[s], entry >> 8);
        out[s] += entry >> 56;
      }
    }
    const bool last = --turns == 0;
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kStreams; ++s) {
      const unsigned taken = static_cast<unsigned>(std::countl_zero(bits[s]));
      p[s] += taken >> 3;
      if (last)
        streams[s].ahead = taken & 7;
      else
        bits[s] = (load_le<std::uint64_t>(p[s]) | mark) >> (taken & 7);
    }
    if (last) break;
  }
  for (std::size_t s = 0; s < kStreams; ++s) {
    streams[s].p = p[s];
    streams[s].out = out[s];
  }
}

// Decodes what is left of a stream value by value. It must end in the last byte, and unused bits must be zero.
template <int kWindow>
inline bool decode_rest(BitStream s, const Lengths& lengths, const std::uint64_t* table) {
  std::uint64_t at = s.ahead;
  const std::uint64_t size = 8 * static_cast<std::uint64_t>(s.end - s.p);
  const auto peek = [&](std::uint64_t from) {
    const std::size_t byte = from >> 3, left = static_cast<std::size_t>(s.end - s.p) - byte;
    Byte next[8] = {};
    std::memcpy(next, s.p + byte, left < 8 ? left : 8);
    return load_le<std::uint64_t>(next) >> (from & 7);
  };
  while (s.out < s.stop) {
    if (at >= size) return false;
    const Byte value = static_cast<Byte>(table[peek(at) & ((1u << kWindow) - 1)] >> 8);
    *s.out++ = value;
    at += lengths.of[value];
  }
  return at <= size && size - at < 8 && (at == size || peek(at) == 0);
}

template <int kWindow>
bool decode_streams(BitStream* streams, const Lengths& lengths, const std::uint16_t* codes) {
  alignas(64) std::uint64_t table[1u << kWindow];
  fill_table<kWindow>(lengths, codes, table);
  for (;;) {
    constexpr std::size_t writes = 56 / kWindow * kMost;
    std::size_t turns = safe_turns<writes>(streams[0]);
    for (std::size_t s = 1; s < kStreams; ++s) turns = least(turns, safe_turns<writes>(streams[s]));
    if (turns == 0) break;
    decode_turns<kWindow>(streams, table, turns);
  }
  for (std::size_t s = 0; s < kStreams; ++s)
    if (!decode_rest<kWindow>(streams[s], lengths, table)) return false;
  return true;
}

// Decodes a plane of n values at `p`, which moves past it.
inline EntropyStatus read_huffman(const Byte*& p, const Byte* end, std::size_t n, Byte* out) {
  if (end - p < 2 || p[0] >= p[1]) return EntropyStatus::table;
  const std::size_t first = p[0], span = p[1] - first + std::size_t{1}, packed = (span + 1) / 2;
  p += 2;
  if (static_cast<std::size_t>(end - p) < packed + 3 * kStreams) return EntropyStatus::table;
  Lengths lengths{};
  std::uint16_t codes[256];
  int longest = 0;
  for (std::size_t i = 0; i < 2 * packed; ++i) {
    const int length = p[i / 2] >> (i % 2 * 4) & 15;
    if (length > kLimit || (i == span && length)) return EntropyStatus::table;
    if (i < span) lengths.of[first + i] = static_cast<Byte>(length);
    longest = length > longest ? length : longest;
  }
  if (!lengths.of[first] || !lengths.of[first + span - 1] || !assign_codes(lengths, codes)) return EntropyStatus::table;
  p += packed;
  BitStream streams[kStreams];
  const Byte* at = p + 3 * kStreams;
  const std::size_t quarter = quarter_of(n);
  for (std::size_t s = 0; s < kStreams; ++s, p += 3) {
    const std::size_t size = p[0] | std::size_t{p[1]} << 8 | std::size_t{p[2]} << 16;
    if (static_cast<std::size_t>(end - at) < size) return EntropyStatus::stream;
    streams[s] = {at, at + size, out + least(s * quarter, n), out + least((s + 1) * quarter, n), 0};
    at += size;
  }
  p = at;
  const bool whole = longest <= 11 ? decode_streams<11>(streams, lengths, codes) : decode_streams<12>(streams, lengths, codes);
  return whole ? EntropyStatus::ok : EntropyStatus::stream;
}

// Counts of each quarter's values: they give the sizes of the streams before a bit is written.
struct Counts {
  std::uint32_t of[kStreams][256];
  std::uint32_t all[256];
};

inline void count_plane(const Byte* plane, std::size_t n, Counts& counts) {
  std::memset(&counts, 0, sizeof counts);
  const std::size_t quarter = quarter_of(n);
  const std::size_t even = n > 3 * quarter ? n - 3 * quarter : 0;  // what all four quarters have
  for (std::size_t i = 0; i < even; ++i)
    for (std::size_t s = 0; s < kStreams; ++s) ++counts.of[s][plane[s * quarter + i]];
  for (std::size_t s = 0; s < kStreams; ++s)
    for (std::size_t i = s * quarter + even; i < least((s + 1) * quarter, n); ++i) ++counts.of[s][plane[i]];
  for (std::size_t value = 0; value < 256; ++value)
    for (std::size_t s = 0; s < kStreams; ++s) counts.all[value] += counts.of[s][value];
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
    for (std::size_t value = 0; value < 256; ++value) bits += std::uint64_t{counts.of[s][value]} * plan.lengths.of[value];
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
  unsigned held;
};

inline void write_rest(BitWriter w, const std::uint32_t* table) {
  while (w.in < w.stop) {
    const std::uint32_t entry = table[*w.in++];
    w.bits |= std::uint64_t{entry & 0xffff} << w.held;
    w.held += entry >> 16;
    for (; w.held >= 8; w.held -= 8, w.bits >>= 8) *w.p++ = static_cast<Byte>(w.bits);
  }
  if (w.held) *w.p = static_cast<Byte>(w.bits);
}

inline std::size_t safe_writes(const BitWriter& w) {
  const std::size_t values = static_cast<std::size_t>(w.stop - w.in), room = static_cast<std::size_t>(w.end - w.p);
  return room < 8 ? 0 : least(values / 4, (room - 8) / 6 + 1);
}

// Writes four values of two streams per turn, side by side: at most 48 bits and 7 held over.
inline void write_turns(BitWriter& one, BitWriter& two, const std::uint32_t* table, std::size_t turns) {
  BitWriter a = one, b = two;
  const auto step = [table](BitWriter& w) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t entry = table[w.in[i]];
      w.bits |= std::uint64_t{entry & 0xffff} << w.held;
      w.held += entry >> 16;
    }
    w.in += 4;
    store_le<std::uint64_t>(w.p, w.bits);
    w.p += w.held >> 3;
    w.bits >>= w.held & ~7u;
    w.held &= 7;
  };
  for (; turns; --turns) {
    step(a);
    step(b);
  }
  one = a;
  two = b;
}

// Writes a planned plane of n values; exactly plan.bytes.
inline void write_huffman(const Byte* plane, std::size_t n, const HuffmanPlan& plan, Byte* p) {
  std::uint16_t codes[256] = {};
  assign_codes(plan.lengths, codes);
  std::uint32_t table[256];
  for (std::size_t value = 0; value < 256; ++value)
    table[value] = codes[value] | std::uint32_t{plan.lengths.of[value]} << 16;
  *p++ = static_cast<Byte>(plan.first);
  *p++ = static_cast<Byte>(plan.last);
  for (std::size_t value = plan.first; value <= plan.last; value += 2) {
    const unsigned high = value < plan.last ? plan.lengths.of[value + 1] : 0;
    *p++ = static_cast<Byte>(plan.lengths.of[value] | high << 4);
  }
  BitWriter writers[kStreams];
  Byte* at = p + 3 * kStreams;
  const std::size_t quarter = quarter_of(n);
  for (std::size_t s = 0; s < kStreams; ++s) {
    for (int i = 0; i < 3; ++i) *p++ = static_cast<Byte>(plan.sizes[s] >> (8 * i));
    writers[s] = {plane + least(s * quarter, n), plane + least((s + 1) * quarter, n), at, at + plan.sizes[s], 0, 0};
    at += plan.sizes[s];
  }
  for (std::size_t s = 0; s < kStreams; s += 2)
    while (const std::size_t turns = least(safe_writes(writers[s]), safe_writes(writers[s + 1])))
      write_turns(writers[s], writers[s + 1], table, turns);
  for (std::size_t s = 0; s < kStreams; ++s) write_rest(writers[s], table);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
