// Applies chunks of delta_exact to a base. The bytes are untrusted: every size is checked against the remaining bytes,
// every position against the chunk. `out` may be the base.
#include "kernels/delta_dense_read.h"
#include "kernels/entropy_huffman_read.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

template <class Word>
inline void copy_words(const Byte* from, std::size_t n, Word* to) {
  if constexpr (std::endian::native == std::endian::little)
    std::memcpy(to, from, n * sizeof(Word));
  else
    for (std::size_t i = 0; i < n; ++i) to[i] = load_le<Word>(from + i * sizeof(Word));
}

EntropyStatus read_plane(Chunk& chunk, std::size_t n, Byte* room, const Byte*& plane) {
  if (chunk.remaining() < 1) return EntropyStatus::chunk;
  const Byte mode = *chunk.p++;
  plane = room;
  if (mode == kPlaneHuffman) return read_huffman(chunk.p, chunk.end, n, room);
  if (mode > kPlaneConstant || chunk.remaining() < (mode == kPlaneRaw ? n : 1)) return EntropyStatus::chunk;
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

// Moves `at` to the next change; returns false if no gaps are left or they lead out of the chunk.
inline bool next_change(Gaps& gaps, std::size_t n, std::size_t& index) {
  for (;;) {
    if (gaps.p == gaps.end) return false;
    const std::size_t gap = *gaps.p++;
    index += gap;
    if (index >= n) return false;
    if (gap != kFarGap) return true;
  }
}

template <class Element>
EntropyStatus apply_sparse(Chunk& chunk, const typename Element::Word* base, typename Element::Word* out,
                           const Room& room) {
  using Word = typename Element::Word;
  if (chunk.remaining() < 6) return EntropyStatus::chunk;
  const std::size_t changes = load_u24(chunk.p), count = load_u24(chunk.p + 3);
  chunk.p += 6;
  if (changes < 1 || changes > chunk.n || count < changes || count > changes + chunk.n / kFarGap) return EntropyStatus::chunk;
  const Byte *gap_plane = nullptr, *planes[sizeof(Word)] = {};
  EntropyStatus status = read_plane(chunk, count, room.gaps, gap_plane);
  for (std::size_t k = 0; k < sizeof(Word) && status == EntropyStatus::ok; ++k)
    status = read_plane(chunk, changes, room.planes + k * chunk.n, planes[k]);
  if (status != EntropyStatus::ok) return status;
  if (chunk.remaining()) return EntropyStatus::chunk;
  if (out != base) std::memcpy(out, base, chunk.have * sizeof(Word));
  Gaps gaps{gap_plane, gap_plane + count};
  std::size_t index = 0;
  for (std::size_t i = 0; i < changes; ++i, ++index) {
    if (!next_change(gaps, chunk.n, index)) return EntropyStatus::stream;
    if (index >= chunk.have) return EntropyStatus::ok;
    Word difference = 0;
    for (std::size_t k = 0; k < sizeof(Word); ++k)
      difference = static_cast<Word>(difference | static_cast<Word>(planes[k][i]) << (8 * (sizeof(Word) - 1 - k)));
    out[index] = Element::applied(base[index], difference);
  }
  return gaps.p == gaps.end ? EntropyStatus::ok : EntropyStatus::stream;
}

template <class Element>
EntropyStatus apply_chunk(Chunk chunk, int shift, const typename Element::Word* base, typename Element::Word* out,
                          const Room& room) {
  using Word = typename Element::Word;
  if (chunk.remaining() < 1) return EntropyStatus::chunk;
  switch (*chunk.p++) {
    case kSame:
      if (chunk.remaining()) return EntropyStatus::chunk;
      if (out != base) std::memcpy(out, base, chunk.have * sizeof(Word));
      return EntropyStatus::ok;
    case kWhole:
      if (chunk.remaining() != chunk.n * sizeof(Word)) return EntropyStatus::chunk;
      copy_words(chunk.p, chunk.have, out);
      return EntropyStatus::ok;
    case kSparse:
      return apply_sparse<Element>(chunk, base, out, room);
    case kDense:
      return apply_dense<Element, TabledSymbols>(chunk, shift, base, out, room);
    case kDenseRans:
      return apply_dense<Element, RangedSymbols>(chunk, shift, base, out, room);
    default:
      return EntropyStatus::chunk;
  }
}

template <class Element>
EntropyStatus apply_chunks(const Byte* data, std::size_t size, const std::uint32_t* sizes, const DeltaShape& shape,
                           const typename Element::Word* base, typename Element::Word* out, const Room& room,
                           std::size_t* bad) {
  std::size_t index = 0;
  for (std::size_t start = 0; start < shape.count; start += shape.chunk, ++index) {
    const std::size_t have = min_of(shape.chunk, shape.count - start);
    const std::size_t n = start + have == shape.count ? shape.last : shape.chunk;
    *bad = index;
    if (sizes[index] > size) return EntropyStatus::chunk;
    const EntropyStatus status = apply_chunk<Element>({data, data + sizes[index], n, have}, shape.element.shift,
                                                      base + start, out + start, room);
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
  room.slots = reinterpret_cast<std::uint32_t*>(room.tables);
  return with_kind(shape.element, [&](auto type) {
    using Element = decltype(type);
    using Word = typename Element::Word;
    return apply_chunks<Element>(data, size, sizes, shape, static_cast<const Word*>(base), static_cast<Word*>(out),
                                 room, bad);
  });
}

}  // namespace ingot::INGOT_ISA
