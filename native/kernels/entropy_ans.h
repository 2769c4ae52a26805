// Tabled asymmetric numeral systems (Duda, arXiv:1311.2540, "tANS") with 2^kBits states, spread as in RFC 8878 section
// 4.1.1. Four coders alternate, each with a separate bit stream. Once per instruction set.
#pragma once
#include "kernels/entropy.h"

#if defined(__BMI2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// log2 of a positive integer with 12 fractional bits, by squaring; integers only, so that every machine makes the same
// choices.
inline std::uint32_t log2_fixed(std::uint64_t value) {
  const int integer = 63 - std::countl_zero(value);
  std::uint64_t mantissa = integer > 31 ? value >> (integer - 31) : value << (31 - integer);
  std::uint32_t result = static_cast<std::uint32_t>(integer);
  for (int i = 0; i < 12; ++i) {
    mantissa = mantissa * mantissa >> 31;
    const std::uint32_t bit = static_cast<std::uint32_t>(mantissa >> 32);
    mantissa >>= bit;
    result = result << 1 | bit;
  }
  return result;
}

// The number of bytes of ideal coding, rounded up.
inline std::size_t ideal_bytes(const std::uint32_t* counts, std::size_t values) {
  std::uint64_t total = 0, bits = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  if (total == 0) return 0;
  const std::uint32_t integer = log2_fixed(total);
  for (std::size_t value = 0; value < values; ++value)
    if (counts[value]) bits += std::uint64_t{counts[value]} * (integer - log2_fixed(counts[value]));
  return (bits + (8 << 12) - 1) / (8 << 12);
}

struct AnsPlan {
  std::uint16_t freq[kSymbols];
  std::size_t first, last;
  std::size_t table_bytes;
};

