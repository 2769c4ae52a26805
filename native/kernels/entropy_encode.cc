// Encodes chunks of float_entropy: splits the planes, counts, chooses an encoding for each, writes. Choices depend on
// the values only.
#include "kernels/entropy_huffman.h"
#include "kernels/entropy_planes.h"
#include "kernels/entropy_rans.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kSampleLeast = 4096;  // shorter planes are counted completely
constexpr std::size_t kSampleRun = 256;     // one of every sixteen such runs is sampled

// Returns whether a sample of one run in sixteen shows that coding saves at least one part in `part`.
bool promises(const Byte* plane, std::size_t n, std::size_t part) {
  if (n < kSampleLeast) return true;
  // Neighbours are often equal: several counters avoid waiting for the previous increment.
  std::uint32_t counts[4][256] = {};
  std::size_t seen = 0;
  for (std::size_t start = 0; start + kSampleRun <= n; start += 16 * kSampleRun, seen += kSampleRun)
    for (std::size_t i = 0; i < kSampleRun; i += 4)
#pragma GCC unroll 4
      for (std::size_t k = 0; k < 4; ++k) ++counts[k][plane[start + i + k]];
  for (std::size_t value = 0; value < 256; ++value)
    counts[0][value] += counts[1][value] + counts[2][value] + counts[3][value];
  return ideal_bytes(counts[0], 256) <= seen - seen / part;
}

using Coder = RansCoder<kRansBits, kSymbols>;

struct Joint {
  std::uint16_t* symbols;
  std::uint32_t counts[kSymbols];
  AnsPlan plan;
  bool rans;
};

struct Work {
  Byte* planes[8];
  Byte* room;
  Counts counts;
  HuffmanPlan huffman;
  AnsPlan ans;
  Joint joint;
  Coder coder;
};

struct Chosen {
  Byte mode;
  std::size_t bytes;  // bytes of the payload; an estimate for ANS and rANS
};

std::size_t distinct(const std::uint32_t* counts, std::size_t values) {
  std::size_t result = 0;
  for (std::size_t value = 0; value < values; ++value) result += counts[value] != 0;
  return result;
}

std::size_t ans_bytes(const AnsPlan& plan, const std::uint32_t* counts, std::size_t values) {
  return plan.table_bytes + 5 * kStreams + ideal_bytes(counts, values);
}

std::size_t rans_bytes(const AnsPlan& plan, const std::uint32_t* counts) {
  return plan.table_bytes + kRansHead + coded_bytes<kRansBits>(counts, plan);
}

// Returns whether the planes that `max` codes with ANS are coded with rANS: in chunks that its larger head does not
// increase, with few symbols.
bool by_rans(const std::uint32_t* counts, std::size_t values, std::size_t n) {
  return n >= kRansElements && distinct(counts, values) <= kRansChosen;
}

// Chooses among raw, constant, Huffman and (for `max`) ANS or rANS; stores the plans in `work`.
Chosen choose_plane(const Byte* plane, std::size_t n, bool max, bool sampled, Work& work) {
  const std::size_t part = max ? 64 : 16;
  if (sampled && !promises(plane, n, part)) return {kRaw, n};
  count_plane(plane, n, work.room, work.counts);
  if (work.counts.all[plane[0]] == n) return {kConstant, 1};
  plan_huffman(work.counts, work.huffman);
  Chosen best{kRaw, n};
  if (work.huffman.bytes < n - (sampled ? n / part : 0)) best = {kHuffman, work.huffman.bytes};
  if (!max) return best;
  const bool rans = by_rans(work.counts.all, 256, n);
  if (rans)
    plan_ans<kRansBits>(work.counts.all, 256, work.ans);
  else
    plan_ans(work.counts.all, 256, work.ans);
  const std::size_t bytes = rans ? rans_bytes(work.ans, work.counts.all) : ans_bytes(work.ans, work.counts.all, 256);
  return bytes < best.bytes - (sampled && best.mode == kRaw ? n / part : 0) ? Chosen{rans ? kRans : kAns, bytes} : best;
}

// Writes table, states and words of n symbols; returns null if that would pass `end`.
Byte* write_ranges(const AnsPlan& plan, const std::uint16_t* symbols, std::size_t n, Work& work, Byte* p, const Byte* end) {
  if (static_cast<std::size_t>(end - p) < plan.table_bytes) return nullptr;
  work.coder.fill(plan);
  return write_rans(symbols, n, work.coder, work.room, write_frequencies(plan, p), end);
}

// Writes a chosen plane and returns its end; an ANS or rANS plane that is larger than raw becomes raw.
Byte* write_plane(const Byte* plane, std::size_t n, Chosen& chosen, Work& work, Byte* p) {
  if (chosen.mode == kAns) {
    Byte* const end = write_ans(work.ans, n, work.room, p, p + n, [plane](std::size_t i) { return plane[i]; });
    if (end) return end;
    chosen.mode = kRaw;
  }
  if (chosen.mode == kRans) {
    std::uint16_t* const symbols = work.joint.symbols;
    for (std::size_t i = 0; i < n; ++i) symbols[i] = plane[i];
    Byte* const end = write_ranges(work.ans, symbols, n, work, p, p + n);
    if (end) return end;
    chosen.mode = kRaw;
  }
  if (chosen.mode == kConstant) {
    *p = plane[0];
    return p + 1;
  }
  if (chosen.mode == kHuffman) {
    write_huffman(plane, n, work.huffman, p);
    return p + work.huffman.bytes;
  }
  std::memcpy(p, plane, n);
  return p + n;
}

