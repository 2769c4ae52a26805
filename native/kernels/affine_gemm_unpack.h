// Packed codes as numbers in the order in which many rows of x use them: a vector holds one column of as many rows of
// the weights as it has lanes.
#pragma once
#include <utility>

#include "kernels/affine_matmul_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kUnit = 2 * kWidth;  // rows of the weights that are multiplied at a time: two vectors

template <std::size_t kHalf, std::size_t... kLane>
inline Words interleave(const Words& a, const Words& b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, (kHalf * kWidth / 2 + kLane / 2 + (kLane % 2) * kWidth)...);
}

// rows[i][j] = rows[j][i].
inline void transpose(Words (&rows)[kWidth]) {
  constexpr auto lanes = std::make_index_sequence<kWidth>{};
  for (std::size_t step = 1; step < kWidth; step *= 2) {
    Words next[kWidth];
    for (std::size_t i = 0; i < kWidth / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kWidth / 2], lanes);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + kWidth / 2], lanes);
    }
    std::memcpy(rows, next, sizeof next);
  }
}

// Code `kCode` of 32, which lie in `kBits` words.
template <int kCode, int kBits, bool kSigned>
inline Floats number(const Numbers<kBits, kSigned>& numbers, const Words* words) {
  constexpr int word = kCode * kBits / 32, shift = kCode * kBits % 32;
  if constexpr (shift + kBits <= 32)
    return numbers.template at<shift>(words[word]);
  else
    return numbers.template at<0>((words[word] >> shift) | (words[word + 1] << (32 - shift)));
}

// Columns 2k and 2k + 1 as neighbours in bf16, which holds them.
inline Words pair(const Floats& even, const Floats& odd) {
  return (std::bit_cast<Words>(even) >> 16) | (std::bit_cast<Words>(odd) & 0xffff0000u);
}

// Words of a row from byte `from` on; 0 past its end, and of rows past the last. What lies `ahead` is fetched: rows are
// too many at once for the processor to read ahead in each.
inline Words load_row(const MatmulLayout& at, const std::uint8_t* packed, std::size_t row, std::size_t from, std::size_t ahead) {
  if (row >= at.rows || from >= at.row_bytes) return Words{};
  const std::uint8_t* codes = packed + row * at.row_bytes + from;
  __builtin_prefetch(codes + ahead);
  if (at.row_bytes - from >= kVectorBytes) return load_words(codes);
  alignas(kVectorBytes) std::uint8_t rest[kVectorBytes] = {};
  std::memcpy(rest, codes, at.row_bytes - from);
  return load_words(rest);
}

// Words `first` to `last` of as many rows as a vector has lanes, word by word; rounded up to whole vectors.
inline void turn_rows(const MatmulLayout& at, const std::uint8_t* packed, std::size_t row, std::size_t first,
                      std::size_t last, std::size_t ahead, Words* turned) {
  for (std::size_t w = first; w < last; w += kWidth, turned += kWidth) {
    Words rows[kWidth];
    for (std::size_t i = 0; i < kWidth; ++i) rows[i] = load_row(at, packed, row + i, w * 4, ahead);
    transpose(rows);
    std::memcpy(turned, rows, sizeof rows);
  }
}

// Unpacks the rows of one vector.
template <int kBits, bool kSigned>
class Unpacker {
 public:
  explicit Unpacker(const GemmJob& job) : job_(job), numbers_(job.at.zero_point) {}

  // Rows `row` on, blocks `first` to `last`; a block's columns lie `kUnit` floats apart, pairs `kUnit` pairs.
  void operator()(std::size_t row, std::size_t first, std::size_t last, float* out) const {
    Words turned[kGemmSpan * kBits + kWidth];
    turn_rows(job_.at, job_.weights.packed, row, first * kBits, last * kBits, kAhead, turned);
    for (std::size_t b = 0; b < last - first; ++b) {
      if (job_.mode == GemmMode::tiles)
        pairs(turned + b * kBits, out + b * kGemmBlock / 2 * kUnit, std::make_integer_sequence<int, kGemmBlock / 2>{});
      else
        floats(turned + b * kBits, out + b * kGemmBlock * kUnit, std::make_integer_sequence<int, kGemmBlock>{});
    }
  }

 private:
  static constexpr std::size_t kAhead = 2 * kGemmSpan * kBits * 4;

  template <int... kCode>
  void floats(const Words* words, float* out, std::integer_sequence<int, kCode...>) const {
    (store_floats(out + kCode * kUnit, number<kCode>(numbers_, words)), ...);
  }

  template <int... kPair>
  void pairs(const Words* words, float* out, std::integer_sequence<int, kPair...>) const {
    (store_floats(out + kPair * kUnit, std::bit_cast<Floats>(pair(number<2 * kPair>(numbers_, words),
                                                                  number<2 * kPair + 1>(numbers_, words)))), ...);
  }

  const GemmJob& job_;
  const Numbers<kBits, kSigned> numbers_;
};

template <int kBits, bool kSigned>
void unpack_unit(const GemmJob& job, std::size_t row, std::size_t first, std::size_t last, float* out) {
  const Unpacker<kBits, kSigned> unpack(job);
  unpack(row, first, last, out);
  unpack(row + kWidth, first, last, out + kWidth);
}

using UnpackUnit = void (*)(const GemmJob&, std::size_t, std::size_t, std::size_t, float*);

template <int kBits>
UnpackUnit unpack_signed(bool is_signed) {
  return is_signed ? unpack_unit<kBits, true> : unpack_unit<kBits, false>;
}

inline UnpackUnit unpack_of(const MatmulLayout& at) {
  switch (at.bits) {
    case 2:
      return unpack_signed<2>(at.is_signed);
    case 3:
      return unpack_signed<3>(at.is_signed);
    case 4:
      return unpack_signed<4>(at.is_signed);
    default:
      return unpack_signed<8>(at.is_signed);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
