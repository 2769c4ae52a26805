// Tabled asymmetric numeral systems (Duda, arXiv:1311.2540, "tANS") with 2^kBits states, spread as RFC 8878 section 4.1.1
// spreads them: four coders take turns, each with a bit stream of its own. Once per instruction set.
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

struct AnsPlan {
  std::uint16_t freq[kSymbols];
  std::size_t first, last;
  std::size_t table_bytes;
};

// Scales counts to frequencies that add up to 2^kBits, each at least 1: rounded to nearest, then the difference is taken one
// by one from, or given to, the most frequent in turn. Needs 1 to kMostDistinct symbols, of all that count at most 2^20.
template <int kBits = kScaleBits>
inline void plan_ans(const std::uint32_t* counts, std::size_t values, AnsPlan& plan) {
  std::uint64_t total = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  std::uint64_t keys[kMostDistinct];
  std::size_t n = 0;
  std::int64_t left = std::int64_t{1} << kBits;
  for (std::size_t value = 0; value < values; ++value) {
    plan.freq[value] = 0;
    if (!counts[value]) continue;
    const std::uint64_t nearest = ((std::uint64_t{counts[value]} << kBits) + total / 2) / total;
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
inline Byte* write_frequencies(const AnsPlan& plan, Byte* p) {
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

// One entry per state: bits to read, symbol (8 bits up), and what the bits are added to for the next state (18 bits up).
template <int kBits = kScaleBits>
struct AnsTable {
  std::uint32_t entries[1u << kBits];
};

// Calls place(symbol, state) for every state in ascending order of states.
template <int kBits, class Place>
inline void spread_symbols(const std::uint16_t* freq, std::size_t first, std::size_t last, Place place) {
  constexpr std::uint32_t scale = 1u << kBits, step = (scale >> 1) + (scale >> 3) + 3;
  std::uint16_t symbols[scale];
  std::uint32_t at = 0;
  for (std::size_t symbol = first; symbol <= last; ++symbol)
    for (std::uint32_t i = 0; i < freq[symbol]; ++i, at = (at + step) & (scale - 1))
      symbols[at] = static_cast<std::uint16_t>(symbol);
  for (std::uint32_t state = 0; state < scale; ++state) place(symbols[state], state);
}

// Reads frequencies, which must add up to 2^kBits, and fills the table.
template <int kBits>
inline bool read_frequencies(const Byte*& p, const Byte* end, std::size_t values, AnsTable<kBits>& table) {
  constexpr std::uint32_t scale = 1u << kBits;
  if (end - p < 4) return false;
  const std::size_t first = load_le<std::uint16_t>(p), last = load_le<std::uint16_t>(p + 2);
  p += 4;
  if (first > last || last >= values) return false;
  std::uint16_t freqs[kSymbols] = {};
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
    freqs[value] = static_cast<std::uint16_t>(freq);
    total += freq;
  }
  if (total != scale) return false;
  std::uint16_t next[kSymbols];
  std::memcpy(next, freqs, sizeof next);
  spread_symbols<kBits>(freqs, first, last, [&](std::uint32_t symbol, std::uint32_t state) {
    const std::uint32_t x = next[symbol]++;
    const std::uint32_t bits = static_cast<std::uint32_t>(kBits + 1 - std::bit_width(x));
    table.entries[state] = bits | symbol << 8 | ((x << bits) - scale) << 18;
  });
  return true;
}

struct AnsStream {
  const Byte* p;
  const Byte* end;
  std::uint64_t state;
  unsigned ahead;  // bits of *p that are taken
};

constexpr std::size_t kAnsTurn = 4;  // symbols of each stream per refill: at most 56 bits

// Decodes turns * kAnsTurn symbols of each stream; each turn takes at most 7 bytes of each. `find(i, state)` is the entry
// of the state of symbol i. The symbols' upper six bits are not theirs.
template <class Find>
[[gnu::noinline]] void decode_states(AnsStream* streams, Find find, std::uint16_t* out, std::size_t turns) {
  constexpr std::uint64_t mark = std::uint64_t{1} << 63;
  const Byte* p[kStreams];
  std::uint64_t bits[kStreams], state[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) {
    p[s] = streams[s].p;
    state[s] = streams[s].state;
    bits[s] = (load_le<std::uint64_t>(p[s]) | mark) >> streams[s].ahead;
  }
  for (std::size_t at = 0;; at += kAnsTurn * kStreams) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kAnsTurn; ++i)
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kStreams; ++s) {
        const std::uint32_t entry = find(at + i * kStreams + s, state[s]);
        const std::uint32_t count = entry & 63;
        state[s] = (entry >> 18) + (bits[s] & ~(~std::uint64_t{0} << count));
        bits[s] >>= count;
        out[at + i * kStreams + s] = static_cast<std::uint16_t>(entry >> 8);
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
    streams[s].state = state[s];
  }
}