// Returns the bytes of both upper planes if coded jointly, or 2 n if that is not possible.
std::size_t plan_joint(std::size_t n, Work& work) {
  const Byte* const __restrict top = work.planes[0];
  const Byte* const __restrict next = work.planes[1];
  std::uint16_t* const __restrict symbols = work.joint.symbols;
  for (std::size_t i = 0; i < n; ++i) symbols[i] = static_cast<std::uint16_t>(top[i] << 2 | next[i] >> 6);
  // Neighbours are often equal: several counters avoid waiting for the previous increment.
  std::uint32_t counts[4][kSymbols] = {};
  const std::size_t full = n / 4 * 4;
  for (std::size_t i = 0; i < full; i += 4)
    for (std::size_t k = 0; k < 4; ++k) ++counts[k][symbols[i + k]];
  for (std::size_t i = full; i < n; ++i) ++counts[0][symbols[i]];
  for (std::size_t value = 0; value < kSymbols; ++value)
    work.joint.counts[value] = counts[0][value] + counts[1][value] + counts[2][value] + counts[3][value];
  if (distinct(work.joint.counts, kSymbols) > kDistinct) return 2 * n;
  work.joint.rans = by_rans(work.joint.counts, kSymbols, n);
  if (work.joint.rans) {
    plan_ans<kRansBits>(work.joint.counts, kSymbols, work.joint.plan);
    return six_bytes(n) + rans_bytes(work.joint.plan, work.joint.counts);
  }
  plan_ans(work.joint.counts, kSymbols, work.joint.plan);
  return six_bytes(n) + ans_bytes(work.joint.plan, work.joint.counts, kSymbols);
}

// Returns the bytes of both upper planes if coded separately. If joint planes would use rANS, plane 0 does too: its
// counts are known.
std::size_t plan_apart(std::size_t n, Work& work) {
  const std::size_t next = choose_plane(work.planes[1], n, true, true, work).bytes;
  if (!work.joint.rans) return next + choose_plane(work.planes[0], n, true, false, work).bytes;
  std::uint32_t counts[256];
  const std::uint32_t* const joint = work.joint.counts;
  for (std::size_t value = 0; value < 256; ++value)
    counts[value] = joint[4 * value] + joint[4 * value + 1] + joint[4 * value + 2] + joint[4 * value + 3];
  plan_ans<kRansBits>(counts, 256, work.ans);
  return next + rans_bytes(work.ans, counts);
}

Byte* write_joint(std::size_t n, Work& work, Byte* p, const Byte* end) {
  const Byte* const next = work.planes[1];
  if (static_cast<std::size_t>(end - p) < six_bytes(n)) return nullptr;
  for (std::size_t start = 0; start < n; start += kSixBlock) {
    const std::size_t count = min_of(kSixBlock, n - start);
    pack_six(next + start, count, p);
    p += six_bytes(count);
  }
  const std::uint16_t* const symbols = work.joint.symbols;
  if (work.joint.rans) return write_ranges(work.joint.plan, symbols, n, work, p, end);
  return write_ans(work.joint.plan, n, work.room, p, end, [symbols](std::size_t i) { return std::size_t{symbols[i]}; });
}

// Encodes a chunk of n elements to at most width * (n + 1) bytes; returns their number.
std::size_t encode_chunk(const Byte* in, std::size_t width, std::size_t n, EntropyChoice how, Work& work, Byte* out) {
  split_values(in, width, n, work.planes);
  Byte* p = out + width;
  std::size_t k = 0;
  if (how.max && how.joint) {
    const std::size_t joint = plan_joint(n, work);
    Byte* const end = joint < 2 * n && joint < plan_apart(n, work) ? write_joint(n, work, p, p + 2 * n) : nullptr;
    if (end) {
      out[0] = out[1] = work.joint.rans ? kJointRans : kJoint;
      p = end;
      k = 2;
    }
  }
  for (; k < width; ++k) {
    Chosen chosen = choose_plane(work.planes[k], n, how.max, k != 0, work);
    p = write_plane(work.planes[k], n, chosen, work, p);
    out[k] = chosen.mode;
  }
  return static_cast<std::size_t>(p - out);
}

}  // namespace

std::size_t entropy_encode(const void* in, const EntropyShape& shape, EntropyChoice how, std::uint8_t* out,
                           std::uint32_t* sizes, std::uint8_t* scratch) {
  Work work;
  for (std::size_t k = 0; k < shape.width; ++k) work.planes[k] = scratch + 2 * shape.chunk + 512 + k * shape.chunk;
  work.room = scratch;
  work.joint.symbols = reinterpret_cast<std::uint16_t*>(scratch + 2 * shape.chunk + 512 + (shape.width * shape.chunk + 1) / 2 * 2);
  const Byte* source = static_cast<const Byte*>(in);
  Byte* p = out;
  for (std::size_t start = 0; start < shape.count; start += shape.chunk) {
    const std::size_t n = min_of(shape.chunk, shape.count - start);
    const std::size_t bytes = encode_chunk(source + start * shape.width, shape.width, n, how, work, p);
    *sizes++ = static_cast<std::uint32_t>(bytes);
    p += bytes;
  }
  return static_cast<std::size_t>(p - out);
}

}  // namespace ingot::INGOT_ISA
