// Decodes byte planes that were Huffman coded in four bit streams, once per instruction set. The streams alternate in
// registers; one look-up yields all codes that are complete in a window of the next bits.
#pragma once
#include <array>

#include "kernels/entropy_huffman.h"

namespace ingot::INGOT_ISA {
namespace {

// A table entry: number of consumed bits (lowest byte), up to six values, their number (highest byte).
constexpr std::uint32_t kMost = 6;
constexpr std::uint64_t kOne = std::uint64_t{1} << 56;
constexpr int kWide = 11;    // bits of a window: 16 KiB of table stay in the first-level cache
constexpr int kNarrow = 8;   // for short planes, where a separate table would cost more than it saves
constexpr std::size_t kShortPlane = 8192;
// Iterations after which values are passed on, while they are in the first-level cache.
constexpr std::size_t kBatch = 32;

constexpr auto kReversed = [] {
  std::array<std::uint16_t, std::size_t{1} << kWide> of{};
  for (std::uint32_t i = 0; i < of.size(); ++i)
    for (int bit = 0; bit < kWide; ++bit) of[i] = static_cast<std::uint16_t>(of[i] | (i >> bit & 1) << (kWide - 1 - bit));
  return of;
}();

// A complete code in canonical order: values by length, then by value. Codes count up from 0; with the first bit highest,
// the codes of one length follow the codes of the length before.
struct CodeOrder {
  Byte values[256];
  std::uint16_t first[kLimit + 2];  // index of the first value of a length
  std::uint16_t start[kLimit + 2];  // the first code of a length, padded with 0s to the limit's bits
  int shortest, longest;

  explicit CodeOrder(const Lengths& lengths) {
    std::uint16_t counts[kLimit + 1] = {}, next[kLimit + 1];
    const auto for_each = [&lengths](auto call) {  // of the values that occur, which are few and close together
      for (std::size_t from = 0; from < 256; from += 8) {
        if (!load_le<std::uint64_t>(lengths.values + from)) continue;
        for (std::size_t value = from; value < from + 8; ++value)
          if (lengths.values[value]) call(value, lengths.values[value]);
      }
    };
    for_each([&](std::size_t, std::size_t length) { ++counts[length]; });
    first[1] = start[1] = 0;
    shortest = kLimit;
    longest = 1;
    for (int length = 1; length <= kLimit; ++length) {
      first[length + 1] = static_cast<std::uint16_t>(first[length] + counts[length]);
      start[length + 1] = static_cast<std::uint16_t>(start[length] + (counts[length] << (kLimit - length)));
      next[length] = first[length];
      if (!counts[length]) continue;
      if (length < shortest) shortest = length;
      longest = length;
    }
    for_each([&](std::size_t value, std::size_t length) { values[next[length]++] = static_cast<Byte>(value); });
  }

