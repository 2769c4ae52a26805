// Unpacks codes to floats in the order in which many rows of x use them: a vector holds one column of as many rows of
// the weights as it has lanes.
#pragma once
#include <utility>

#include "kernels/affine_matmul_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kTaskRows = 64;  // rows of the weights that a thread processes in parallel
static_assert(kTaskRows == kGemmRows);
constexpr std::size_t kUnit = 2 * kWidth;  // rows of the weights that are multiplied together: two vectors

template <std::size_t kHalf, std::size_t... kLane>
inline Words interleave(const Words& a, const Words& b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, (kHalf * kWidth / 2 + kLane / 2 + (kLane % 2) * kWidth)...);
}

#if defined(__AVX512F__)
// Transposes groups of four vectors: the four words of every quarter, one vector for each position. GCC 12 keeps them
// in registers only if loops are written like this.
template <std::size_t kCount>
inline void transpose_quarters(const __m512i (&rows)[kCount], __m512i (&fours)[kCount]) {
  __m512i pairs[kCount];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kCount; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kCount; i += 4)
    for (std::size_t k = 0; k < 2; ++k) {
      fours[i + 2 * k] = _mm512_unpacklo_epi64(pairs[i + k], pairs[i + k + 2]);
      fours[i + 2 * k + 1] = _mm512_unpackhi_epi64(pairs[i + k], pairs[i + k + 2]);
    }
}

// rows[i][j] = rows[j][i].
inline void transpose(Words (&rows)[kWidth]) {
  __m512i from[kWidth], fours[kWidth];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kWidth; ++i) from[i] = std::bit_cast<__m512i>(rows[i]);
  transpose_quarters(from, fours);
#pragma GCC unroll 16
  for (std::size_t k = 0; k < 4; ++k) {
    const __m512i low = _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(fours[k + 8], fours[k + 12], 0x88);
    const __m512i next = _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0xdd);
    const __m512i last = _mm512_shuffle_i32x4(fours[k + 8], fours[k + 12], 0xdd);
    rows[k] = std::bit_cast<Words>(_mm512_shuffle_i32x4(low, high, 0x88));
    rows[k + 4] = std::bit_cast<Words>(_mm512_shuffle_i32x4(next, last, 0x88));
    rows[k + 8] = std::bit_cast<Words>(_mm512_shuffle_i32x4(low, high, 0xdd));
    rows[k + 12] = std::bit_cast<Words>(_mm512_shuffle_i32x4(next, last, 0xdd));
  }
}

// Eight values of each of two rows, next to each other.
inline __m512i load_eights(const void* values, Dtype type, std::size_t first, std::size_t second) {
  if (type == Dtype::f32) {
    const auto* from = static_cast<const float*>(values);
    return _mm512_castps_si512(
        _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(from + first)), _mm256_loadu_ps(from + second), 1));
  }
  const auto* from = static_cast<const std::uint16_t*>(values);
  const auto eight = [&](std::size_t index) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + index)); };
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(eight(first)), eight(second), 1);
  if (type == Dtype::f16) return _mm512_castps_si512(_mm512_cvtph_ps(both));
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16);
}

// Eight values of each of sixteen rows, which begin at `places`, ordered by position; `stride` apart.
inline void turn_eights(const void* values, Dtype type, const std::size_t* positions, float* out, std::size_t stride) {
  __m512i rows[8], fours[8];
#pragma GCC unroll 8
  for (std::size_t k = 0; k < 8; ++k) {
    const std::size_t row = k / 4 * 8 + k % 4;
    rows[k] = load_eights(values, type, positions[row], positions[row + 4]);
  }
  transpose_quarters(rows, fours);
#pragma GCC unroll 4
  for (std::size_t k = 0; k < 4; ++k) {
    _mm512_store_si512(out + k * stride, _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0x88));
    _mm512_store_si512(out + (k + 4) * stride, _mm512_shuffle_i32x4(fours[k], fours[k + 4], 0xdd));
  }
}
#else
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
#endif

// Code `kCode` of the 32 codes in `kBits` words.
template <int kCode, int kBits, bool kSigned>
inline Floats number(const Numbers<kBits, kSigned>& numbers, const Words* words) {
  constexpr int word = kCode * kBits / 32, shift = kCode * kBits % 32;
  if constexpr (shift + kBits <= 32)
    return numbers.template look_up<shift>(words[word]);
  else
    return numbers.template look_up<0>((words[word] >> shift) | (words[word + 1] << (32 - shift)));
}

