// Applies chunks of delta_exact to a base. Nothing here trusts the bytes: every size is checked against what is left, every
// position against the chunk. `out` may be the base itself.
#include "kernels/delta.h"
#include "kernels/entropy_huffman.h"
#include "kernels/entropy_ans.h"
#include "kernels/kernels.h"

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

template <class Word>
inline void copy_words(const Byte* from, std::size_t n, Word* to) {
  if constexpr (std::endian::native == std::endian::little)
    std::memcpy(to, from, n * sizeof(Word));
  else
    for (std::size_t i = 0; i < n; ++i) to[i] = load_le<Word>(from + i * sizeof(Word));
}

EntropyStatus read_plane(Chunk& chunk, std::size_t n, Byte* room, const Byte*& plane) {
  if (chunk.left() < 1) return EntropyStatus::chunk;
  const Byte mode = *chunk.p++;
  plane = room;
  if (mode == kPlaneHuffman) return read_huffman(chunk.p, chunk.end, n, room);
  if (mode > kPlaneConstant || chunk.left() < (mode == kPlaneRaw ? n : 1)) return EntropyStatus::chunk;
  if (mode == kPlaneConstant) {
    std::memset(room, *chunk.p++, n);
  } else {
    plane = chunk.p;
    chunk.p += n;
  }
  return EntropyStatus::ok;
}

struct Gaps {
  const Byte* p;
  const Byte* end;
};

// Moves `at` to the next change; false where the gaps are used up or lead out of the chunk.
inline bool next_change(Gaps& gaps, std::size_t n, std::size_t& at) {
  for (;;) {
    if (gaps.p == gaps.end) return false;
    const std::size_t gap = *gaps.p++;
    at += gap;
    if (at >= n) return false;
    if (gap != kFarGap) return true;
  }
}

template <class Kind>
EntropyStatus apply_sparse(Chunk& chunk, const typename Kind::Word* base, typename Kind::Word* out, const Room& room) {
  using Word = typename Kind::Word;
  if (chunk.left() < 6) return EntropyStatus::chunk;
  const std::size_t changes = load_u24(chunk.p), count = load_u24(chunk.p + 3);
  chunk.p += 6;
  if (changes < 1 || changes > chunk.n || count < changes || count > changes + chunk.n / kFarGap) return EntropyStatus::chunk;
  const Byte *gap_plane = nullptr, *planes[sizeof(Word)] = {};
  EntropyStatus status = read_plane(chunk, count, room.gaps, gap_plane);
  for (std::size_t k = 0; k < sizeof(Word) && status == EntropyStatus::ok; ++k)
    status = read_plane(chunk, changes, room.planes + k * chunk.n, planes[k]);
  if (status != EntropyStatus::ok) return status;
  if (chunk.left()) return EntropyStatus::chunk;
  if (out != base) std::memcpy(out, base, chunk.have * sizeof(Word));
  Gaps gaps{gap_plane, gap_plane + count};
  std::size_t at = 0;
  for (std::size_t i = 0; i < changes; ++i, ++at) {
    if (!next_change(gaps, chunk.n, at)) return EntropyStatus::stream;
    if (at >= chunk.have) return EntropyStatus::ok;
    Word difference = 0;
    for (std::size_t k = 0; k < sizeof(Word); ++k)
      difference = static_cast<Word>(difference | static_cast<Word>(planes[k][i]) << (8 * (sizeof(Word) - 1 - k)));
    out[at] = Kind::applied(base[at], difference);
  }
  return gaps.p == gaps.end ? EntropyStatus::ok : EntropyStatus::stream;
}

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

