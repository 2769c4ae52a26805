// Products of a few rows of x in 8 bits, where reading the weights takes most of the time: rows of weights are read in
// stored order, four in parallel, four blocks at a time. Lane 4 b + row of a vector has block b of a row: sum b of
// `kInt8Sums`.
#pragma once
#include "kernels/affine_dots.h"
#include "core/int8.h"

namespace ingot::INGOT_ISA {
namespace {

// Rows of x: the first halves of four blocks, then the second.
constexpr std::size_t kFourBytes = kInt8Sums * kInt8Block;

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define INGOT_INT8_FEW 1

constexpr std::size_t kFew = 4;        // rows of x
constexpr std::size_t kFewRows = 4;    // of weights
constexpr std::size_t kFewAhead = 32768;  // bytes to prefetch; processors do not prefetch across pages

// Prefetches the next rows of weights into the second-level cache, line after line: the processor does not recognise
// rows that are read in parallel as a sequence, and the first-level cache has too few outstanding misses.
template <std::size_t kBytes, std::size_t kAhead>
inline void read_ahead(const void* from) {
  for (std::size_t line = 0; line < kBytes; line += 64)
    __builtin_prefetch(static_cast<const std::uint8_t*>(from) + kAhead + line, 0, 2);
}

inline bool takes_few(const Int8Job& job) {
  const std::size_t columns = job.layout.group;
  const bool groups = job.groups == 1 || columns == kInt8Block || columns == 2 * kInt8Block || columns % kFourBytes == 0;
  return job.dots && job.count <= kFew && (job.layout.bits == 4 || job.layout.bits == 8) && groups;
}

inline __m512i dots_of(__m512i sum, __m512i codes, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "vm"(x));
  return sum;
}

// Adds the lanes of each block, so that lane 4 b + row has the sum of row `row`.
inline __m512i turn_sums(const __m512i (&rows)[kFewRows]) {
  const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
  const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Four values, each in the four lanes of a block.
inline __m512 to_blocks(__m128 four) {
  const __m512i block = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(block, _mm512_castps128_ps512(four));
}

template <class T>
inline T value_at(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// `kPer` values of each of four rows, row after row, in f32.
template <std::size_t kPer>
inline __m512 load_rows(const std::uint8_t* const (&rows)[kFewRows], std::size_t first, Dtype type) {
  if (type == Dtype::f32) {
    if constexpr (kPer == 4) {
      __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(reinterpret_cast<const float*>(rows[0]) + first));
      all = _mm512_insertf32x4(all, _mm_loadu_ps(reinterpret_cast<const float*>(rows[1]) + first), 1);
      all = _mm512_insertf32x4(all, _mm_loadu_ps(reinterpret_cast<const float*>(rows[2]) + first), 2);
      return _mm512_insertf32x4(all, _mm_loadu_ps(reinterpret_cast<const float*>(rows[3]) + first), 3);
    }
    const auto element_at = [&](std::size_t row) { return rows[row] + first * 4; };
    if constexpr (kPer == 2)
      return _mm512_castps256_ps512(_mm256_castsi256_ps(
          _mm256_set_epi64x(value_at<long long>(element_at(3)), value_at<long long>(element_at(2)),
                            value_at<long long>(element_at(1)), value_at<long long>(element_at(0)))));
    else
      return _mm512_castps128_ps512(_mm_set_ps(value_at<float>(element_at(3)), value_at<float>(element_at(2)),
                                               value_at<float>(element_at(1)), value_at<float>(element_at(0))));
  }
  const auto element_at = [&](std::size_t row) { return rows[row] + first * 2; };
  __m256i all;
  if constexpr (kPer == 4)
    all = _mm256_set_epi64x(value_at<long long>(element_at(3)), value_at<long long>(element_at(2)),
                            value_at<long long>(element_at(1)), value_at<long long>(element_at(0)));
  else if constexpr (kPer == 2)
    all = _mm256_castsi128_si256(_mm_set_epi32(value_at<int>(element_at(3)), value_at<int>(element_at(2)),
                                               value_at<int>(element_at(1)), value_at<int>(element_at(0))));
  else
    all =
        _mm256_castsi128_si256(_mm_set_epi16(0, 0, 0, 0, value_at<short>(element_at(3)), value_at<short>(element_at(2)),
                                             value_at<short>(element_at(1)), value_at<short>(element_at(0))));
  if (type == Dtype::f16) return _mm512_cvtph_ps(all);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(all), 16));
}

