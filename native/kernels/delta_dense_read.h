// Decoding of chunks of which many elements changed: symbols by ANS or rANS with the base's exponent as context, and the bits that they
// leave open. Once per instruction set.
#pragma once
#include "kernels/delta.h"
#include "kernels/delta_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

using Table = AnsTable<kDeltaScaleBits>;

struct Room {
  Byte* gaps;
  Byte* planes;
  Table* tables;
  std::uint32_t* slots;  // in the same place
};
static_assert(sizeof(Table) == sizeof(std::uint32_t) * kDeltaScale && kDeltaSymbols <= 1u << kRansValueBits<kDeltaScaleBits>);

// A chunk: its bytes, its n elements, and how many of them are wanted.
struct Chunk {
  const Byte* p;
  const Byte* end;
  std::size_t n;
  std::size_t have;

  std::size_t left() const { return static_cast<std::size_t>(end - p); }
};

// What codes of symbols stand for.
template <class Kind>
struct Meanings {
  typename Kind::Word least[kDeltaSymbols];
  Byte open[kDeltaSymbols];

  Meanings() {
    for (std::size_t symbol = 0; symbol < kSymbolsOf<Kind>; ++symbol) {
      least[code_of<Kind>(symbol)] = least_difference<Kind>(symbol);
      open[code_of<Kind>(symbol)] = static_cast<Byte>(open_bits<Kind>(symbol));
    }
  }
};

// Which bins share a table: `first[k]` is the first bin of context k + 1.
struct Contexts {
  std::size_t more;
  Byte first[kDeltaContexts];

  // Where the table of each of kBlock bins begins, of n that count.
  void find(const Byte* bins, std::size_t n, std::uint16_t* __restrict at) const {
    Byte found[kBlock] = {};
    for (std::size_t k = 0; k < more; ++k) {
      const Byte bin = first[k];
      for (std::size_t i = 0; i < kBlock; ++i) found[i] = static_cast<Byte>(found[i] + (bins[i] >= bin));
    }
    for (std::size_t i = 0; i < n; ++i) at[i] = static_cast<std::uint16_t>(found[i] * kDeltaScale);
  }
};

// Codes of symbols by ANS in four streams.
struct TabledSymbols {
  Table* tables;
  AnsStream streams[kStreams];

  explicit TabledSymbols(const Room& room) : tables(room.tables) {}
  template <class Kind>
  bool read_table(Chunk& chunk, std::size_t k) {
    return INGOT_ISA::read_table(chunk.p, chunk.end, kSymbolsOf<Kind>, tables[k], code_of<Kind>);
  }
  bool open(Chunk& chunk) { return read_heads<kDeltaScaleBits>(chunk.p, chunk.end, streams); }
  bool read(const std::uint16_t* at, std::size_t n, std::uint16_t* symbols) {
    const AnsEntry* const entries = tables->entries;
    const auto find = [=](std::size_t i, std::uint64_t state) -> const AnsEntry& { return (entries + at[i])[state]; };
    return read_symbols(streams, find, n, symbols);
  }
  bool ended() const { return INGOT_ISA::ended(streams); }
};

// The same by rANS.
struct RangedSymbols {
  std::uint32_t* slots;
  RansStream stream;

  explicit RangedSymbols(const Room& room) : slots(room.slots) {}
  template <class Kind>
  bool read_table(Chunk& chunk, std::size_t k) {
    AnsFrequencies found;
    if (!read_frequencies<kDeltaScaleBits>(chunk.p, chunk.end, kSymbolsOf<Kind>, found)) return false;
    fill_slots<kDeltaScaleBits>(found, slots + k * kDeltaScale, code_of<Kind>);
    return true;
  }
  bool open(Chunk& chunk) { return open_rans(chunk.p, chunk.end, chunk.n, stream); }
  bool read(const std::uint16_t* at, std::size_t n, std::uint16_t* symbols) {
    return read_slots<kDeltaScaleBits, true>(stream, slots, at, n, symbols);
  }
  bool ended() const { return INGOT_ISA::ended(stream); }
};

// Reads how bins are grouped and each group's table.
template <class Kind, class Symbols>
inline bool read_contexts(Chunk& chunk, Symbols& from, Contexts& contexts) {
  if (chunk.left() < 1) return false;
  contexts.more = *chunk.p++;
  if (contexts.more >= kDeltaContexts || chunk.left() < contexts.more) return false;
  for (std::size_t k = 0; k < contexts.more; ++k) {
    contexts.first[k] = chunk.p[k];
    if (chunk.p[k] <= (k ? chunk.p[k - 1] : 0)) return false;
  }
  chunk.p += contexts.more;
  for (std::size_t k = 0; k <= contexts.more; ++k)
    if (!from.template read_table<Kind>(chunk, k)) return false;
  return true;
}