// Reads how bins are grouped and each group's table. `offsets[bin]` becomes where the table of the bin begins.
bool read_contexts(Chunk& chunk, std::size_t symbols, Table* tables, std::uint16_t* offsets) {
  if (chunk.left() < 1) return false;
  const std::size_t more = *chunk.p++;
  if (more >= kDeltaContexts || chunk.left() < more) return false;
  std::size_t bin = 0;
  for (std::size_t k = 0; k <= more; ++k) {
    const std::size_t stop = k < more ? chunk.p[k] : kDeltaBins;
    if (stop <= bin) return false;
    for (; bin < stop; ++bin) offsets[bin] = static_cast<std::uint16_t>(k * kDeltaScale);
  }
  chunk.p += more;
  for (std::size_t k = 0; k <= more; ++k)
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

template <class Kind>
inline void apply_block(const std::uint16_t* symbols, const Meanings<Kind>& meanings, OpenBits& open, std::size_t n,
                        const typename Kind::Word* base, typename Kind::Word* out) {
  typename Kind::Word differences[kBlock];
  if (open.has(n * Kind::kBits))
    read_differences<Kind, true>(symbols, meanings, open, n, differences);
  else
    read_differences<Kind, false>(symbols, meanings, open, n, differences);
  for (std::size_t i = 0; i < n; ++i) out[i] = Kind::applied(base[i], differences[i]);
}

template <class Kind>
EntropyStatus apply_dense(Chunk& chunk, int shift, const typename Kind::Word* base, typename Kind::Word* out, const Room& room) {
  std::uint16_t offsets[kDeltaBins];
  if (!read_contexts(chunk, kSymbolsOf<Kind>, room.tables, offsets)) return EntropyStatus::table;
  AnsStream streams[kStreams];
  if (!read_heads<kDeltaScaleBits>(chunk.p, chunk.end, streams)) return EntropyStatus::stream;
  Byte few[8] = {};
  if (chunk.left() < 8) std::memcpy(few, chunk.p, chunk.left());
  OpenBits open{chunk.left() < 8 ? few : chunk.p, chunk.left(), 0};
  const Meanings<Kind> meanings;
  alignas(64) std::uint16_t symbols[kBlock], at[kBlock];
  const std::uint32_t* const entries = room.tables->entries;
  const auto find = [entries, &at](std::size_t i, std::uint64_t state) { return entries[at[i] + state]; };
  for (std::size_t start = 0; start < chunk.have; start += kBlock) {
    const std::size_t n = least(kBlock, chunk.have - start);
    Byte bins[kBlock];
    for (std::size_t i = 0; i < n; ++i) bins[i] = bin_of<Kind>(base[start + i], shift);
    for (std::size_t i = 0; i < n; ++i) at[i] = offsets[bins[i]];
    if (!read_symbols(streams, find, n, symbols)) return EntropyStatus::stream;
    apply_block<Kind>(symbols, meanings, open, n, base + start, out + start);
  }
  if (chunk.have < chunk.n) return EntropyStatus::ok;
  return ended(streams) && open.ended() ? EntropyStatus::ok : EntropyStatus::stream;
}

template <class Kind>
EntropyStatus apply_chunk(Chunk chunk, int shift, const typename Kind::Word* base, typename Kind::Word* out, const Room& room) {
  using Word = typename Kind::Word;
  if (chunk.left() < 1) return EntropyStatus::chunk;
  switch (*chunk.p++) {
    case kSame:
      if (chunk.left()) return EntropyStatus::chunk;
      if (out != base) std::memcpy(out, base, chunk.have * sizeof(Word));
      return EntropyStatus::ok;
    case kWhole:
      if (chunk.left() != chunk.n * sizeof(Word)) return EntropyStatus::chunk;
      copy_words(chunk.p, chunk.have, out);
      return EntropyStatus::ok;
    case kSparse:
      return apply_sparse<Kind>(chunk, base, out, room);
    case kDense:
      return apply_dense<Kind>(chunk, shift, base, out, room);
    default:
      return EntropyStatus::chunk;
  }
}

template <class Kind>
EntropyStatus apply_chunks(const Byte* data, std::size_t size, const std::uint32_t* sizes, const DeltaShape& shape,
                           const typename Kind::Word* base, typename Kind::Word* out, const Room& room, std::size_t* bad) {
  std::size_t index = 0;
  for (std::size_t start = 0; start < shape.count; start += shape.chunk, ++index) {
    const std::size_t have = least(shape.chunk, shape.count - start);
    const std::size_t n = start + have == shape.count ? shape.last : shape.chunk;
    *bad = index;
    if (sizes[index] > size) return EntropyStatus::chunk;
    const EntropyStatus status =
        apply_chunk<Kind>({data, data + sizes[index], n, have}, shape.element.shift, base + start, out + start, room);
    if (status != EntropyStatus::ok) return status;
    data += sizes[index];
    size -= sizes[index];
  }
  *bad = index;
  return size == 0 ? EntropyStatus::ok : EntropyStatus::chunk;
}

}  // namespace

EntropyStatus delta_apply(const std::uint8_t* data, std::size_t size, const std::uint32_t* sizes, const DeltaShape& shape,
                          const void* base, void* out, std::uint8_t* scratch, std::size_t* bad) {
  Room room;
  room.gaps = take<Byte>(scratch, delta_gaps(shape.chunk));
  room.planes = take<Byte>(scratch, shape.element.width * shape.chunk);
  room.tables = take<Table>(scratch, kDeltaContexts);
  return with_kind(shape.element, [&](auto kind) {
    using Kind = decltype(kind);
    using Word = typename Kind::Word;
    return apply_chunks<Kind>(data, size, sizes, shape, static_cast<const Word*>(base), static_cast<Word*>(out), room, bad);
  });
}

}  // namespace ingot::INGOT_ISA
