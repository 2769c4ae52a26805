// Decodes chunks with many changed elements: symbols with ANS or rANS, with the base's exponent as context, and the
// open bits of symbols. Once per instruction set.
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
  std::uint32_t* slots;  // at the same position
};
static_assert(sizeof(Table) == sizeof(std::uint32_t) * kDeltaScale && kDeltaSymbols <= 1u << kRansValueBits<kDeltaScaleBits>);

// A chunk: its bytes, its n elements, and the number of elements to decode.
struct Chunk {
  const Byte* p;
  const Byte* end;
  std::size_t n;
  std::size_t have;

  std::size_t remaining() const { return static_cast<std::size_t>(end - p); }
};

// The values of symbols' codes.
template <class Element>
struct Meanings {
  typename Element::Word least[kDeltaSymbols];
  Byte open[kDeltaSymbols];

  Meanings() {
    for (std::size_t symbol = 0; symbol < kSymbolsOf<Element>; ++symbol) {
      least[code_of<Element>(symbol)] = least_difference<Element>(symbol);
      open[code_of<Element>(symbol)] = static_cast<Byte>(open_bits<Element>(symbol));
    }
  }
};

// Which bins share a table: `first[k]` is the first bin of context k + 1.
struct Contexts {
  std::size_t more;
  Byte first[kDeltaContexts];

  // Finds the first table entry for each of kBlock bins, for n elements.
  void find(const Byte* bins, std::size_t n, std::uint16_t* __restrict contexts) const {
    Byte sums[kBlock] = {};
    for (std::size_t k = 0; k < more; ++k) {
      const Byte bin = first[k];
      for (std::size_t i = 0; i < kBlock; ++i) sums[i] = static_cast<Byte>(sums[i] + (bins[i] >= bin));
    }
    for (std::size_t i = 0; i < n; ++i) contexts[i] = static_cast<std::uint16_t>(sums[i] * kDeltaScale);
  }
};

// Codes of symbols by ANS in four streams.
struct TabledSymbols {
  Table* tables;
  AnsStream streams[kStreams];

  explicit TabledSymbols(const Room& room) : tables(room.tables) {}
  template <class Element>
  bool read_table(Chunk& chunk, std::size_t k) {
    return INGOT_ISA::read_table(chunk.p, chunk.end, kSymbolsOf<Element>, tables[k], code_of<Element>);
  }
  bool open(Chunk& chunk) { return read_heads<kDeltaScaleBits>(chunk.p, chunk.end, streams); }
  bool read(const std::uint16_t* contexts, std::size_t n, std::uint16_t* symbols) {
    const AnsEntry* const entries = tables->entries;
    const auto find = [=](std::size_t i, std::uint64_t state) -> const AnsEntry& {
      return (entries + contexts[i])[state];
    };
    return read_symbols(streams, find, n, symbols);
  }
  bool ended() const { return INGOT_ISA::ended(streams); }
};

// The same by rANS.
struct RangedSymbols {
  std::uint32_t* slots;
  RansStream stream;

  explicit RangedSymbols(const Room& room) : slots(room.slots) {}
  template <class Element>
  bool read_table(Chunk& chunk, std::size_t k) {
    AnsFrequencies result;
    if (!read_frequencies<kDeltaScaleBits>(chunk.p, chunk.end, kSymbolsOf<Element>, result)) return false;
    fill_slots<kDeltaScaleBits>(result, slots + k * kDeltaScale, code_of<Element>);
    return true;
  }
  bool open(Chunk& chunk) { return open_rans(chunk.p, chunk.end, chunk.n, stream); }
  bool read(const std::uint16_t* contexts, std::size_t n, std::uint16_t* symbols) {
    return read_slots<kDeltaScaleBits, true>(stream, slots, contexts, n, symbols);
  }
  bool ended() const { return INGOT_ISA::ended(stream); }
};

// Reads the grouping of bins and the table of each group.
template <class Element, class Symbols>
inline bool read_contexts(Chunk& chunk, Symbols& from, Contexts& contexts) {
  if (chunk.remaining() < 1) return false;
  contexts.more = *chunk.p++;
  if (contexts.more >= kDeltaContexts || chunk.remaining() < contexts.more) return false;
  for (std::size_t k = 0; k < contexts.more; ++k) {
    contexts.first[k] = chunk.p[k];
    if (chunk.p[k] <= (k ? chunk.p[k - 1] : 0)) return false;
  }
  chunk.p += contexts.more;
  for (std::size_t k = 0; k <= contexts.more; ++k)
    if (!from.template read_table<Element>(chunk, k)) return false;
  return true;
}

