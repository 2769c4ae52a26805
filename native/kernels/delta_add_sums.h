// Sums of a base and differences in f32, rounded once to the base's type.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/floats.h"
#include "kernels/wdelta_differences.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 1024;

// out = round(d + base), or round(base - d). If both operands are NaN, the result is the first.
template <Dtype kDtype, bool kLess>
void add_block(const float* __restrict d, const TypeOf<kDtype>* base, std::size_t n, TypeOf<kDtype>* out) {
  alignas(64) float sums[kBlock];
  load_block<kDtype>(base, n, sums);
  for (std::size_t i = 0; i < n; ++i) sums[i] = kLess ? sum_of<true>(sums[i], d[i]) : sum_of<false>(d[i], sums[i]);
  store_block<kDtype>(sums, n, out);
}

#if defined(__AVX512BW__)
// Sixteen bf16 at a time. A NaN in the first operand wins, as in the machine's addition.
template <bool kLess>
std::size_t add_vectors(const float* d, const std::uint16_t* base, std::size_t n, std::uint16_t* out) {
  const __m512i below = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x00400000);
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + i));
    const __m512i shifted = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, from), 16);
    const __m512 wide = _mm512_castsi512_ps(shifted), by = _mm512_loadu_ps(d + i), first = kLess ? wide : by;
    const __m512 sum = kLess ? _mm512_sub_ps(wide, by) : _mm512_add_ps(by, wide);
    const __m512i bits = _mm512_castps_si512(sum);
    const __m512i lsb = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), one);
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, below), lsb);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), bits, quiet);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(first, first, _CMP_UNORD_Q),
                                   _mm512_castps_si512(first), quiet);
    const __m512i high = _mm512_maskz_srli_epi32(0xffff, rounded, 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_maskz_cvtepi32_epi16(0xffff, high));
  }
  return i;
}
#elif defined(__AVX2__)
// Eight bf16 in the low halves of lanes; `nan` is set if a sum is a NaN.
template <bool kLess>
inline __m256i add_eight(const float* d, const std::uint16_t* base, __m256& nan) {
  const __m256 wide = load_eight<Dtype::bf16>(base), by = _mm256_loadu_ps(d);
  const __m256 sum = kLess ? _mm256_sub_ps(wide, by) : _mm256_add_ps(by, wide);
  nan = _mm256_or_ps(nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
  return _mm256_srli_epi32(eight_numbers(sum), 16);
}

// Sixteen bf16 at a time, up to the first vector with a NaN: compilers may swap operands, which would change the NaN.
template <bool kLess>
std::size_t add_vectors(const float* d, const std::uint16_t* base, std::size_t n, std::uint16_t* out) {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256 nan = _mm256_setzero_ps();
    const __m256i low = add_eight<kLess>(d + i, base + i, nan), high = add_eight<kLess>(d + i + 8, base + i + 8, nan);
    if (_mm256_movemask_ps(nan)) [[unlikely]]
      break;
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0b11011000);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), both);
  }
  return i;
}
#endif

template <Dtype kDtype, bool kLess>
void add_some(const float* d, const TypeOf<kDtype>* base, std::size_t n, TypeOf<kDtype>* out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if constexpr (kDtype == Dtype::bf16) i = add_vectors<kLess>(d, base, n, out);
#endif
  add_block<kDtype, kLess>(d + i, base + i, n - i, out + i);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
