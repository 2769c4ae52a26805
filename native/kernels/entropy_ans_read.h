// Decodes the output of entropy_ans.h: four streams alternate in registers. Once per instruction set.
#pragma once
#include "kernels/entropy_ans.h"

namespace ingot::INGOT_ISA {
namespace {

// A decoding table's entry for a state. Two loads from one entry take less time than one load and shifts, of which
// processors can do few at a time.
struct AnsEntry {
  std::uint16_t packed;  // number of bits to read, and the symbol from bit kSymbolShift on
  std::uint16_t next;   // base of the next state, to which the bits are added
};
constexpr int kSymbolShift = 6;

template <int kBits = kScaleBits>
struct AnsTable {
  AnsEntry entries[1u << kBits];
};

// Frequencies of the symbols; `first` and `last` are the first and last that occur.
struct AnsFrequencies {
  std::uint16_t freq[kSymbols];
  std::size_t first, last;
};

// Reads frequencies, which must add up to 2^kBits.
template <int kBits>
inline bool read_frequencies(const Byte*& p, const Byte* end, std::size_t values, AnsFrequencies& result) {
  constexpr std::uint32_t scale = 1u << kBits;
  if (end - p < 4) return false;
  const std::size_t first = result.first = load_le<std::uint16_t>(p),
                    last = result.last = load_le<std::uint16_t>(p + 2);
  p += 4;
  if (first > last || last >= values) return false;
  std::memset(result.freq, 0, sizeof result.freq);
  std::uint32_t total = 0;
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
    }
    if (freq > scale - total) return false;
    result.freq[value] = static_cast<std::uint16_t>(freq);
    total += freq;
  }
  return total == scale;
}

// Reads frequencies and fills the table; `value(symbol)` is stored in the entries.
template <int kBits, class Value>
inline bool read_table(const Byte*& p, const Byte* end, std::size_t values, AnsTable<kBits>& table, Value value) {
  AnsFrequencies result;
  if (!read_frequencies<kBits>(p, end, values, result)) return false;
  std::uint16_t next[kSymbols];
  std::memcpy(next, result.freq, sizeof next);
  spread_symbols<kBits>(result.freq, result.first, result.last, [&](std::uint32_t symbol, std::uint32_t state) {
    const std::uint32_t x = next[symbol]++;
    const std::uint32_t bits = static_cast<std::uint32_t>(kBits + 1 - std::bit_width(x));
    table.entries[state] = {static_cast<std::uint16_t>(bits | value(symbol) << kSymbolShift), static_cast<std::uint16_t>((x << bits) - (1u << kBits))};
  });
  return true;
}

struct AnsStream {
  const Byte* p;
  const Byte* end;
  std::uint64_t state;
  unsigned ahead;  // consumed bits of *p
};


// A stream in registers.
struct AnsLane {
  const Byte* p;
  std::uint64_t bits;
  std::uint64_t state;

  static constexpr std::uint64_t mark = std::uint64_t{1} << 63;  // the consumed bits are above it

  explicit AnsLane(const AnsStream& s) : p(s.p), bits((load_le<std::uint64_t>(s.p) | mark) >> s.ahead), state(s.state) {}
  // Symbols are written one by one: GCC would gather some of them for one store, which takes longer.
  void take(const AnsEntry& entry, volatile std::uint16_t& out) {
    const std::uint32_t result = entry.packed, count = result & ((1u << kSymbolShift) - 1);
    state = entry.next + low_bits(bits, count);
    bits >>= count;
    out = static_cast<std::uint16_t>(result);
  }
  void refill() {
    const unsigned taken = static_cast<unsigned>(std::countl_zero(bits));
    p += taken >> 3;
    bits = (load_le<std::uint64_t>(p) | mark) >> (taken & 7);
  }
  void store(AnsStream& s) const {
    const unsigned taken = static_cast<unsigned>(std::countl_zero(bits));
    s.p = p + (taken >> 3);
    s.ahead = taken & 7;
    s.state = state;
  }
};

// Decodes turns * kAnsTurn symbols of each stream; each iteration consumes at most 7 bytes of each. `find(i, state)` is
// the entry for the state of symbol i. Every stream is a separate variable, so that all stay in registers.
template <class Find>
[[gnu::noinline]] void decode_states(AnsStream* streams, Find find, std::uint16_t* out, std::size_t turns) {
  static_assert(kStreams == 4);
  AnsLane a(streams[0]), b(streams[1]), c(streams[2]), d(streams[3]);
  for (std::size_t index = 0;;) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kAnsTurn; ++i, index += kStreams) {
      a.take(find(index, a.state), out[index]);
      b.take(find(index + 1, b.state), out[index + 1]);
      c.take(find(index + 2, c.state), out[index + 2]);
      d.take(find(index + 3, d.state), out[index + 3]);
    }
    if (--turns == 0) break;
    a.refill();
    b.refill();
    c.refill();
    d.refill();
  }
  a.store(streams[0]);
  b.store(streams[1]);
  c.store(streams[2]);
  d.store(streams[3]);
}