// Scales, or zeros, of four rows.
template <std::size_t kPer>
class FewScales {
 public:
  FewScales(const Int8Job& job, const void* values, const std::size_t (&rows)[kFewRows])
      : type_(job.weights.scale_type), groups_(job.groups), step_(job.groups == 1 ? 0 : 1), per_(1) {
    const std::size_t size = type_ == Dtype::f32 ? 4 : 2;
    if (kPer == 1 && job.groups > 1) per_ = job.layout.group / kFourBytes;
    for (std::size_t i = 0; i < kFewRows; ++i)
      rows_[i] = static_cast<const std::uint8_t*>(values) + (job.layout.per_tensor ? 0 : rows[i] * job.groups) * size;
  }

  // Scales lane by lane, for the next four blocks; 0 past the last group.
  [[gnu::noinline]] __m512 next() {
    const std::size_t first = group_;
    read_ahead<64, kFewAhead / 8>(rows_[0] + kFewRows * first * (type_ == Dtype::f32 ? 4 : 2));
    if (++passed_ == per_) passed_ = 0, group_ += kPer * step_;
    const __m512i lanes = kPer == 4   ? _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
                          : kPer == 2 ? _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7)
                                      : _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    if (kPer == 1 || groups_ - first >= kPer) return _mm512_permutexvar_ps(lanes, load_rows<kPer>(rows_, first, type_));
    alignas(64) float last[16] = {};
    for (std::size_t row = 0; row < kFewRows; ++row)
      for (std::size_t i = 0; i < groups_ - first; ++i) last[row * kPer + i] = load_at(rows_[row], type_, first + i);
    return _mm512_permutexvar_ps(lanes, _mm512_load_ps(last));
  }

 private:
  const std::uint8_t* rows_[kFewRows];
  const Dtype type_;
  const std::size_t groups_, step_;
  std::size_t per_, passed_ = 0, group_ = 0;
};

// The codes of four blocks of a row as bytes, their first and second halves.
template <int kBits>
inline void halves_of(const std::uint8_t* codes, std::size_t filled, __m512i flip, __m512i (&halves)[2]) {
  constexpr std::size_t bytes = kFourBytes * kBits / 8;
  alignas(64) std::uint8_t tail[bytes] = {};
  if (filled < bytes) {
    std::memcpy(tail, codes, filled);
    codes = tail;
  }
  if constexpr (kBits == 4) {
    const __m512i both = _mm512_loadu_si512(codes), low = _mm512_set1_epi8(15);
    halves[0] = _mm512_xor_si512(_mm512_and_si512(both, low), flip);
    halves[1] = _mm512_xor_si512(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), flip);
  } else {
    const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(codes), flip);
    const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(codes + 64), flip);
    halves[0] = _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), second);
    halves[1] = _mm512_permutex2var_epi64(first, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), second);
  }
}

