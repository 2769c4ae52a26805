// Decodes chunks of float_entropy. The bytes are untrusted: every size is checked against the remaining bytes.
#include "kernels/entropy_huffman_read.h"
#include "kernels/entropy_planes.h"
#include "kernels/entropy_rans_read.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPiece = 4096;          // bytes of elements that are joined at a time
constexpr std::size_t kAhead = 1536;          // bytes of a raw plane to prefetch
// Results of this size are evicted from the second-level cache before they are complete.
constexpr std::size_t kStreamed = 1u << 20;

// The planes of a chunk while they are combined to elements.
struct Planes {
  const Byte* planes_at[8];
  Byte* room[8];
  std::size_t width;
  bool past_caches;
  Byte* out;

  // Combines elements `start` to `stop`.
  void join(std::size_t start, std::size_t stop) const {
    const Byte* from[8];
    alignas(kLine) Byte chunk[kPiece];
#if defined(__AVX2__)
    if (width == 2) {
      const Byte* const two[] = {planes_at[0] + start, planes_at[1] + start};
      if (past_caches) return join_in_two<true>(two, stop - start, out + 2 * start);
      return join_in_two<false>(two, stop - start, out + 2 * start);
    }
#endif
    while (start < stop) {
      const std::size_t n = past_caches ? min_of(stop - start, kPiece / width) : stop - start;
      for (std::size_t k = 0; k < width; ++k) from[k] = planes_at[k] + start;
      if (past_caches) {
        join_values(from, width, n, chunk);
        copy_past_caches(out + start * width, chunk, n * width);
      } else {
        join_values(from, width, n, out + start * width);
      }
      start += n;
    }
  }

  // Returns how far elements can be combined if planes are complete before `stop`: to a multiple of kLine elements in
  // memory. It is called for every stream of every batch, where a division would take too long.
  std::size_t whole_lines(std::size_t start, std::size_t stop) const {
    const std::size_t over = (reinterpret_cast<std::uintptr_t>(out + stop * width) >> std::countr_zero(width)) % kLine;
    return stop - start < over ? start : stop - over;
  }

  // Prefetches the parts of the second and later planes for the next elements.
  void look_ahead(std::size_t start, std::size_t stop, std::size_t n) const {
#if defined(__GNUC__)
    for (std::size_t k = 1; k < width; ++k)
      for (std::size_t i = start + kAhead; i < min_of(stop + kAhead, n); i += kLine)
        __builtin_prefetch(planes_at[k] + i);
#endif
  }
};

// The header of a coded first plane, or of the first two, before streams are decoded.
struct First {
  Byte mode;
  HuffmanPlane huffman;
  const Byte* six;
  AnsStream streams[kStreams];
  union {  // in memory of the caller's: threads may have small stacks
    AnsTable<> table;
    RansPlane rans;
  };

  bool joint() const { return mode == kJoint || mode == kJointRans; }
  bool coded() const { return mode == kHuffman || mode == kAns || mode == kRans || joint(); }
};

// Scratch memory for the tables of the other planes.
union Tables {
  AnsTable<> ans;
  RansPlane rans;
};

void put_bytes(const std::uint16_t* __restrict symbols, std::size_t n, Byte* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<Byte>(symbols[i]);
}

void split_pairs(const std::uint16_t* __restrict pairs, std::size_t n, Byte* __restrict high, Byte* __restrict low) {
  for (std::size_t i = 0; i < n; ++i) {
    high[i] = static_cast<Byte>(pairs[i] >> 8);
    low[i] = static_cast<Byte>(pairs[i]);
  }
}

EntropyStatus open_first(const Byte*& p, const Byte* end, std::size_t n, Byte* room, First& first) {
  if (first.mode == kHuffman) return open_huffman(p, end, n, room, first.huffman);
  std::size_t values = 256;
  if (first.joint()) {
    const std::size_t sixes = six_bytes(n);
    if (static_cast<std::size_t>(end - p) < sixes) return EntropyStatus::chunk;
    first.six = p;
    p += sixes;
    values = kSymbols;
  }
  if (first.mode == kRans || first.mode == kJointRans) return open_rans(p, end, values, n, first.rans);
  return open_ans(p, end, values, first.table, first.streams);
}

EntropyStatus read_plane(Byte mode, const Byte*& p, const Byte* end, std::size_t n, Tables& tables, Byte* room,
                         const Byte*& plane) {
  const std::size_t remaining = static_cast<std::size_t>(end - p);
  const auto put = [room](std::size_t start, const std::uint16_t* symbols, std::size_t count) { put_bytes(symbols, count, room + start); };
  plane = room;
  switch (mode) {
    case kRaw:
      if (remaining < n) return EntropyStatus::chunk;
      plane = p;
      p += n;
      return EntropyStatus::ok;
    case kConstant:
      if (remaining < 1) return EntropyStatus::chunk;
      std::memset(room, *p++, n);
      return EntropyStatus::ok;
    case kHuffman:
      return read_huffman(p, end, n, room);
    case kAns: {
      AnsStream streams[kStreams];
      const EntropyStatus status = open_ans(p, end, 256, tables.ans, streams);
      return status == EntropyStatus::ok ? decode_ans(tables.ans, streams, n, put) : status;
    }
    case kRans: {
      const EntropyStatus status = open_rans(p, end, 256, n, tables.rans);
      return status == EntropyStatus::ok ? decode_rans(tables.rans, n, put) : status;
    }
    default:
      return EntropyStatus::chunk;
  }
}