// Decodes symbol i near the end of its stream; returns false if its bits are incomplete.
template <class Find>
inline bool decode_state(AnsStream& s, Find find, std::size_t i, std::uint16_t& out) {
  Byte next[8] = {};
  const std::size_t remaining = static_cast<std::size_t>(s.end - s.p);
  std::memcpy(next, s.p, remaining < 8 ? remaining : 8);
  const AnsEntry& entry = find(i, s.state);
  const std::uint32_t count = entry.packed & ((1u << kSymbolShift) - 1);
  const unsigned taken = s.ahead + count;
  if (taken > 8 * remaining) return false;
  s.state = entry.next + low_bits(load_le<std::uint64_t>(next) >> s.ahead, count);
  s.p += taken >> 3;
  s.ahead = taken & 7;
  out = entry.packed;
  return true;
}

inline std::size_t safe_states(const AnsStream* streams, std::size_t count) {
  std::size_t turns = count / (kAnsTurn * kStreams);
  for (std::size_t s = 0; s < kStreams; ++s) {
    const std::size_t remaining = static_cast<std::size_t>(streams[s].end - streams[s].p);
    turns = min_of(turns, remaining < 8 ? 0 : (remaining - 8) / 7 + 1);
  }
  return turns;
}

// Reads the first states and the sizes of the streams, which follow; `p` moves past everything.
template <int kBits>
inline bool read_heads(const Byte*& p, const Byte* end, AnsStream* streams) {
  if (static_cast<std::size_t>(end - p) < 5 * kStreams) return false;
  const Byte* bytes = p + 5 * kStreams;
  for (std::size_t i = 0; i < kStreams; ++i) {
    const std::size_t head = load_le<std::uint16_t>(p), size = p[2] | std::size_t{p[3]} << 8 | std::size_t{p[4]} << 16;
    p += 5;
    AnsStream& s = streams[i];
    s = {bytes, bytes + size, head & ((1u << kHeadBits) - 1), static_cast<unsigned>(head >> kHeadBits)};
    if (s.state >> kBits) return false;
    if (static_cast<std::size_t>(end - bytes) < size || (s.ahead && !size)) return false;
    if (s.ahead && (*bytes & ((1u << s.ahead) - 1))) return false;
    bytes += size;
  }
  p = bytes;
  return true;
}

// Decodes the next `count` symbols; the first belongs to stream 0.
template <class Find>
inline bool read_symbols(AnsStream* streams, Find find, std::size_t count, std::uint16_t* out) {
  std::size_t i = 0;
  while (const std::size_t turns = safe_states(streams, count - i)) {
    const auto next = [=](std::size_t k, std::uint64_t state) -> const AnsEntry& { return find(i + k, state); };
    decode_states(streams, next, out + i, turns);
    i += turns * kAnsTurn * kStreams;
  }
  for (; i < count; ++i)
    if (!decode_state(streams[i % kStreams], find, i, out[i])) return false;
  for (std::size_t k = 0; k < count; ++k) out[k] >>= kSymbolShift;
  return true;
}

// Returns whether all streams are consumed and their last states are the encoder's first ones.
inline bool ended(const AnsStream* streams) {
  for (std::size_t s = 0; s < kStreams; ++s)
    if (streams[s].p != streams[s].end || streams[s].ahead || streams[s].state) return false;
  return true;
}

// Reads a table and heads, and moves `p` past the streams. Symbol i belongs to stream i % kStreams.
inline EntropyStatus open_ans(const Byte*& p, const Byte* end, std::size_t values, AnsTable<>& table, AnsStream* streams) {
  if (!read_table(p, end, values, table, [](std::uint32_t symbol) { return symbol; })) return EntropyStatus::table;
  return read_heads<kScaleBits>(p, end, streams) ? EntropyStatus::ok : EntropyStatus::stream;
}

// Decodes n symbols. Calls `put(start, symbols, count)` for every kSixBlock of them in order.
template <class Put>
inline EntropyStatus decode_ans(const AnsTable<>& table, AnsStream* streams, std::size_t n, Put put) {
  const auto find = [&table](std::size_t, std::uint64_t state) -> const AnsEntry& { return table.entries[state]; };
  alignas(64) std::uint16_t block[kSixBlock];
  for (std::size_t start = 0; start < n; start += kSixBlock) {
    const std::size_t count = min_of(kSixBlock, n - start);
    if (!read_symbols(streams, find, count, block)) return EntropyStatus::stream;
    put(start, block, count);
  }
  return ended(streams) ? EntropyStatus::ok : EntropyStatus::stream;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