template <class Element, bool kThere>
inline void read_differences(const std::uint16_t* symbols, const Meanings<Element>& meanings, OpenBits& bits,
                             std::size_t n, typename Element::Word* differences) {
  using Word = typename Element::Word;
  constexpr std::size_t at_once = 57 / Element::kBits;  // elements whose open bits are read together
  OpenBits open = bits;  // a local copy: stores to words could alias the original
  std::size_t i = 0;
  if constexpr (kThere && at_once > 1)
    for (; i + at_once <= n; i += at_once) {
      std::uint64_t word = open.ahead<true>();
#pragma GCC unroll 16
      for (std::size_t k = i; k < i + at_once; ++k) {
        const std::size_t symbol = symbols[k] & (kDeltaSymbols - 1);
        const unsigned count = meanings.open[symbol];
        const Word remainder = static_cast<Word>(word & ~(~std::uint64_t{0} << count));
        differences[k] = static_cast<Word>(meanings.least[symbol] | static_cast<Word>(remainder << Element::kLow));
        word >>= count;
        open.position += count;
      }
    }
  for (; i < n; ++i) {
    const std::size_t symbol = symbols[i] & (kDeltaSymbols - 1);
    const unsigned count = meanings.open[symbol];
    const unsigned first = sizeof(Word) == 8 && count > 32 ? 32 : count;
    std::uint64_t remainder = open.template next<kThere>(first);
    if constexpr (sizeof(Word) == 8) remainder |= open.template next<kThere>(count - first) << first;
    differences[i] = static_cast<Word>(meanings.least[symbol] | static_cast<Word>(remainder << Element::kLow));
  }
  bits = open;
}

// Applies n elements.
template <class Element>
inline void apply_block(const std::uint16_t* symbols, const Meanings<Element>& meanings, OpenBits& open, std::size_t n,
                        const typename Element::Word* base, typename Element::Word* out) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(typename Element::Word) == 2) {
    const std::size_t done = apply_lanes<Element>(symbols, open, n, base, out);
    symbols += done;
    base += done;
    out += done;
    n -= done;
  }
#endif
  typename Element::Word differences[kBlock];
  if (open.has(n * Element::kBits))
    read_differences<Element, true>(symbols, meanings, open, n, differences);
  else
    read_differences<Element, false>(symbols, meanings, open, n, differences);
  for (std::size_t i = 0; i < n; ++i) out[i] = Element::applied(base[i], differences[i]);
}

#if defined(__AVX512BW__)
// Decodes and applies elements in one step as far as possible; returns their number.
template <class Element>
inline std::size_t apply_rounds(RangedSymbols& from, const Contexts& contexts, int shift, OpenBits& open, std::size_t have,
                                const std::uint16_t* base, std::uint16_t* out) {
  alignas(64) std::uint16_t indices[kDeltaBins + 64] = {};
  for (std::size_t k = 0; k < contexts.more; ++k)
    for (std::size_t bin = contexts.first[k]; bin < kDeltaBins + 64; ++bin)
      indices[bin] = static_cast<std::uint16_t>((k + 1) * kDeltaScale);
  const std::size_t start = contexts.more ? contexts.first[0] - std::size_t{1} : 0;
  if (contexts.more && contexts.first[contexts.more - 1] - start > 63)
    return apply_rounds<Element, false>(from.stream, from.slots, {{indices, 0}, {}}, shift, open, have, base, out);
  return apply_rounds<Element, true>(from.stream, from.slots, {{indices, start}, {}}, shift, open, have, base, out);
}
#endif

template <class Element, class Symbols>
inline EntropyStatus apply_dense(Chunk& chunk, int shift, const typename Element::Word* base,
                                 typename Element::Word* out, const Room& room) {
  Contexts contexts;
  Symbols from(room);
  if (!read_contexts<Element>(chunk, from, contexts)) return EntropyStatus::table;
  if (!from.open(chunk)) return EntropyStatus::stream;
  Byte is_few[8] = {};
  if (chunk.remaining() < 8) std::memcpy(is_few, chunk.p, chunk.remaining());
  OpenBits open{chunk.remaining() < 8 ? is_few : chunk.p, chunk.remaining(), 0};
  const Meanings<Element> meanings;
  alignas(64) std::uint16_t symbols[kBlock], at[kBlock];
  std::size_t start = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(typename Element::Word) == 2 && std::is_same_v<Symbols, RangedSymbols>) {
    start = apply_rounds<Element>(from, contexts, shift, open, chunk.have, base, out);
  }
#endif
  for (std::size_t n; start < chunk.have; start += n) {
    n = min_of(kBlock, chunk.have - start);
    Byte bins[kBlock] = {};
    for (std::size_t i = 0; i < n; ++i) bins[i] = bin_of<Element>(base[start + i], shift);
    contexts.find(bins, n, at);
    if (!from.read(at, n, symbols)) return EntropyStatus::stream;
    apply_block<Element>(symbols, meanings, open, n, base + start, out + start);
  }
  if (chunk.have < chunk.n) return EntropyStatus::ok;
  return from.ended() && open.ended() ? EntropyStatus::ok : EntropyStatus::stream;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
