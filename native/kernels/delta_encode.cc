// Encodes chunks of delta_exact: finds the changes, chooses the smallest encoding, writes it. Choices depend on the
// values only.
#include <memory>

#include "kernels/delta_dense.h"
#include "kernels/delta_sparse.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

struct Work {
  std::uint32_t* changed;
  Byte* gaps;
  Byte* planes;
  SparsePlan sparse;
  DensePlan densely;
  DenseWork dense;
  Coders coders;
};

template <class Word>
inline Byte* write_whole(const Word* tuned, std::size_t n, Byte* p) {
  *p++ = kWhole;
  if constexpr (std::endian::native == std::endian::little)
    std::memcpy(p, tuned, n * sizeof(Word));
  else
    for (std::size_t i = 0; i < n; ++i) store_le<Word>(p + i * sizeof(Word), tuned[i]);
  return p + n * sizeof(Word);
}

// Encodes a chunk of n elements to at most 1 + n * sizeof(Word) bytes; returns the end. Few changes are coded sparsely,
// many densely; if both are possible, dense coding must save a sixteenth, because it is ten times slower to apply.
template <class Element>
Byte* encode_chunk(const typename Element::Word* base, const typename Element::Word* tuned, std::size_t n, int shift,
                   Work& work, Byte* p) {
  const std::size_t changes = find_changes(base, tuned, n, n / 2, work.changed);
  if (changes == 0) {
    *p = kSame;
    return p + 1;
  }
  const std::size_t full = 1 + n * sizeof(typename Element::Word);
  std::size_t sparse = full, dense = full;
  if (changes <= n / 2) {
    plan_sparse<Element>(base, tuned, work.changed, changes, work.gaps, work.planes, work.sparse);
    sparse = work.sparse.bytes;
  }
  if (changes > n / 16) {
    plan_dense<Element>(base, tuned, n, shift, work.dense, work.densely);
    dense = work.densely.bytes;
  }
  if (dense + (sparse < full ? dense / 16 : 0) < sparse)
    if (Byte* const end = write_dense<Element>(work.densely, n, work.dense, work.coders, p, p + full - 1)) return end;
  return sparse < full ? write_sparse(work.sparse, p) : write_whole(tuned, n, p);
}

}  // namespace

std::size_t delta_encode(const void* base, const void* tuned, const DeltaShape& shape, std::uint8_t* out, std::uint32_t* sizes,
                         std::uint8_t* scratch) {
  const std::unique_ptr<Work> work(new Work);
  const std::size_t chunk = shape.chunk, width = shape.element.width;
  work->changed = take<std::uint32_t>(scratch, chunk);
  work->gaps = take<Byte>(scratch, delta_gaps(chunk));
  work->planes = take<Byte>(scratch, width * chunk);
  work->dense.differences = take<Byte>(scratch, width * chunk);
  work->dense.symbols = take<std::uint16_t>(scratch, chunk);
  work->dense.placed = take<std::uint16_t>(scratch, chunk);
  work->dense.bins = take<Byte>(scratch, chunk);
  work->dense.room = take<Byte>(scratch, 2 * chunk + 1024);
  work->dense.counts = take<std::uint32_t>(scratch, kDeltaBins * kDeltaSymbols);
  return with_kind(shape.element, [&](auto type) {
    using Element = decltype(type);
    using Word = typename Element::Word;
    const Word *from = static_cast<const Word*>(base), *to = static_cast<const Word*>(tuned);
    Byte* p = out;
    for (std::size_t start = 0; start < shape.count; start += chunk) {
      const std::size_t n = min_of(chunk, shape.count - start);
      Byte* const end = encode_chunk<Element>(from + start, to + start, n, shape.element.shift, *work, p);
      *sizes++ = static_cast<std::uint32_t>(end - p);
      p = end;
    }
    return static_cast<std::size_t>(p - out);
  });
}

}  // namespace ingot::INGOT_ISA
