// Decodes chunks of float_entropy. Nothing here trusts the bytes: every size is checked against what is left.
#include "kernels/entropy_huffman.h"
#include "kernels/entropy_planes.h"
#include "kernels/entropy_ans.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

struct Planes {
  const Byte* at[8];
  Byte* room[8];
};

EntropyStatus read_plane(Byte mode, const Byte*& p, const Byte* end, std::size_t n, AnsTable<>& table, Byte* room,
                         const Byte*& plane) {
  const std::size_t left = static_cast<std::size_t>(end - p);
  plane = room;
  switch (mode) {
    case kRaw:
      if (left < n) return EntropyStatus::chunk;
      plane = p;
      p += n;
      return EntropyStatus::ok;
    case kConstant:
      if (left < 1) return EntropyStatus::chunk;
      std::memset(room, *p++, n);
      return EntropyStatus::ok;
    case kHuffman:
      return read_huffman(p, end, n, room);
    case kAns:
      return read_ans(p, end, n, 256, table, [room](std::size_t start, const std::uint16_t* values, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) room[start + i] = static_cast<Byte>(values[i]);
      });
    default:
      return EntropyStatus::chunk;
  }
}

EntropyStatus read_joint(const Byte*& p, const Byte* end, std::size_t n, AnsTable<>& table, Byte* top, Byte* next) {
  const std::size_t sixes = six_bytes(n);
  if (static_cast<std::size_t>(end - p) < sixes) return EntropyStatus::chunk;
  const Byte* const six = p;
  p += sixes;
  return read_ans(p, end, n, kSymbols, table, [=](std::size_t start, const std::uint16_t* values, std::size_t count) {
    join_six(six + start / 4 * 3, values, count, top + start, next + start);
  });
}

EntropyStatus decode_chunk(const Byte* p, std::size_t size, std::size_t width, std::size_t n, AnsTable<>& table, Planes& planes,
                           Byte* out) {
  const Byte* const end = p + size;
  if (size < width) return EntropyStatus::chunk;
  const Byte* const modes = p;
  p += width;
  for (std::size_t k = 0; k < width; ++k) {
    EntropyStatus status;
    if (modes[k] == kJoint) {
      if (k != 0 || width < 2 || modes[1] != kJoint) return EntropyStatus::chunk;
      planes.at[0] = planes.room[0];
      planes.at[1] = planes.room[1];
      status = read_joint(p, end, n, table, planes.room[0], planes.room[1]);
      ++k;
    } else {
      status = read_plane(modes[k], p, end, n, table, planes.room[k], planes.at[k]);
    }
    if (status != EntropyStatus::ok) return status;
  }
  if (p != end) return EntropyStatus::chunk;
  join_values(planes.at, width, n, out);
  return EntropyStatus::ok;
}

}  // namespace

EntropyStatus entropy_decode(const std::uint8_t* data, std::size_t size, const std::uint32_t* sizes, const EntropyShape& shape,
                             void* out, std::uint8_t* scratch, std::size_t* bad) {
  Planes planes;
  for (std::size_t k = 0; k < shape.width; ++k) planes.room[k] = scratch + k * shape.chunk;
  AnsTable<> table;
  Byte* target = static_cast<Byte*>(out);
  std::size_t index = 0;
  for (std::size_t start = 0; start < shape.count; start += shape.chunk, ++index) {
    const std::size_t n = least(shape.chunk, shape.count - start);
    *bad = index;
    if (sizes[index] > size) return EntropyStatus::chunk;
    const EntropyStatus status = decode_chunk(data, sizes[index], shape.width, n, table, planes, target + start * shape.width);
    if (status != EntropyStatus::ok) return status;
    data += sizes[index];
    size -= sizes[index];
  }
  *bad = index;
  return size == 0 ? EntropyStatus::ok : EntropyStatus::chunk;
}

}  // namespace ingot::INGOT_ISA
