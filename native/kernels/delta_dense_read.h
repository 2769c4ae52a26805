// Decoding of chunks of which many elements changed: symbols by ANS with the base's exponent as context, and the bits that they leave
// open. Once per instruction set.
#pragma once
#include "kernels/delta.h"
#include "kernels/entropy_ans_read.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

using Table = AnsTable<kDeltaScaleBits>;

struct Room {
  Byte* gaps;
  Byte* planes;
  Table* tables;
};

// A chunk: its bytes, its n elements, and how many of them are wanted.
struct Chunk {
  const Byte* p;
  const Byte* end;
  std::size_t n;
  std::size_t have;

  std::size_t left() const { return static_cast<std::size_t>(end - p); }
};

// Bits that symbols leave open, one after the other, lowest first. Reads stay inside of the bytes whatever is asked for; what was
// asked for is compared with what there is at the end.
struct OpenBits {
  const Byte* p;  // at least eight bytes
  std::size_t size;
  std::size_t at;

  // Whether the next `bits` bits are there, and eight bytes behind each of them.
  bool has(std::size_t bits) const { return (at + bits) / 8 + 8 <= size; }

  // The next 57 bits or more. `kThere`: they were asked for.
  template <bool kThere>
  std::uint64_t ahead() const {
    const std::size_t byte = kThere ? at >> 3 : least(at >> 3, size < 8 ? 0 : size - 8);
    return load_le<std::uint64_t>(p + byte) >> ((at - 8 * byte) & 63);
  }

  template <bool kThere>
  std::uint64_t next(unsigned count) {
    const std::uint64_t word = ahead<kThere>();
    at += count;
    return word & ~(~std::uint64_t{0} << count);
  }

  // Whether the last bit was in the last byte, and unused bits are 0.
  bool ended() const {
    const std::size_t unused = 8 * size - at;
    return at <= 8 * size && unused < 8 && (unused == 0 || p[size - 1] >> (8 - unused) == 0);
  }
};

// What symbols stand for.
template <class Kind>
struct Meanings {
  typename Kind::Word least[kDeltaSymbols];
  Byte open[kDeltaSymbols];