// Two neighbouring columns in bf16, which represents them exactly.
inline Words pair(const Floats& low, const Floats& high) {
#if defined(__AVX512BW__)
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return std::bit_cast<Words>(
      _mm512_mask_shuffle_epi8(std::bit_cast<__m512i>(high), 0x3333333333333333u, std::bit_cast<__m512i>(low), upper));
#else
  return (std::bit_cast<Words>(low) >> 16) | (std::bit_cast<Words>(high) & 0xffff0000u);
#endif
}

// The column in the upper half of a word of a block for `GemmMode::dots`; the lower half has that two columns on. Upper
// halves are added first: even words have the columns 0, 2, ... of the block in order, odd words 1, 3, ...
constexpr std::size_t first_of_pair(std::size_t word) { return word / 2 * 4 + word % 2; }

#if defined(__AVX512BW__)
// The same pairs of codes of up to four bits, from a table of bf16.
template <int kBits, bool kSigned>
class PairTable {
 public:
  explicit PairTable(int zero_point) {
    alignas(64) std::uint16_t table[32] = {};
    if constexpr (kBits <= 4)
      for (int index = 0; index < 32; ++index) {  // the upper bits of an index belong to the next code
        const int code = index & ((1 << kBits) - 1), half = 1 << (kBits - 1);
        const auto value = static_cast<float>((kSigned ? (code ^ half) - half : code) - zero_point);
        table[index] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
      }
    table_ = _mm512_load_si512(table);
  }

  // Columns from 4 * kFour on, of 32 codes in `kBits` words.
  template <int kFour>
  void four(const Words* words, Words& even, Words& parity) const {
    constexpr int first = 4 * kFour * kBits, word = first / 32, shift = first % 32;
    const __m512i low = std::bit_cast<__m512i>(words[word]);
    if constexpr (kBits == 4) {  // a byte of two codes for each half
      constexpr int byte = shift / 8;
      const __m512i both = _mm512_shuffle_epi8(low, bytes_of(byte + 1, byte));
      even = look_up(both);
      parity = look_up(_mm512_srli_epi16(both, 4));
    } else {
      __m512i codes = _mm512_srli_epi32(low, shift);
      if constexpr (shift + 4 * kBits > 32)
        codes = _mm512_or_si512(codes, _mm512_slli_epi32(std::bit_cast<__m512i>(words[word + 1]), 32 - shift));
      codes = _mm512_shuffle_epi8(codes, in_lanes(0x01000100));
      even = look_up(_mm512_srlv_epi16(codes, _mm512_set1_epi32(2 * kBits)));
      parity = look_up(_mm512_srlv_epi16(codes, _mm512_set1_epi32(kBits << 16 | 3 * kBits)));
    }
  }

 private:
  // A permutation of the bytes of every word.
  static __m512i in_lanes(unsigned bytes) {
    const __m512i lanes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return _mm512_or_si512(lanes, _mm512_set1_epi32(static_cast<int>(bytes)));
  }

  // Byte `low` of every word in the lower half, `high` in the upper; the other bytes are 0.
  static __m512i bytes_of(unsigned low, unsigned high) { return in_lanes(0x80008000u | high << 16 | low); }

  Words look_up(__m512i index) const { return std::bit_cast<Words>(_mm512_permutexvar_epi16(index, table_)); }

  __m512i table_;
};
#endif

// Returns the distance from byte `from` of a row to the bytes to prefetch: `ahead`, or past the row's end the row that
// is `kTaskRows` on. The processor does not prefetch this number of rows by itself.
inline std::size_t ahead_of(const MatmulLayout& layout, std::size_t from, std::size_t ahead) {
  return ahead + (from + ahead < layout.row_bytes ? 0 : (kTaskRows - 1) * layout.row_bytes);
}

