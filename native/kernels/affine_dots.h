// Sums of products of bytes, four per lane: an unsigned code and a signed x. They are exact in 32 bits, so all
// instruction sets give the same result. Eight of them, one after the other, are a block of 32 columns.
#pragma once
#include "kernels/affine_matmul_lanes.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

#if defined(__aarch64__)
// The instructions may be unknown to the compiler's target. GNU's assembler accepts a directive for the rest of the
// file. Clang's assembler forgets it after the statement and needs an attribute of the function, which then is not
// inlined.
#if defined(__ARM_FEATURE_DOTPROD)
#define INGOT_DOTPROD
#define INGOT_WITH_DOTPROD
#elif defined(__clang__)
#define INGOT_DOTPROD
#define INGOT_WITH_DOTPROD __attribute__((target("dotprod")))
#else
#define INGOT_DOTPROD ".arch armv8.2-a+dotprod\n\t"
#define INGOT_WITH_DOTPROD
#endif

constexpr bool kSignedCodes = true;  // codes of 8 bits minus 128: only signed bytes can be multiplied
#else
constexpr bool kSignedCodes = false;
#endif

inline std::int32_t load_four(const std::int8_t* x) {
  std::uint32_t four;
  std::memcpy(&four, x, 4);
  if constexpr (std::endian::native == std::endian::big) four = __builtin_bswap32(four);
  return static_cast<std::int32_t>(four);
}

inline Ints splat_int(std::int32_t value) {
#if defined(__AVX512F__)
  return std::bit_cast<Ints>(_mm512_set1_epi32(value));
#elif defined(__AVX2__)
  return std::bit_cast<Ints>(_mm256_set1_epi32(value));
#else
  return Ints{} + value;
#endif
}

#if defined(__AVX512BW__)
#define INGOT_WIDE(name) _mm512_##name
using FullVector = __m512i;
#elif defined(__AVX2__)
#define INGOT_WIDE(name) _mm256_##name
using FullVector = __m256i;
#elif defined(__SSE2__)
#define INGOT_WIDE(name) _mm_##name
using FullVector = __m128i;
#endif

// Addition of products for codes of `kBits` bits.
template <int kBits, bool kDots>
struct Dots {
#if defined(__AVX2__)
  // In 16 bits: the pairs of a block sum to at most 8 * 2 * 15 * 127.
  static constexpr bool kNarrow = kBits <= 4 && !kDots;
#else
  static constexpr bool kNarrow = false;
#endif
#if defined(__aarch64__)
  static constexpr bool kByBlocks = kDots;
#else
  static constexpr bool kByBlocks = false;
#endif

  static Ints begin(std::int32_t start) { return kNarrow ? Ints{} : splat_int(start); }

  static Ints add(Ints sum, const Words& codes, const std::int8_t* x) {
#if defined(__AVX512BW__)
    if constexpr (kDots) {  // AVX512_VNNI, which x86-64-v4 does not include: the caller checks the processor
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const Four*>(x)));
      return sum;
    }
#endif
    const Words four = std::bit_cast<Words>(splat_int(load_four(x)));
#if defined(__AVX2__)
    if constexpr (kNarrow)
      return std::bit_cast<Ints>(INGOT_WIDE(add_epi16)(
          std::bit_cast<FullVector>(sum),
          INGOT_WIDE(maddubs_epi16)(std::bit_cast<FullVector>(codes), std::bit_cast<FullVector>(four))));
#endif
#if defined(__SSE2__)
    const FullVector even = INGOT_WIDE(srai_epi16)(INGOT_WIDE(slli_epi16)(std::bit_cast<FullVector>(four), 8), 8);
    const FullVector parity = INGOT_WIDE(srai_epi16)(std::bit_cast<FullVector>(four), 8);
    const Words low = codes & 0x00ff00ffu, high = (codes >> 8) & 0x00ff00ffu;
    return sum + std::bit_cast<Ints>(INGOT_WIDE(madd_epi16)(std::bit_cast<FullVector>(low), even)) +
           std::bit_cast<Ints>(INGOT_WIDE(madd_epi16)(std::bit_cast<FullVector>(high), parity));
#elif defined(__aarch64__)
    const int8x16_t w = std::bit_cast<int8x16_t>(codes), a = std::bit_cast<int8x16_t>(four);
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
    return sum + std::bit_cast<Ints>(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#else
    for (int i = 0; i < 4; ++i)
      sum += std::bit_cast<Ints>((codes >> (8 * i)) & 0xffu) * (std::bit_cast<Ints>(four << (24 - 8 * i)) >> 24);
    return sum;
#endif
  }

#if defined(__aarch64__)
  // Adds a block of `kRows` rows of x with instructions that not every processor has; the caller checks.
  template <std::size_t kRows>
  INGOT_WITH_DOTPROD static void add_block(Ints (&sums)[kRows], const std::uint8_t* codes, const std::int8_t* x) {
    for (std::size_t half = 0; half < 2; ++half) {
      int8x16_t words[4], four[kRows];
      for (std::size_t word = 0; word < 4; ++word)
        words[word] = vreinterpretq_s8_u8(vld1q_u8(codes + (4 * half + word) * kVectorBytes));
      for (std::size_t m = 0; m < kRows; ++m) four[m] = vld1q_s8(x + m * 32 + 16 * half);
      for (std::size_t m = 0; m < kRows; ++m)
        asm(INGOT_DOTPROD "sdot %0.4s, %1.16b, %5.4b[0]\n\tsdot %0.4s, %2.16b, %5.4b[1]\n\t"
            "sdot %0.4s, %3.16b, %5.4b[2]\n\tsdot %0.4s, %4.16b, %5.4b[3]"
            : "+&w"(sums[m]) : "w"(words[0]), "w"(words[1]), "w"(words[2]), "w"(words[3]), "w"(four[m]));
    }
  }
#endif

  static Floats total(const Ints& sum, [[maybe_unused]] std::int32_t start) {
#if defined(__AVX2__)
    if constexpr (kNarrow) {
      const FullVector pairs = INGOT_WIDE(madd_epi16)(std::bit_cast<FullVector>(sum), INGOT_WIDE(set1_epi16)(1));
      return __builtin_convertvector(std::bit_cast<Ints>(pairs) + splat_int(start), Floats);
    }
#endif
    return __builtin_convertvector(sum, Floats);
  }

 private:
  using Four = std::uint32_t __attribute__((may_alias, aligned(4)));
};

// a * b + c, rounded once on every machine.
inline Floats fused_once(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fused(a, b, c);
#else
  Floats out;
  for (std::size_t i = 0; i < kWidth; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#endif
}

}  // namespace
}  // namespace ingot::INGOT_ISA