  Meanings() {
    for (std::size_t symbol = 0; symbol < kSymbolsOf<Kind>; ++symbol) {
      least[symbol] = least_difference<Kind>(symbol);
      open[symbol] = static_cast<Byte>(open_bits<Kind>(symbol));
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

// Reads how bins are grouped and each group's table.
inline bool read_contexts(Chunk& chunk, std::size_t symbols, Table* tables, Contexts& contexts) {
  if (chunk.left() < 1) return false;
  contexts.more = *chunk.p++;
  if (contexts.more >= kDeltaContexts || chunk.left() < contexts.more) return false;
  for (std::size_t k = 0; k < contexts.more; ++k) {
    contexts.first[k] = chunk.p[k];
    if (chunk.p[k] <= (k ? chunk.p[k - 1] : 0)) return false;
  }
  chunk.p += contexts.more;
  for (std::size_t k = 0; k <= contexts.more; ++k)
    if (!read_frequencies(chunk.p, chunk.end, symbols, tables[k])) return false;
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

#if defined(__AVX512BW__)
// Sixteen elements of two bytes at a time: what symbols mean is computed, where their open bits begin is summed up, and these are
// taken from one look ahead. As apply_block.
template <class Kind>
inline void apply_sixteens(const std::uint16_t* symbols, OpenBits& open, std::size_t n, const std::uint16_t* base, std::uint16_t* out) {
  using Lanes = std::uint32_t __attribute__((vector_size(64)));
  using Half = std::uint16_t __attribute__((vector_size(32)));
  constexpr std::uint32_t places = 2 * static_cast<std::uint32_t>(kClasses<Kind>);
  const Lanes none = {}, lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto load = [](const std::uint16_t* from) {
    Half found;
    std::memcpy(&found, from, sizeof found);
    return __builtin_convertvector(found, Lanes);
  };
  std::size_t at = open.at;
  for (std::size_t i = 0; i < n; i += 16) {
    const Lanes symbol = load(symbols + i), old = load(base + i);
    const Lanes turns = Kind::kLow == 2 ? (symbol >= places ? none + 1 : none) : none;
    const Lanes found = (symbol - turns * places) >> 1, large = found >> 1;
    const Lanes count = (large > 1 ? large : none + 1) - 1;
    Lanes behind = count;  // where the bits of the next element begin
#pragma GCC unroll 4
    for (unsigned step = 1; step < 16; step *= 2)
      behind += reinterpret_cast<Lanes>(_mm512_maskz_permutexvar_epi32(
          static_cast<__mmask16>(0xffffu << step), reinterpret_cast<__m512i>(lanes - step), reinterpret_cast<__m512i>(behind)));
    const Lanes first = behind - count + static_cast<std::uint32_t>(at & 7);
    const Lanes pair = (first >> 4) * 0x10001 + 0x10000;  // of 16-bit words: a word and the next one
    const __m512i ahead = _mm512_loadu_si512(open.p + (at >> 3));
    const Lanes words = reinterpret_cast<Lanes>(_mm512_maskz_permutexvar_epi16(~__mmask32{0}, reinterpret_cast<__m512i>(pair), ahead));
    const Lanes rest = words >> (first & 15) & (((none + 1) << count) - 1);
    const Lanes magnitude = found < 2 ? found : (((found & 1) | 2) << count | rest);
    const Lanes change = magnitude ^ (none - (symbol & 1));
    Lanes result;
    if constexpr (Kind::kLow == 2)
      result = ((old + change) & 0x7fff) | ((old & 0x8000) ^ turns << 15);
    else
      result = old + change;
    const Half narrow = __builtin_convertvector(result, Half);
    std::memcpy(out + i, &narrow, sizeof narrow);
    at += behind[15];
  }
  open.at = at;
}
#endif

// Applies n elements.
template <class Kind>
inline void apply_block(const std::uint16_t* symbols, const Meanings<Kind>& meanings, OpenBits& open, std::size_t n,
                        const typename Kind::Word* base, typename Kind::Word* out) {
#if defined(__AVX512BW__)
  constexpr std::size_t look_ahead = 8 * sizeof(__m512i);
  if constexpr (sizeof(typename Kind::Word) == 2)
    if (n % 16 == 0 && open.has(n * Kind::kBits + look_ahead)) return apply_sixteens<Kind>(symbols, open, n, base, out);
#endif
  typename Kind::Word differences[kBlock];
  if (open.has(n * Kind::kBits))
    read_differences<Kind, true>(symbols, meanings, open, n, differences);
  else
    read_differences<Kind, false>(symbols, meanings, open, n, differences);
  for (std::size_t i = 0; i < n; ++i) out[i] = Kind::applied(base[i], differences[i]);
}

template <class Kind>
inline EntropyStatus apply_dense(Chunk& chunk, int shift, const typename Kind::Word* base, typename Kind::Word* out, const Room& room) {
  Contexts contexts;
  if (!read_contexts(chunk, kSymbolsOf<Kind>, room.tables, contexts)) return EntropyStatus::table;
  AnsStream streams[kStreams];
  if (!read_heads<kDeltaScaleBits>(chunk.p, chunk.end, streams)) return EntropyStatus::stream;
  Byte few[8] = {};
  if (chunk.left() < 8) std::memcpy(few, chunk.p, chunk.left());
  OpenBits open{chunk.left() < 8 ? few : chunk.p, chunk.left(), 0};
  const Meanings<Kind> meanings;
  alignas(64) std::uint16_t symbols[kBlock], at[kBlock];
  const AnsEntry* const entries = room.tables->entries;
  const auto find = [entries, &at](std::size_t i, std::uint64_t state) -> const AnsEntry& { return (entries + at[i])[state]; };
  for (std::size_t start = 0; start < chunk.have; start += kBlock) {
    const std::size_t n = least(kBlock, chunk.have - start);
    Byte bins[kBlock] = {};
    for (std::size_t i = 0; i < n; ++i) bins[i] = bin_of<Kind>(base[start + i], shift);
    contexts.find(bins, n, at);
    if (!read_symbols(streams, find, n, symbols)) return EntropyStatus::stream;
    apply_block<Kind>(symbols, meanings, open, n, base + start, out + start);
  }
  if (chunk.have < chunk.n) return EntropyStatus::ok;
  return ended(streams) && open.ended() ? EntropyStatus::ok : EntropyStatus::stream;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