// Four rows of weights with all rows of x.
template <int kBits, bool kZeros, std::size_t kPer, std::size_t kCount>
void multiply_few(const Int8Job& job, const std::size_t (&rows)[kFewRows], float (&out)[kCount][kFewRows]) {
  constexpr std::size_t bytes = kFourBytes * kBits / 8;
  const __m512i flip = _mm512_set1_epi8(job.layout.is_signed ? static_cast<char>(1 << (kBits - 1)) : 0);
  FewScales<kPer> scales(job, job.weights.scales, rows), zeros(job, kZeros ? job.weights.zeros : job.weights.scales, rows);
  const __m512 single = scales.next(), zero = kZeros ? zeros.next() : _mm512_setzero_ps();
  const bool low_half = job.groups == 1, subtracts = job.layout.zero == ZeroKind::point;
  __m512 scale = single, shift = zero, sums[kCount] = {};
  for (std::size_t four = 0; four < job.fours; ++four) {
    const std::size_t from = four * bytes,
                      held = job.layout.row_bytes - from < bytes ? job.layout.row_bytes - from : bytes;
    __m512i results[kCount][kFewRows];
    read_ahead<kFewRows * bytes, kFewAhead>(job.weights.packed + rows[0] * job.layout.row_bytes + kFewRows * from);
    for (std::size_t row = 0; row < kFewRows; ++row) {
      const std::uint8_t* codes = job.weights.packed + rows[row] * job.layout.row_bytes + from;
      __m512i halves[2];
      halves_of<kBits>(codes, held, flip, halves);
      for (std::size_t m = 0; m < kCount; ++m) {
        const std::int8_t* x = job.codes + (m * job.fours + four) * kFourBytes;
        const __m512i first = dots_of(_mm512_setzero_si512(), halves[0], _mm512_loadu_si512(x));
        results[m][row] = dots_of(first, halves[1], _mm512_loadu_si512(x + kFourBytes / 2));
      }
    }
    if (four && !low_half) {
      scale = scales.next();
      if (kZeros) shift = zeros.next();
    }
    for (std::size_t m = 0; m < kCount; ++m) {
      const std::size_t position = (m * job.fours + four) * kInt8Sums;
      const __m512 starts = to_blocks(_mm_loadu_ps(reinterpret_cast<const float*>(job.starts + position)));
      const __m512 steps = to_blocks(_mm_loadu_ps(job.steps + position));
      __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(turn_sums(results[m]), _mm512_castps_si512(starts)));
      if (kZeros && subtracts)
        value = _mm512_fnmadd_ps(shift, to_blocks(_mm_loadu_ps(job.sums + position)), value);
      sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(scale, steps), value, sums[m]);
      if (kZeros && !subtracts)
        sums[m] = _mm512_fmadd_ps(shift, to_blocks(_mm_loadu_ps(job.sums + position)), sums[m]);
    }
  }
  for (std::size_t m = 0; m < kCount; ++m) {  // sums 0 and 2, 1 and 3, then both
    const __m256 pairs = _mm256_add_ps(_mm512_castps512_ps256(sums[m]), _mm512_extractf32x8_ps(sums[m], 1));
    _mm_storeu_ps(out[m], _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
}

// Adds the bias and stores the products of `count` rows of x. Not inlined: the kernels below are many.
[[gnu::noinline]] void finish_few(const Int8Job& job, std::size_t first, std::size_t last, float (*values)[kInt8Rows],
                                  std::size_t count) {
  alignas(64) float bias[kInt8Rows];
  if (job.out.bias) load_floats_of(job.out.bias, job.out.bias_type, first, last - first, bias);
  for (std::size_t m = 0; m < count; ++m) {
    if (job.out.bias)
      for (std::size_t row = 0; row < last - first; ++row) values[m][row] += bias[row];
    store_values(values[m], last - first, job.out, m * job.layout.rows + first);
  }
}

template <int kBits, bool kZeros, std::size_t kPer, std::size_t kCount>
void few_rows_of(const Int8Job& job, std::size_t first, std::size_t last) {
  alignas(64) float values[kCount][kInt8Rows];
  for (std::size_t row = first; row < last; row += kFewRows) {
    std::size_t rows[kFewRows];
    for (std::size_t i = 0; i < kFewRows; ++i) rows[i] = row + i < last ? row + i : last - 1;
    float sums[kCount][kFewRows];
    multiply_few<kBits, kZeros, kPer, kCount>(job, rows, sums);
    for (std::size_t m = 0; m < kCount; ++m) std::memcpy(values[m] + (row - first), sums[m], sizeof sums[m]);
  }
  finish_few(job, first, last, values, kCount);
}

using FewFn = void (*)(const Int8Job&, std::size_t, std::size_t);

template <int kBits, bool kZeros, std::size_t kPer>
FewFn few_of_count(std::size_t count) {
  constexpr FewFn table[] = {few_rows_of<kBits, kZeros, kPer, 1>, few_rows_of<kBits, kZeros, kPer, 2>,
                             few_rows_of<kBits, kZeros, kPer, 3>, few_rows_of<kBits, kZeros, kPer, 4>};
  return table[count - 1];
}

template <int kBits, bool kZeros>
FewFn few_of_groups(const Int8Job& job) {
  if (job.groups > 1 && job.layout.group == kInt8Block) return few_of_count<kBits, kZeros, 4>(job.count);
  if (job.groups > 1 && job.layout.group == 2 * kInt8Block) return few_of_count<kBits, kZeros, 2>(job.count);
  return few_of_count<kBits, kZeros, 1>(job.count);
}

template <int kBits>
FewFn few_of_bits(const Int8Job& job) {
  return (job.layout.zero == ZeroKind::none ? few_of_groups<kBits, false> : few_of_groups<kBits, true>)(job);
}

inline void few_rows(const Int8Job& job, std::size_t first, std::size_t last) {
  (job.layout.bits == 4 ? few_of_bits<4> : few_of_bits<8>)(job)(job, first, last);
}

#else

inline bool takes_few(const Int8Job&) { return false; }

#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