// Scales counts to frequencies that sum to 2^kBits, each at least 1: they are rounded to nearest, then the most
// frequent symbols in turn are changed by one until the sum fits. Needs 1 to kMostDistinct symbols with a total count
// of at most 2^20.
template <int kBits = kScaleBits>
inline void plan_ans(const std::uint32_t* counts, std::size_t values, AnsPlan& plan) {
  std::uint64_t total = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  std::uint64_t keys[kMostDistinct];
  std::size_t n = 0;
  std::int64_t remaining = std::int64_t{1} << kBits;
  for (std::size_t value = 0; value < values; ++value) {
    plan.freq[value] = 0;
    if (!counts[value]) continue;
    const std::uint64_t nearest = ((std::uint64_t{counts[value]} << kBits) + total / 2) / total;
    plan.freq[value] = static_cast<std::uint16_t>(nearest ? nearest : 1);
    remaining -= plan.freq[value];
    keys[n++] = (kEntropyMaxChunk - counts[value]) << 16 | value;
  }
  for (std::size_t value = values; value < kSymbols; ++value) plan.freq[value] = 0;
  sort_keys(keys, n);
  for (std::size_t i = 0; remaining != 0; i = (i + 1) % n) {
    std::uint16_t& freq = plan.freq[keys[i] & 0xffff];
    if (remaining < 0 && freq == 1) continue;
    freq = static_cast<std::uint16_t>(remaining < 0 ? freq - 1 : freq + 1);
    remaining += remaining < 0 ? 1 : -1;
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

// First and last symbol, then frequencies: one byte below 128, otherwise two with the high bits first and the top bit
// set. A 0 is followed by the number of further absent symbols.
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

constexpr std::size_t kAnsTurn = 4;  // symbols of each stream per refill: at most 56 bits

// The `count` low bits; `count` is below 64.
inline std::uint64_t low_bits(std::uint64_t bits, std::uint32_t count) {
#if defined(__BMI2__)
  return _bzhi_u64(bits, count);
#else
  return bits & ~(~std::uint64_t{0} << count);
#endif
}

// Calls place(symbol, state) for every state in ascending order of states. Position i * step of the spread is symbol i of those in
// ascending order: so a state's symbol is number state / step of them, modulo the number of states.
template <int kBits, class Place>
inline void spread_symbols(const std::uint16_t* freq, std::size_t first, std::size_t last, Place position) {
  constexpr std::uint32_t scale = 1u << kBits, step = (scale >> 1) + (scale >> 3) + 3;
  constexpr std::uint32_t inverse = [] {
    std::uint32_t result = 1;
    while ((result * step) % scale != 1) result += 2;
    return result;
  }();
  std::uint16_t symbols[scale];
  std::uint16_t* p = symbols;
  for (std::size_t symbol = first; symbol <= last; ++symbol)
    for (std::uint32_t i = 0; i < freq[symbol]; ++i) *p++ = static_cast<std::uint16_t>(symbol);
  for (std::uint32_t state = 0, at = 0; state < scale; ++state, at = (at + inverse) % scale)
    position(symbols[at], state);
}

template <int kBits = kScaleBits>
struct AnsEncoder {
  struct Step {
    std::uint32_t bits;  // (state + bits) >> 16 is the number of bits that a state outputs
    std::int32_t find;   // first state of the symbol, minus its frequency
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
    const std::uint32_t limit = static_cast<std::uint32_t>(kBits + 1 - (freq > 1 ? std::bit_width(freq - 1) : 1));
    to.steps[symbol] = {(limit << 16) - (freq << limit), static_cast<std::int32_t>(start - freq)};
    next[symbol] = static_cast<std::uint16_t>(start);
    start += freq;
  }
  spread_symbols<kBits>(plan.freq, plan.first, plan.last, [&](std::uint32_t symbol, std::uint32_t state) {
    to.states[next[symbol]++] = static_cast<std::uint16_t>((1u << kBits) + state);
  });
}

// Writes bits from the end of a buffer to its front, so that they are read in the reverse order of writing.
struct BackWriter {
  Byte* p;
  std::uint64_t bits;
  unsigned bit_count;

  // Stores complete bytes; eight bytes before p are written.
  void flush() {
    const unsigned pending = bit_count & 7, whole = bit_count - pending;
    store_le<std::uint64_t>(p - 8, (bits >> pending << 1) << (63 - whole));
    p -= whole >> 3;
    bits &= (1u << pending) - 1;
    bit_count = pending;
  }
};

struct BackLane {
  BackWriter w;
  std::uint32_t state;

  template <int kBits>
  void put(const AnsEncoder<kBits>& encoder, std::size_t symbol) {
    const typename AnsEncoder<kBits>::Step found = encoder.steps[symbol];
    const std::uint32_t count = (state + found.bits) >> 16;
    w.bits = w.bits << count | low_bits(state, count);
    w.bit_count += count;
    state = encoder.states[static_cast<std::int32_t>(state >> count) + found.find];
  }
};

// Encodes n symbols from the last to the first, then writes heads and streams. `coder(i)` is the encoder of symbol i
// and `get(i)` the symbol; `room` is scratch memory of 2 n + 1024 bytes. Returns the end, or null if it would pass
// `end`.
template <int kBits, class Coder, class Get>
inline Byte* write_streams(std::size_t n, Byte* room, Byte* p, const Byte* end, Coder coder, Get get) {
  constexpr std::uint32_t scale = 1u << kBits;
  const std::size_t part = ((n + kStreams - 1) / kStreams * kBits + 7) / 8 + 16;  // limit on a stream, with margins
  BackLane lanes[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) lanes[s] = {{room + (s + 1) * part, 0, 0}, scale};
  std::size_t i = n;
  for (; i % (kAnsTurn * kStreams); --i) {
    lanes[(i - 1) % kStreams].put(coder(i - 1), get(i - 1));
    lanes[(i - 1) % kStreams].w.flush();
  }
  static_assert(kStreams == 4);
  BackLane a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];  // separate variables, so that all stay in registers
  while (i) {
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kAnsTurn; ++k, i -= kStreams) {
      d.put(coder(i - 1), get(i - 1));
      c.put(coder(i - 2), get(i - 2));
      b.put(coder(i - 3), get(i - 3));
      a.put(coder(i - 4), get(i - 4));
    }
    a.w.flush();
    b.w.flush();
    c.w.flush();
    d.w.flush();
  }
  BackWriter w[kStreams] = {a.w, b.w, c.w, d.w};
  const std::uint32_t state[kStreams] = {a.state, b.state, c.state, d.state};
  std::size_t sizes[kStreams], total = 5 * kStreams;
  for (std::size_t s = 0; s < kStreams; ++s) {
    sizes[s] = static_cast<std::size_t>(room + (s + 1) * part - w[s].p) + (w[s].bit_count != 0);
    total += sizes[s];
  }
  if (static_cast<std::size_t>(end - p) < total) return nullptr;
  Byte* bytes = p + 5 * kStreams;
  for (std::size_t s = 0; s < kStreams; ++s, p += 5) {
    const unsigned pad = (8 - w[s].bit_count) & 7;
    if (w[s].bit_count) *--w[s].p = static_cast<Byte>(w[s].bits << pad);
    store_le<std::uint16_t>(p, static_cast<std::uint16_t>((state[s] - scale) | pad << kHeadBits));
    for (int byte = 0; byte < 3; ++byte) p[2 + byte] = static_cast<Byte>(sizes[s] >> (8 * byte));
    std::memcpy(bytes, w[s].p, sizes[s]);
    bytes += sizes[s];
  }
  return bytes;
}

// Writes table, heads and streams of n symbols `get(i)`; see write_streams.
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