// Decodes the opened plane and combines all planes.
EntropyStatus decode_first(First& first, std::size_t n, const Planes& planes) {
  Byte* const top = planes.room[0];
  if (first.mode == kHuffman)
    return decode_huffman(first.huffman, [&](const Byte* from, const Byte* to, bool last) {
      const std::size_t start = static_cast<std::size_t>(from - top), found = static_cast<std::size_t>(to - top);
      const std::size_t stop = last ? found : planes.whole_lines(start, found);
      planes.look_ahead(start, stop, n);
      planes.join(start, stop);
      return static_cast<const Byte*>(top + stop);
    });
  const auto put_plane = [&](std::size_t start, const std::uint16_t* symbols, std::size_t count) {
    put_bytes(symbols, count, top + start);
    planes.look_ahead(start, start + count, n);
    planes.join(start, start + count);
  };
  const auto put_both = [&](std::size_t start, const std::uint16_t* symbols, std::size_t count) {
    alignas(kLine) std::uint16_t both[kSixBlock];
    join_six(first.six + start / 4 * 3, symbols, count, both);
    if (planes.width == 2) {
      for (std::size_t i = 0; i < count; ++i) both[i] = rotated_right(both[i]);
      Byte* const out = planes.out + 2 * start;
      if (planes.past_caches)
        copy_past_caches(out, reinterpret_cast<const Byte*>(both), 2 * count);
      else
        std::memcpy(out, both, 2 * count);
      return;
    }
    split_pairs(both, count, planes.room[0] + start, planes.room[1] + start);
    planes.look_ahead(start, start + count, n);
    planes.join(start, start + count);
  };
  switch (first.mode) {
    case kAns: return decode_ans(first.table, first.streams, n, put_plane);
    case kRans: return decode_rans(first.rans, n, put_plane);
    case kJoint: return decode_ans(first.table, first.streams, n, put_both);
    default: return decode_rans(first.rans, n, put_both);
  }
}

// A coded first plane is decoded last, and combined with the others run by run, while its values are in the first-level
// cache.
EntropyStatus decode_chunk(const Byte* p, std::size_t size, std::size_t n, First& first, Tables& tables, Planes& planes) {
  const std::size_t width = planes.width;
  const Byte* const end = p + size;
  if (size < width) return EntropyStatus::chunk;
  const Byte* const modes = p;
  p += width;
  first.mode = modes[0];
  for (std::size_t k = 0; k < width; ++k) {
    EntropyStatus status;
    if (k == 0 && first.coded()) {
      if (first.joint() && (width < 2 || modes[1] != modes[0])) return EntropyStatus::chunk;
      planes.planes_at[0] = planes.room[0];
      status = open_first(p, end, n, planes.room[0], first);
      if (first.joint()) planes.planes_at[++k] = planes.room[1];
    } else {
      status = read_plane(modes[k], p, end, n, tables, planes.room[k], planes.planes_at[k]);
    }
    if (status != EntropyStatus::ok) return status;
  }
  if (p != end) return EntropyStatus::chunk;
  if (first.coded()) return decode_first(first, n, planes);
  planes.join(0, n);
  return EntropyStatus::ok;
}

}  // namespace

EntropyStatus entropy_decode(const std::uint8_t* data, std::size_t size, const std::uint32_t* sizes, const EntropyShape& shape,
                             void* out, std::uint8_t* scratch, std::size_t* bad) {
  Planes planes;
  planes.width = shape.width;
  planes.past_caches = shape.count * shape.width >= kStreamed;
  for (std::size_t k = 0; k < shape.width; ++k) planes.room[k] = scratch + k * shape.chunk;
  First first;
  Tables tables;
  EntropyStatus status = EntropyStatus::ok;
  std::size_t index = 0;
  for (std::size_t start = 0; start < shape.count; start += shape.chunk, ++index) {
    const std::size_t n = min_of(shape.chunk, shape.count - start);
    planes.out = static_cast<Byte*>(out) + start * shape.width;
    status = sizes[index] > size ? EntropyStatus::chunk : decode_chunk(data, sizes[index], n, first, tables, planes);
    if (status != EntropyStatus::ok) break;
    data += sizes[index];
    size -= sizes[index];
  }
  finish_copies();
  *bad = index;
  return status == EntropyStatus::ok && size != 0 ? EntropyStatus::chunk : status;
}

}  // namespace ingot::INGOT_ISA
