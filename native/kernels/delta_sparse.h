// Encodes chunks with few changed elements: gaps and differences as byte planes. Once per instruction set.
#pragma once
#include "kernels/delta.h"
#include "kernels/entropy_huffman.h"

namespace ingot::INGOT_ISA {
namespace {

struct SparsePlane {
  const Byte* values;
  std::size_t count;
  Byte mode;
  std::size_t bytes;  // of the payload
  HuffmanPlan huffman;
};

struct SparsePlan {
  std::size_t changes;
  std::size_t planes;
  std::size_t bytes;  // bytes of the chunk, mode included
  SparsePlane plane[9];
};

// Finds the positions of differing words; returns their number, or any number above `most` if there are more. Runs of
// equal words are skipped 64 bytes at a time.
template <class Word>
inline std::size_t find_changes(const Word* base, const Word* tuned, std::size_t n, std::size_t limit,
                                std::uint32_t* index) {
  constexpr std::size_t run = 64 / sizeof(Word);
  std::size_t result = 0;
  for (std::size_t start = 0; start < n && result <= limit; start += run) {
    const std::size_t stop = min_of(start + run, n);
    if (stop - start == run && std::memcmp(base + start, tuned + start, 64) == 0) continue;
    for (std::size_t i = start; i < stop; ++i) {
      index[result] = static_cast<std::uint32_t>(i);  // overwritten by the next word unless the words differ
      result += base[i] != tuned[i];
    }
  }
  return result;
}

inline std::size_t write_gaps(const std::uint32_t* index, std::size_t changes, Byte* gaps) {
  Byte* p = gaps;
  std::size_t next = 0;
  for (std::size_t i = 0; i < changes; ++i) {
    std::size_t gap = index[i] - next;
    for (; gap >= kFarGap; gap -= kFarGap) *p++ = kFarGap;
    *p++ = static_cast<Byte>(gap);
    next = index[i] + std::size_t{1};
  }
  return static_cast<std::size_t>(p - gaps);
}

inline void plan_plane(const Byte* values, std::size_t count, Counts& counts, SparsePlane& plane) {
  plane.values = values;
  plane.count = count;
  count_plane(values, count, nullptr, counts);
  plane.mode = kPlaneConstant;
  plane.bytes = 1;
  if (counts.all[values[0]] == count) return;
  plan_huffman(counts, plane.huffman);
  const bool pays = plane.huffman.bytes < count;
  plane.mode = pays ? kPlaneHuffman : kPlaneRaw;
  plane.bytes = pays ? plane.huffman.bytes : count;
}

// Plans a chunk with at least one change: gaps first, then the bytes of the differences, highest first.
template <class Element>
inline void plan_sparse(const typename Element::Word* base, const typename Element::Word* tuned,
                        const std::uint32_t* index, std::size_t changes, Byte* gaps, Byte* planes, SparsePlan& plan) {
  using Word = typename Element::Word;
  Counts counts;
  plan.changes = changes;
  plan.planes = 1 + sizeof(Word);
  plan_plane(gaps, write_gaps(index, changes, gaps), counts, plan.plane[0]);
  for (std::size_t i = 0; i < changes; ++i) {
    const Word difference = Element::difference(base[index[i]], tuned[index[i]]);
    for (std::size_t k = 0; k < sizeof(Word); ++k)
      planes[k * changes + i] = static_cast<Byte>(difference >> (8 * (sizeof(Word) - 1 - k)));
  }
  for (std::size_t k = 0; k < sizeof(Word); ++k) plan_plane(planes + k * changes, changes, counts, plan.plane[k + 1]);
  plan.bytes = 7;
  for (std::size_t k = 0; k < plan.planes; ++k) plan.bytes += 1 + plan.plane[k].bytes;
}

// Writes a planned chunk; exactly plan.bytes.
inline Byte* write_sparse(const SparsePlan& plan, Byte* p) {
  *p = kSparse;
  store_u24(p + 1, plan.changes);
  store_u24(p + 4, plan.plane[0].count);
  p += 7;
  for (std::size_t k = 0; k < plan.planes; ++k) {
    const SparsePlane& plane = plan.plane[k];
    *p++ = plane.mode;
    if (plane.mode == kPlaneHuffman)
      write_huffman(plane.values, plane.count, plane.huffman, p);
    else
      std::memcpy(p, plane.values, plane.bytes);
    p += plane.bytes;
  }
  return p;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