  // Returns the value whose code is longer than a window, and its length, from the next bits.
  template <int kWindow>
  Byte beyond(std::uint64_t bits, int& length) const {
    const std::uint32_t low = kReversed[bits & ((1u << kWide) - 1)];
    const std::uint32_t code = low << (kLimit - kWide) | static_cast<std::uint32_t>(bits >> kWide & 1);
    length = kWindow + 1;
    while (length < longest && code >= start[length + 1]) ++length;
    return values[(first[length] + ((code - start[length]) >> (kLimit - length))) & 255];
  }
};

// An entry for each of `count` windows: a value, then the entries of the windows after its code. If a code may have one
// bit, six values may follow, and an entry has no space for the last.
template <bool kFull>
inline void prepend(const std::uint64_t* __restrict remainder, std::size_t count, std::uint64_t first,
                    const Lengths& lengths, std::uint64_t* __restrict out) {
  constexpr std::uint64_t ends = std::uint64_t{255} << 56 | 255, five = 0x0000ffffffffff00;
  for (std::size_t k = 0; k < count; ++k) {
    std::uint64_t entry = remainder[k];
    if constexpr (kFull) entry -= entry >> 56 == kMost ? kOne + lengths.values[entry >> 48 & 255] : 0;
    out[k] = (entry & ends) + ((entry & five) << 8) + first;
  }
}

// Fills the table of a complete code. It is built for windows of 1 to kWindow bits in the order of codes, in which a
// code's windows are contiguous, then permuted to stream order, first bit lowest. The entry of a code longer than the
// window is 0.
template <int kWindow>
inline void fill_table(const Lengths& lengths, const CodeOrder& order, std::uint64_t* table) {
  alignas(64) std::uint64_t ordered[std::size_t{2} << kWindow];  // entries of windows of w bits begin at 2^w
  ordered[1] = 0;
  for (int window = 1; window <= kWindow; ++window) {
    std::uint64_t *p = ordered + (std::size_t{1} << window), *const end = p + (std::size_t{1} << window);
    for (int length = order.shortest; length <= window; ++length) {
      const std::size_t size = std::size_t{1} << (window - length);
      for (std::size_t i = order.first[length]; i < order.first[length + 1]; ++i, p += size) {
        const std::uint64_t first = kOne + (std::uint64_t{order.values[i]} << 8) + static_cast<std::uint64_t>(length);
        if (order.shortest == 1)
          prepend<true>(ordered + size, size, first, lengths, p);
        else
          prepend<false>(ordered + size, size, first, lengths, p);
      }
    }
    for (; p < end; ++p) *p = 0;
  }
  const std::uint64_t* const last = ordered + (std::size_t{1} << kWindow);
  for (std::size_t i = 0; i < std::size_t{1} << kWindow; ++i) table[i] = last[kReversed[i] >> (kWide - kWindow)];
}

struct BitStream {
  const Byte* p;
  const Byte* end;
  Byte* out;
  Byte* stop;
  unsigned ahead;  // consumed bits of *p
};

// Look-ups between two refills. A code that is longer than the window takes the place of one.
template <int kWindow, bool kLong>
constexpr int kLookups = kLong ? (56 - kLimit) / kWindow + 1 : 56 / kWindow;

// The number of iterations without checks: each consumes at most 7 bytes and writes kWrites values and 8 bytes more.
template <std::size_t kWrites>
inline std::size_t safe_turns(const BitStream& s) {
  const std::size_t bytes = static_cast<std::size_t>(s.end - s.p), room = static_cast<std::size_t>(s.stop - s.out);
  if (bytes < 8 || room < kWrites + 8) return 0;
  return min_of((bytes - 8) / 7 + 1, (room - 8) / kWrites);
}

// Prefetches the bytes of a later batch: processors do so by themselves only within a page.
inline void look_ahead(const BitStream& s) {
#if defined(__GNUC__)
  constexpr std::size_t ahead = 1024, line = 64;
  if (static_cast<std::size_t>(s.end - s.p) <= ahead + line) return;
  __builtin_prefetch(s.p + ahead);
  __builtin_prefetch(s.p + ahead + line);
#endif
}

// Decodes `turns` iterations of kCount streams in parallel. If codes may be longer than the window (`kLong`), a stream
// that reaches a longer code waits until the iteration ends.
template <int kWindow, bool kLong, std::size_t kCount>
[[gnu::noinline]] void decode_turns(BitStream* const* streams, const CodeOrder& order, const std::uint64_t* table, std::size_t turns) {
  constexpr std::uint64_t mark = std::uint64_t{1} << 63, mask = (1u << kWindow) - 1;
  const Byte* p[kCount];
  Byte* out[kCount];
  std::uint64_t bits[kCount], entry[kCount];
#pragma GCC unroll 4
  for (std::size_t s = 0; s < kCount; ++s) {
    p[s] = streams[s]->p;
    out[s] = streams[s]->out;
    bits[s] = (load_le<std::uint64_t>(p[s]) | mark) >> streams[s]->ahead;
  }
  for (;;) {
#pragma GCC unroll 8
    for (int i = 0; i < kLookups<kWindow, kLong>; ++i) {
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kCount; ++s) {
        entry[s] = table[bits[s] & mask];
        bits[s] >>= entry[s] & 63;
        store_le<std::uint64_t>(out[s], entry[s] >> 8);
        out[s] += entry[s] >> 56;
      }
    }
    if constexpr (kLong) {
      std::uint64_t stuck = 0;  // the highest bit marks an entry without values
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kCount; ++s) stuck |= entry[s] - kOne;
      if (stuck >> 63) [[unlikely]] {
#pragma GCC unroll 4
        for (std::size_t s = 0; s < kCount; ++s)
          if (!entry[s]) {
            int length = 0;
            *out[s]++ = order.beyond<kWindow>(bits[s], length);
            bits[s] >>= length;
          }
      }
    }
    const bool last = --turns == 0;
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kCount; ++s) {
      const unsigned taken = static_cast<unsigned>(std::countl_zero(bits[s]));
      p[s] += taken >> 3;
      if (last)
        streams[s]->ahead = taken & 7;
      else
        bits[s] = (load_le<std::uint64_t>(p[s]) | mark) >> (taken & 7);
    }
    if (last) break;
  }