template <class Kind, bool kThere>
inline void read_differences(const std::uint16_t* symbols, const Meanings<Kind>& meanings, OpenBits& bits, std::size_t n,
                             typename Kind::Word* differences) {
  using Word = typename Kind::Word;
  constexpr std::size_t at_once = 57 / Kind::kBits;  // elements whose open bits one look ahead has
  OpenBits open = bits;  // a copy: stores to words may not be taken for stores to it
  std::size_t i = 0;
  if constexpr (kThere && at_once > 1)
    for (; i + at_once <= n; i += at_once) {
      std::uint64_t word = open.ahead<true>();
#pragma GCC unroll 16
      for (std::size_t k = i; k < i + at_once; ++k) {
        const std::size_t symbol = symbols[k] & (kDeltaSymbols - 1);
        const unsigned count = meanings.open[symbol];
        const Word rest = static_cast<Word>(word & ~(~std::uint64_t{0} << count));
        differences[k] = static_cast<Word>(meanings.least[symbol] | static_cast<Word>(rest << Kind::kLow));
        word >>= count;
        open.at += count;
      }
    }
  for (; i < n; ++i) {
    const std::size_t symbol = symbols[i] & (kDeltaSymbols - 1);
    const unsigned count = meanings.open[symbol];
    const unsigned first = sizeof(Word) == 8 && count > 32 ? 32 : count;
    std::uint64_t rest = open.template next<kThere>(first);
    if constexpr (sizeof(Word) == 8) rest |= open.template next<kThere>(count - first) << first;
    differences[i] = static_cast<Word>(meanings.least[symbol] | static_cast<Word>(rest << Kind::kLow));
  }
  bits = open;
}

// Applies n elements.
template <class Kind>
inline void apply_block(const std::uint16_t* symbols, const Meanings<Kind>& meanings, OpenBits& open, std::size_t n,
                        const typename Kind::Word* base, typename Kind::Word* out) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(typename Kind::Word) == 2) {
    const std::size_t done = apply_lanes<Kind>(symbols, open, n, base, out);
    symbols += done;
    base += done;
    out += done;
    n -= done;
  }
#endif
  typename Kind::Word differences[kBlock];
  if (open.has(n * Kind::kBits))
    read_differences<Kind, true>(symbols, meanings, open, n, differences);
  else
    read_differences<Kind, false>(symbols, meanings, open, n, differences);
  for (std::size_t i = 0; i < n; ++i) out[i] = Kind::applied(base[i], differences[i]);
}

#if defined(__AVX512BW__)
// Applies what can be decoded and applied at once; returns how many elements.
template <class Kind>
inline std::size_t apply_rounds(RangedSymbols& from, const Contexts& contexts, int shift, OpenBits& open, std::size_t have,
                                const std::uint16_t* base, std::uint16_t* out) {
  alignas(64) std::uint16_t at[kDeltaBins + 64] = {};
  for (std::size_t k = 0; k < contexts.more; ++k)
    for (std::size_t bin = contexts.first[k]; bin < kDeltaBins + 64; ++bin) at[bin] = static_cast<std::uint16_t>((k + 1) * kDeltaScale);
  const std::size_t start = contexts.more ? contexts.first[0] - std::size_t{1} : 0;
  if (contexts.more && contexts.first[contexts.more - 1] - start > 63)
    return apply_rounds<Kind, false>(from.stream, from.slots, {{at, 0}, {}}, shift, open, have, base, out);
  return apply_rounds<Kind, true>(from.stream, from.slots, {{at, start}, {}}, shift, open, have, base, out);
}
#endif

template <class Kind, class Symbols>
inline EntropyStatus apply_dense(Chunk& chunk, int shift, const typename Kind::Word* base, typename Kind::Word* out, const Room& room) {
  Contexts contexts;
  Symbols from(room);
  if (!read_contexts<Kind>(chunk, from, contexts)) return EntropyStatus::table;
  if (!from.open(chunk)) return EntropyStatus::stream;
  Byte few[8] = {};
  if (chunk.left() < 8) std::memcpy(few, chunk.p, chunk.left());
  OpenBits open{chunk.left() < 8 ? few : chunk.p, chunk.left(), 0};
  const Meanings<Kind> meanings;
  alignas(64) std::uint16_t symbols[kBlock], at[kBlock];
  std::size_t start = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(typename Kind::Word) == 2 && std::is_same_v<Symbols, RangedSymbols>) {
    start = apply_rounds<Kind>(from, contexts, shift, open, chunk.have, base, out);
  }
#endif
  for (std::size_t n; start < chunk.have; start += n) {
    n = least(kBlock, chunk.have - start);
    Byte bins[kBlock] = {};
    for (std::size_t i = 0; i < n; ++i) bins[i] = bin_of<Kind>(base[start + i], shift);
    contexts.find(bins, n, at);
    if (!from.read(at, n, symbols)) return EntropyStatus::stream;
    apply_block<Kind>(symbols, meanings, open, n, base + start, out + start);
  }
  if (chunk.have < chunk.n) return EntropyStatus::ok;
  return from.ended() && open.ended() ? EntropyStatus::ok : EntropyStatus::stream;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