// Words of a row from byte `from` on; 0 past its end, and for rows past the last.
inline Words load_row(const MatmulLayout& layout, const std::uint8_t* packed, std::size_t row, std::size_t from,
                      std::size_t ahead) {
  if (row >= layout.rows || from >= layout.row_bytes) return Words{};
  const std::uint8_t* codes = packed + row * layout.row_bytes + from;
  __builtin_prefetch(codes + ahead_of(layout, from, ahead), 0, 2);
  if (layout.row_bytes - from >= kVectorBytes) return load_words(codes);
  alignas(kVectorBytes) std::uint8_t tail[kVectorBytes] = {};
  std::memcpy(tail, codes, layout.row_bytes - from);
  return load_words(tail);
}

// Words `first` to `last` of as many rows as a vector has lanes, transposed; rounded up to complete vectors.
inline void turn_rows(const MatmulLayout& layout, const std::uint8_t* packed, std::size_t row, std::size_t first,
                      std::size_t last, std::size_t ahead, Words* turned) {
  const bool all = row + kWidth <= layout.rows;
  for (std::size_t w = first; w < last; w += kWidth, turned += kWidth) {
    Words rows[kWidth];
    if (all && w * 4 + kVectorBytes <= layout.row_bytes) {
      const std::uint8_t* codes = packed + row * layout.row_bytes + w * 4;
      const std::size_t next = ahead_of(layout, w * 4, ahead);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 16  // rows stay in registers
#endif
      for (std::size_t i = 0; i < kWidth; ++i, codes += layout.row_bytes) {
        __builtin_prefetch(codes + next, 0, 2);
        rows[i] = load_words(codes);
      }
    } else {
      for (std::size_t i = 0; i < kWidth; ++i) rows[i] = load_row(layout, packed, row + i, w * 4, ahead);
    }
    transpose(rows);
    std::memcpy(turned, rows, sizeof rows);
  }
}

// Unpacks the rows of one vector.
template <int kBits, bool kSigned>
class Unpacker {
 public:
  explicit Unpacker(const GemmJob& job) : job_(job), numbers_(job.layout.zero_point) {}

  // Rows from `row` on, blocks `first` to `last`; a block's columns are `kUnit` floats apart, pairs `kUnit` pairs.
  void operator()(std::size_t row, std::size_t first, std::size_t last, float* out) const {
    Words turned[kGemmSpan * kBits + kWidth];
    turn_rows(job_.layout, job_.weights.packed, row, first * kBits, last * kBits, kAhead, turned);
    for (std::size_t b = 0; b < last - first; ++b) {
      if (job_.mode == GemmMode::tiles)
        pairs(turned + b * kBits, out + b * kGemmBlock / 2 * kUnit, std::make_integer_sequence<int, kGemmBlock / 2>{});
      else if (job_.mode == GemmMode::dots)
        fours(turned + b * kBits, out + b * kGemmBlock / 2 * kUnit, std::make_integer_sequence<int, kGemmBlock / 4>{});
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

  template <int... kFour>
  void fours(const Words* words, float* out, std::integer_sequence<int, kFour...>) const {
    (store_four<kFour>(words, out + 2 * kFour * kUnit), ...);
  }

  // Columns from 4 * kFour on: an even word and an odd one.
  template <int kFour>
  void store_four(const Words* words, float* out) const {
#if defined(__AVX512BW__)
    if constexpr (kBits <= 4) {
      Words even, odd;
      looked_up_.template four<kFour>(words, even, odd);
      store_floats(out, std::bit_cast<Floats>(even));
      return store_floats(out + kUnit, std::bit_cast<Floats>(odd));
    }
#endif
    constexpr int k = 4 * kFour;
    store_floats(out, std::bit_cast<Floats>(pair(number<k + 2>(numbers_, words), number<k>(numbers_, words))));
    store_floats(out + kUnit, std::bit_cast<Floats>(pair(number<k + 3>(numbers_, words), number<k + 1>(numbers_, words))));
  }

  const GemmJob& job_;
  const Numbers<kBits, kSigned> numbers_;
#if defined(__AVX512BW__)
  const PairTable<kBits, kSigned> looked_up_{job_.layout.zero_point};
#endif
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

inline UnpackUnit unpack_of(const MatmulLayout& layout) {
  switch (layout.bits) {
    case 2:
      return unpack_signed<2>(layout.is_signed);
    case 3:
      return unpack_signed<3>(layout.is_signed);
    case 4:
      return unpack_signed<4>(layout.is_signed);
    default:
      return unpack_signed<8>(layout.is_signed);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