#pragma GCC unroll 4
  for (std::size_t s = 0; s < kCount; ++s) {
    streams[s]->p = p[s];
    streams[s]->out = out[s];
  }
}

// Decodes the remainder of a stream with a check at every step. It must end in the last byte, and unused bits must be
// zero.
template <int kWindow>
inline bool decode_rest(BitStream& s, const CodeOrder& order, const Lengths& lengths, const std::uint64_t* table) {
  std::uint64_t index = s.ahead;
  const std::uint64_t size = 8 * static_cast<std::uint64_t>(s.end - s.p);
  const auto peek = [&](std::uint64_t from) {
    const std::size_t byte = from >> 3, left = static_cast<std::size_t>(s.end - s.p) - byte;
    if (left >= 8) return load_le<std::uint64_t>(s.p + byte) >> (from & 7);
    Byte next[8] = {};
    std::memcpy(next, s.p + byte, left);
    return load_le<std::uint64_t>(next) >> (from & 7);
  };
  while (s.out < s.stop) {
    if (index >= size) return false;
    const std::uint64_t bits = peek(index), entry = table[bits & ((1u << kWindow) - 1)];
    if (!entry) {
      int length = 0;
      *s.out++ = order.beyond<kWindow>(bits, length);
      index += static_cast<unsigned>(length);
      continue;
    }
    const std::size_t count = entry >> 56, room = static_cast<std::size_t>(s.stop - s.out);
    if (count <= room) {
      index += entry & 63;
      for (std::size_t i = 0; i < count; ++i) *s.out++ = static_cast<Byte>(entry >> (8 * i + 8));
    } else {
      for (std::size_t i = 0; i < room; ++i) {
        *s.out++ = static_cast<Byte>(entry >> (8 * i + 8));
        index += lengths.values[entry >> (8 * i + 8) & 255];
      }
    }
  }
  return index <= size && size - index < 8 && (index == size || peek(index) == 0);
}

// The header of a plane before its streams are decoded.
struct HuffmanPlane {
  Lengths lengths;
  BitStream streams[kStreams];
};

// Reads the table and the sizes of the streams of a plane of n values at `p`, which moves past it. Values are written
// to `out`.
inline EntropyStatus open_huffman(const Byte*& p, const Byte* end, std::size_t n, Byte* out, HuffmanPlane& plane) {
  if (end - p < 2 || p[0] >= p[1]) return EntropyStatus::table;
  const std::size_t first = p[0], span = p[1] - first + std::size_t{1}, packed = (span + 1) / 2;
  p += 2;
  if (static_cast<std::size_t>(end - p) < packed + 3 * kStreams) return EntropyStatus::table;
  plane.lengths = {};
  std::uint32_t integer = 0;
  for (std::size_t i = 0; i < 2 * packed; ++i) {
    const int length = p[i / 2] >> (i % 2 * 4) & 15;
    if (length > kLimit || (i == span && length)) return EntropyStatus::table;
    if (i < span) plane.lengths.values[first + i] = static_cast<Byte>(length);
    if (length) integer += 1u << (kLimit - length);
  }
  if (!plane.lengths.values[first] || !plane.lengths.values[first + span - 1] || integer != 1u << kLimit)
    return EntropyStatus::table;
  p += packed;
  const Byte* bytes = p + 3 * kStreams;
  const std::size_t quarter = quarter_of(n);
  for (std::size_t s = 0; s < kStreams; ++s, p += 3) {
    const std::size_t size = p[0] | std::size_t{p[1]} << 8 | std::size_t{p[2]} << 16;
    if (static_cast<std::size_t>(end - bytes) < size) return EntropyStatus::stream;
    plane.streams[s] = {bytes, bytes + size, out + min_of(s * quarter, n), out + min_of((s + 1) * quarter, n), 0};
    bytes += size;
  }
  p = bytes;
  return EntropyStatus::ok;
}