// Decodes symbol i near the end of its stream; false where its bits are not all there.
template <class Find>
inline bool decode_state(AnsStream& s, Find find, std::size_t i, std::uint16_t& out) {
  Byte next[8] = {};
  const std::size_t left = static_cast<std::size_t>(s.end - s.p);
  std::memcpy(next, s.p, left < 8 ? left : 8);
  const std::uint32_t entry = find(i, s.state), count = entry & 63;
  const unsigned taken = s.ahead + count;
  if (taken > 8 * left) return false;
  s.state = (entry >> 18) + (load_le<std::uint64_t>(next) >> s.ahead & ~(~std::uint64_t{0} << count));
  s.p += taken >> 3;
  s.ahead = taken & 7;
  out = static_cast<std::uint16_t>(entry >> 8);
  return true;
}

inline std::size_t safe_states(const AnsStream* streams, std::size_t count) {
  std::size_t turns = count / (kAnsTurn * kStreams);
  for (std::size_t s = 0; s < kStreams; ++s) {
    const std::size_t left = static_cast<std::size_t>(streams[s].end - streams[s].p);
    turns = least(turns, left < 8 ? 0 : (left - 8) / 7 + 1);
  }
  return turns;
}

// Reads first states and sizes of the streams, which begin behind them; `p` moves past it all.
template <int kBits>
inline bool read_heads(const Byte*& p, const Byte* end, AnsStream* streams) {
  if (static_cast<std::size_t>(end - p) < 5 * kStreams) return false;
  const Byte* at = p + 5 * kStreams;
  for (std::size_t i = 0; i < kStreams; ++i) {
    const std::size_t head = load_le<std::uint16_t>(p), size = p[2] | std::size_t{p[3]} << 8 | std::size_t{p[4]} << 16;
    p += 5;
    AnsStream& s = streams[i];
    s = {at, at + size, head & ((1u << kHeadBits) - 1), static_cast<unsigned>(head >> kHeadBits)};
    if (s.state >> kBits) return false;
    if (static_cast<std::size_t>(end - at) < size || (s.ahead && !size)) return false;
    if (s.ahead && (*at & ((1u << s.ahead) - 1))) return false;
    at += size;
  }
  p = at;
  return true;
}

// Decodes the next `count` symbols, of which the first is stream 0's; of each the low ten bits count.
template <class Find>
inline bool read_symbols(AnsStream* streams, Find find, std::size_t count, std::uint16_t* out) {
  std::size_t i = 0;
  while (const std::size_t turns = safe_states(streams, count - i)) {
    decode_states(streams, [=](std::size_t k, std::uint64_t state) { return find(i + k, state); }, out + i, turns);
    i += turns * kAnsTurn * kStreams;
  }
  for (; i < count; ++i)
    if (!decode_state(streams[i % kStreams], find, i, out[i])) return false;
  return true;
}

// Whether all streams are used up and their last states are the first ones of the encoder.
inline bool ended(const AnsStream* streams) {
  for (std::size_t s = 0; s < kStreams; ++s)
    if (streams[s].p != streams[s].end || streams[s].ahead || streams[s].state) return false;
  return true;
}

// Reads a table, heads and streams; symbol i is of stream i % kStreams. Calls `put(start, symbols, count)` for every
// kSixBlock symbols in order.
template <class Put>
inline EntropyStatus read_ans(const Byte*& p, const Byte* end, std::size_t n, std::size_t values, AnsTable<>& table, Put put) {
  if (!read_frequencies(p, end, values, table)) return EntropyStatus::table;
  AnsStream streams[kStreams];
  if (!read_heads<kScaleBits>(p, end, streams)) return EntropyStatus::stream;
  const auto find = [&table](std::size_t, std::uint64_t state) { return table.entries[state]; };
  alignas(64) std::uint16_t block[kSixBlock];
  for (std::size_t start = 0; start < n; start += kSixBlock) {
    const std::size_t count = least(kSixBlock, n - start);
    if (!read_symbols(streams, find, count, block)) return EntropyStatus::stream;
    put(start, block, count);
  }
  return ended(streams) ? EntropyStatus::ok : EntropyStatus::stream;
}

template <int kBits = kScaleBits>
struct AnsEncoder {
  struct Step {
    std::uint32_t bits;  // (state + bits) >> 16 is how many bits a state gives
    std::int32_t find;   // where the states of the symbol lie, less its frequency
  } steps[kSymbols];
  std::uint16_t states[1u << kBits];
};

