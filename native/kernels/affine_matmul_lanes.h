// Sixteen partial sums in parallel, as vectors of the machine's width, and the codes of a block as floats. Every lane
// has the same result at any width, so results do not depend on the instruction set.
#pragma once
#include "kernels/gcc_headers.h"
#include <bit>
#include <cstring>

#include "core/matmul.h"
#include "kernels/bits.h"
#include "kernels/float_vectors.h"
#include "kernels/floats.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));

constexpr std::size_t kVectors = kLanes / kWidth;  // vectors of all lanes

inline Words load_words(const std::uint8_t* from) {
  Words value;
  std::memcpy(&value, from, sizeof value);
  if constexpr (std::endian::native == std::endian::big)
    for (std::size_t i = 0; i < kWidth; ++i) value[i] = __builtin_bswap32(value[i]);
  return value;
}

// Loads up to `kCount` values from `first` on; 0 for the others.
template <std::size_t kCount>
inline void load_filled(const void* from, Dtype type, std::size_t first, std::size_t filled, float* values) {
  if (filled >= kCount) return load_floats_of(from, type, first, kCount, values);
  load_floats_of(from, type, first, filled, values);
  for (std::size_t k = filled; k < kCount; ++k) values[k] = 0;
}

inline void store_values(const float* from, std::size_t count, const MatmulOutput& out, std::size_t first) {
  switch (out.type) {
    case Dtype::f16:
      return store_block<Dtype::f16>(from, count, static_cast<std::uint16_t*>(out.values) + first);
    case Dtype::bf16:
      return store_block<Dtype::bf16>(from, count, static_cast<std::uint16_t*>(out.values) + first);
    default:
      return store_block<Dtype::f32>(from, count, static_cast<float*>(out.values) + first);
  }
}

// a * b + c, fused if there is an instruction for it; the bits are the same if the product is exact.
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Adds the upper half of the lanes to the lower, four times.
inline float sum_lanes(const Floats* lanes) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes[0]), _mm512_extractf32x8_ps(lanes[0], 1));
#else
  const __m256 eight = _mm256_add_ps(lanes[0], lanes[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  alignas(64) float all[kLanes];
  for (std::size_t h = 0; h < kVectors; ++h) store_floats(all + h * kWidth, lanes[h]);
  for (std::size_t half = kLanes / 2; half; half /= 2)
    for (std::size_t i = 0; i < half; ++i) all[i] += all[i + half];
  return all[0];
#endif
}

// Adds neighbouring values until one is left.
template <int kCount>
inline Floats sum_steps(const Floats* steps) {
  if constexpr (kCount == 1) return steps[0];
  else return sum_steps<kCount / 2>(steps) + sum_steps<kCount / 2>(steps + kCount / 2);
}

// The products of the steps, with neighbouring products added until one is left.
template <bool kFused, int kCount>
inline Floats sum_products(const float* x, const Floats* q) {
  if constexpr (kCount == 1)
    return load_floats(x) * q[0];
  else if constexpr (kCount == 2 && kFused)
    return fused(load_floats(x + kLanes), q[1], load_floats(x) * q[0]);
  else
    return sum_products<kFused, kCount / 2>(x, q) +
           sum_products<kFused, kCount / 2>(x + kCount / 2 * kLanes, q + kCount / 2);
}

// Codes as floats: q minus the constant zero point, which is exact in f32.
template <int kBits, bool kSigned>
class Numbers {
 public:
  explicit Numbers(int zero_point) : zero_point_(Ints{} + zero_point) {
#if defined(__AVX512F__)
    alignas(64) float table[16] = {};
    if constexpr (kBits <= 4)
      for (int index = 0; index < 16; ++index) {
        const int code = index & ((1 << kBits) - 1), half = 1 << (kBits - 1);
        table[index] = static_cast<float>((kSigned ? (code ^ half) - half : code) - zero_point);
      }
    table_ = _mm512_load_ps(table);
    if constexpr (kBits == 8) table_ = _mm512_set1_ps(static_cast<float>((1 << 23) + (kSigned ? 128 : 0) + zero_point));
#endif
  }

  // The code that begins at bit `kShift` of each word.
  template <int kShift>
  Floats look_up(const Words& words) const {
#if defined(__AVX512F__)
    if constexpr (kBits <= 4)  // the permutation uses the low four bits only, so no mask is needed
      return _mm512_permutexvar_ps(_mm512_srli_epi32(std::bit_cast<__m512i>(words), kShift), table_);
    if constexpr (kBits == 8) {  // a byte in the low bits of 2^23 is added to it
      const __m512i codes = std::bit_cast<__m512i>(kSigned ? words ^ 0x80808080u : words);
      const __m512i lanes = _mm512_set4_epi32(12, 8, 4, 0), order = _mm512_add_epi32(lanes, _mm512_set1_epi32(kShift / 8));
      const __m512i added = _mm512_mask_shuffle_epi8(_mm512_set1_epi32(0x4b000000), 0x1111111111111111u, codes, order);
      return _mm512_castsi512_ps(added) - table_;
    }
#endif
    Ints q;
    if constexpr (kSigned)
      q = std::bit_cast<Ints>(words << (32 - kBits - kShift)) >> (32 - kBits);
    else
      q = std::bit_cast<Ints>((words >> kShift) & ((1u << kBits) - 1));
    return __builtin_convertvector(q - zero_point_, Floats);
  }

 private:
  Ints zero_point_;
#if defined(__AVX512F__)
  __m512 table_;  // values of codes; for 8 bits, the number to subtract from 2^23 + code
#endif
};

}  // namespace
}  // namespace ingot::INGOT_ISA