template <int kWindow, bool kLong>
inline void decode_some(BitStream* const* active, std::size_t count, const CodeOrder& order, const std::uint64_t* table,
                        std::size_t turns) {
  switch (count) {
    case 4: return decode_turns<kWindow, kLong, 4>(active, order, table, turns);
    case 3: return decode_turns<kWindow, kLong, 3>(active, order, table, turns);
    case 2: return decode_turns<kWindow, kLong, 2>(active, order, table, turns);
    default: return decode_turns<kWindow, kLong, 1>(active, order, table, turns);
  }
}

template <int kWindow, bool kLong, class Done>
bool decode_streams(HuffmanPlane& plane, const CodeOrder& order, Done done) {
  alignas(64) std::uint64_t table[std::size_t{1} << kWindow];
  fill_table<kWindow>(plane.lengths, order, table);
  const Byte* ends[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) ends[s] = plane.streams[s].out;
  for (;;) {  // streams of equal lengths end together; otherwise the remaining streams continue
    BitStream* active[kStreams];
    std::size_t count = 0, turns = kBatch;
    for (std::size_t s = 0; s < kStreams; ++s) {
      const std::size_t safe = safe_turns<kLookups<kWindow, kLong> * kMost>(plane.streams[s]);
      if (!safe) continue;
      look_ahead(plane.streams[s]);
      active[count++] = &plane.streams[s];
      turns = min_of(turns, safe);
    }
    if (!count) break;
    decode_some<kWindow, kLong>(active, count, order, table, turns);
    for (std::size_t s = 0; s < kStreams; ++s) ends[s] = done(ends[s], plane.streams[s].out, false);
  }
  for (std::size_t s = 0; s < kStreams; ++s) {
    if (!decode_rest<kWindow>(plane.streams[s], order, plane.lengths, table)) return false;
    done(ends[s], plane.streams[s].out, true);
  }
  return true;
}

// Decodes the values of an opened plane. Calls `done(from, to, last)` for runs of values of one stream after the other.
// It returns the start of the values that it wants to see again; if the stream's `last` values are included, it must
// consume all.
template <class Done>
inline EntropyStatus decode_huffman(HuffmanPlane& plane, Done done) {
  const CodeOrder order(plane.lengths);
  const bool brief = static_cast<std::size_t>(plane.streams[kStreams - 1].stop - plane.streams[0].out) < kShortPlane;
  const bool complete = brief && order.longest > kNarrow ? decode_streams<kNarrow, true>(plane, order, done)
                     : brief                          ? decode_streams<kNarrow, false>(plane, order, done)
                     : order.longest > kWide          ? decode_streams<kWide, true>(plane, order, done)
                                                      : decode_streams<kWide, false>(plane, order, done);
  return complete ? EntropyStatus::ok : EntropyStatus::stream;
}

// Decodes a plane of n values at `p`, which moves past it.
inline EntropyStatus read_huffman(const Byte*& p, const Byte* end, std::size_t n, Byte* out) {
  HuffmanPlane plane;
  const EntropyStatus status = open_huffman(p, end, n, out, plane);
  return status == EntropyStatus::ok ? decode_huffman(plane, [](const Byte*, const Byte* to, bool) { return to; }) : status;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