template <int kBits>
inline void fill_encoder(const AnsPlan& plan, AnsEncoder<kBits>& to) {
  std::uint16_t next[kSymbols];
  std::uint32_t start = 0;
  for (std::size_t symbol = plan.first; symbol <= plan.last; ++symbol) {
    const std::uint32_t freq = plan.freq[symbol];
    if (!freq) continue;
    const std::uint32_t most = static_cast<std::uint32_t>(kBits + 1 - (freq > 1 ? std::bit_width(freq - 1) : 1));
    to.steps[symbol] = {(most << 16) - (freq << most), static_cast<std::int32_t>(start - freq)};
    next[symbol] = static_cast<std::uint16_t>(start);
    start += freq;
  }
  spread_symbols<kBits>(plan.freq, plan.first, plan.last, [&](std::uint32_t symbol, std::uint32_t state) {
    to.states[next[symbol]++] = static_cast<std::uint16_t>((1u << kBits) + state);
  });
}

// Writes bits from the end of a buffer to its front, so that they are read in the order opposite to that of writing.
struct BackWriter {
  Byte* p;
  std::uint64_t bits;
  unsigned held;

  // Stores whole bytes; eight bytes before p are written.
  void flush() {
    const unsigned rest = held & 7, whole = held - rest;
    store_le<std::uint64_t>(p - 8, (bits >> rest << 1) << (63 - whole));
    p -= whole >> 3;
    bits &= (1u << rest) - 1;
    held = rest;
  }
};

// Codes n symbols from the last to the first, then writes heads and streams. `coder(i)` is the encoder of symbol i and
// `get(i)` the symbol; `room` is 2 n + 1024 bytes of scratch. Returns the end, or null where it would pass `end`.
template <int kBits, class Coder, class Get>
inline Byte* write_streams(std::size_t n, Byte* room, Byte* p, const Byte* end, Coder coder, Get get) {
  constexpr std::uint32_t scale = 1u << kBits;
  const std::size_t part = ((n + kStreams - 1) / kStreams * kBits + 7) / 8 + 16;  // the most a stream takes, and margins
  BackWriter w[kStreams];
  std::uint32_t state[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) {
    w[s] = {room + (s + 1) * part, 0, 0};
    state[s] = scale;
  }
  const auto step = [&](std::size_t s, std::size_t i) {
    const AnsEncoder<kBits>& encoder = coder(i);
    const typename AnsEncoder<kBits>::Step found = encoder.steps[get(i)];
    const std::uint32_t count = (state[s] + found.bits) >> 16;
    w[s].bits = w[s].bits << count | (state[s] & ~(~0u << count));
    w[s].held += count;
    state[s] = encoder.states[static_cast<std::int32_t>(state[s] >> count) + found.find];
  };
  std::size_t i = n;
  for (; i % (kAnsTurn * kStreams); --i) {
    step((i - 1) % kStreams, i - 1);
    w[(i - 1) % kStreams].flush();
  }
  for (; i; i -= kAnsTurn * kStreams) {
#pragma GCC unroll 16
    for (std::size_t back = 1; back <= kAnsTurn * kStreams; ++back) step((kStreams - back % kStreams) % kStreams, i - back);
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kStreams; ++s) w[s].flush();
  }
  std::size_t sizes[kStreams], total = 5 * kStreams;
  for (std::size_t s = 0; s < kStreams; ++s) {
    sizes[s] = static_cast<std::size_t>(room + (s + 1) * part - w[s].p) + (w[s].held != 0);
    total += sizes[s];
  }
  if (static_cast<std::size_t>(end - p) < total) return nullptr;
  Byte* at = p + 5 * kStreams;
  for (std::size_t s = 0; s < kStreams; ++s, p += 5) {
    const unsigned pad = (8 - w[s].held) & 7;
    if (w[s].held) *--w[s].p = static_cast<Byte>(w[s].bits << pad);
    store_le<std::uint16_t>(p, static_cast<std::uint16_t>((state[s] - scale) | pad << kHeadBits));
    for (int byte = 0; byte < 3; ++byte) p[2 + byte] = static_cast<Byte>(sizes[s] >> (8 * byte));
    std::memcpy(at, w[s].p, sizes[s]);
    at += sizes[s];
  }
  return at;
}

// Writes table, heads and streams of n symbols `get(i)`; as write_streams.
template <class Get>
inline Byte* write_ans(const AnsPlan& plan, std::size_t n, Byte* room, Byte* p, const Byte* end, Get get) {
  AnsEncoder<> encoder;
  fill_encoder(plan, encoder);
  if (static_cast<std::size_t>(end - p) < plan.table_bytes) return nullptr;
  p = write_frequencies(plan, p);
  return write_streams<kScaleBits>(n, room, p, end, [&encoder](std::size_t) -> const AnsEncoder<>& { return encoder; }, get);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
