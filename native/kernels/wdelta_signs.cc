// Encodes float32 differences as signs, and sums the magnitudes of rows.
#include <bit>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/wdelta_differences.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kLeaf = 128;  // values that are summed without division into halves
constexpr std::size_t kBits = 64;

float magnitude(float x) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu); }

// A bit for each of 64 values, set if it is not below zero, the first value in the lowest bit.
inline std::uint64_t signs_of(const float* in) {
  std::uint64_t result = 0;
#if defined(__AVX512F__)
  for (std::size_t i = 0; i < kBits; i += 16)
    result |= std::uint64_t{_mm512_cmp_ps_mask(_mm512_loadu_ps(in + i), _mm512_setzero_ps(), _CMP_GE_OQ)} << i;
#elif defined(__AVX2__)
  for (std::size_t i = 0; i < kBits; i += 8) {
    const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(in + i), _mm256_setzero_ps(), _CMP_GE_OQ);
    result |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_ps(positive))} << i;
  }
#else
  for (std::size_t i = 0; i < kBits; ++i) result |= std::uint64_t{in[i] >= 0} << i;
#endif
  return result;
}

// Reverses the bits of each byte.
inline std::uint64_t turned(std::uint64_t x) {
  x = (x >> 1 & 0x5555555555555555u) | (x & 0x5555555555555555u) << 1;
  x = (x >> 2 & 0x3333333333333333u) | (x & 0x3333333333333333u) << 2;
  return (x >> 4 & 0x0f0f0f0f0f0f0f0fu) | (x & 0x0f0f0f0f0f0f0f0fu) << 4;
}

// One bit per value, set unless it is below zero, the first value in the highest bit; the last byte is padded with 0.
void pack_signs(const float* in, std::size_t n, std::uint8_t* out) {
  std::size_t i = 0;
  for (; i + kBits <= n; i += kBits) {
    const std::uint64_t bits = turned(signs_of(in + i));
    for (std::size_t byte = 0; byte < 8; ++byte) out[i / 8 + byte] = static_cast<std::uint8_t>(bits >> 8 * byte);
  }
  for (; i < n; i += 8) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < 8 && i + j < n; ++j) byte |= unsigned{in[i + j] >= 0} << (7 - j);
    out[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// NumPy's pairwise sum of magnitudes (numpy/_core/src/umath/loops_utils.h describes it): blocks of 128 in eight running
// sums; longer ranges are divided into halves at a multiple of eight. The mean of a row must round to the same float16
// everywhere.
float leaf_sum(const float* in, std::size_t n) {
  if (n < 8) {
    float sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += magnitude(in[i]);
    return sum;
  }
  float sums[8];
  for (std::size_t j = 0; j < 8; ++j) sums[j] = magnitude(in[j]);
  const std::size_t full = n - n % 8;
  for (std::size_t i = 8; i < full; i += 8)
    for (std::size_t j = 0; j < 8; ++j) sums[j] += magnitude(in[i + j]);
  float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (std::size_t i = full; i < n; ++i) sum += magnitude(in[i]);
  return sum;
}

#if defined(__AVX2__)
// leaf_sum and pack_signs of `n` differences, a multiple of eight. For NaN, the bit does not matter.
template <Dtype kDtype>
float encode_leaf(const TypeOf<kDtype>* tuned, const TypeOf<kDtype>* base, std::size_t n, std::uint8_t* out) {
  const __m256 remainder = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256i turned = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);  // the first value in the highest bit
  __m256 running = _mm256_setzero_ps();
  for (std::size_t i = 0; i < n; i += 8) {
    const __m256 by = _mm256_sub_ps(load_eight<kDtype>(tuned + i), load_eight<kDtype>(base + i));
    running = _mm256_add_ps(running, _mm256_and_ps(by, remainder));
    const __m256 plus = _mm256_cmp_ps(_mm256_permutevar8x32_ps(by, turned), _mm256_setzero_ps(), _CMP_GE_OQ);
    out[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(plus));
  }
  float sums[8];
  _mm256_storeu_ps(sums, running);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
#endif

// Sums the magnitudes of `n` values from `start` on; `leaf` returns the sum of at most kLeaf values, and is called once
// for each leaf, in order.
template <class Leaf>
float pairwise(std::size_t start, std::size_t n, const Leaf& leaf) {
  if (n <= kLeaf) return leaf(start, n);
  const std::size_t half = n / 2 - n / 2 % 8;
  const float first = pairwise(start, half, leaf);
  return first + pairwise(start + half, n - half, leaf);
}

// The first value from `start` on that is not finite; `stop` if all are.
std::size_t first_odd(const Differences& differences, std::size_t start, std::size_t stop) {
  while (start < stop && is_finite(difference_at(differences, start))) ++start;
  return start;
}

// Rows of complete bytes: each piece of a row is subtracted, summed and packed while it is in registers or in cache.
template <Dtype kDtype>
std::size_t encode_pair(const Differences& differences, std::size_t rows, std::size_t cols, float* sums,
                        std::uint8_t* bits) {
  using T = TypeOf<kDtype>;
  const auto* tuned = static_cast<const T*>(differences.tuned);
  const auto* base = static_cast<const T*>(differences.base);
  alignas(64) float values[kLeaf] = {};
  const auto leaf = [&](std::size_t start, std::size_t n) {
#if defined(__AVX2__)
    if (n % 8 == 0 && n) return encode_leaf<kDtype>(tuned + start, base + start, n, bits + start / 8);
#endif
    subtract_block<kDtype>(tuned + start, base + start, n, values);
    pack_signs(values, n, bits + start / 8);
    return leaf_sum(values, n);
  };
  for (std::size_t row = 0; row < rows; ++row) {
    sums[row] = pairwise(row * cols, cols, leaf);
    if (is_finite(sums[row])) continue;  // the sum may overflow f32, too
    const std::size_t stop = (row + 1) * cols, odd = first_odd(differences, row * cols, stop);
    if (odd < stop) return odd;
  }
  return differences.count;
}

std::size_t encode_given(const Differences& differences, std::size_t rows, std::size_t cols, float* sums,
                         std::uint8_t* bits) {
  const auto* in = static_cast<const float*>(differences.tuned);
  const auto leaf = [&](std::size_t start, std::size_t n) { return leaf_sum(in + start, n); };
  std::size_t packed = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    sums[row] = pairwise(row * cols, cols, leaf);
    const std::size_t stop = (row + 1) * cols, end = row + 1 < rows ? stop / 8 * 8 : differences.count;
    if (!is_finite(sums[row]))
      if (const std::size_t parity = first_odd(differences, row * cols, stop); parity < stop) return parity;
    pack_signs(in + packed, end - packed, bits + packed / 8);
    packed = end;
  }
  return differences.count;
}

}  // namespace

std::size_t sign_encode(const Differences& differences, std::size_t rows, std::size_t cols, float* sums,
                        std::uint8_t* bits) {
  if (!differences.base) return encode_given(differences, rows, cols, sums, bits);
  if (differences.type == Dtype::f16) return encode_pair<Dtype::f16>(differences, rows, cols, sums, bits);
  if (differences.type == Dtype::bf16) return encode_pair<Dtype::bf16>(differences, rows, cols, sums, bits);
  return encode_pair<Dtype::f32>(differences, rows, cols, sums, bits);
}

}  // namespace ingot::INGOT_ISA
