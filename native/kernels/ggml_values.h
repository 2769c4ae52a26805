// Decodes blocks of ggml whose codes are numbers or refer to a table of sixteen to f32 (spec/gguf.md). Codes are
// extracted sixteen at a time, as signed bytes. Products of scales and integers are exact in any order; adding or
// subtracting a minimum is the only rounding.
#pragma once
#include <array>
#include <bit>
#include <cstring>

#include "kernels/ggml_types.h"
#include "kernels/sixteen.h"

namespace ingot::INGOT_ISA {
namespace {

using Grid = const std::int8_t*;

alignas(16) constexpr std::int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice the values of E2M1; code 8 is 0.
alignas(16) constexpr std::int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <class Word>
inline Word word_at(const void* bytes) {
  Word result;
  std::memcpy(&result, bytes, sizeof result);
  return result;
}

// Low nibbles of sixteen bytes, minus `zero`, then the high nibbles.
inline void nibbles(const Byte* b, float scale, int zero, float* out) {
  const Bytes16 q = sixteen(b);
  times(less(q & 15, zero), scale, out);
  times(less(q >> 4, zero), scale, out + 16);
}

inline void looked_up(Bytes16 q, const std::int8_t* table, float scale, float* out) {
  times(entries(table, q & 15), scale, out);
  times(entries(table, q >> 4), scale, out + 16);
}

// Nibbles with a fifth bit each.
struct Fives {
  Bytes16 low, high;
  Fives(const Byte* bits, const Byte* b) {
    const auto fifth = word_at<std::uint32_t>(bits);
    const Bytes16 q = sixteen(b);
    low = (q & 15) | (spread(fifth & 0xffff) & 16);
    high = (q >> 4) | (spread(fifth >> 16) & 16);
  }
};

template <Ggml kType>
void block(const Byte* b, Grid grid, float* out);

template <>
inline void block<Ggml::q1_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) times(less(spread(u16_at(b + 2 + 2 * k)) & 2, 1), d, out + 16 * k);
}

// Byte 4 k + j has the elements from 16 k + 4 j on.
template <>
inline void block<Ggml::q2_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 4; ++k) {
    std::uint64_t low = u16_at(b + 2 + 4 * k), high = u16_at(b + 4 + 4 * k);
    for (std::uint64_t* word : {&low, &high}) {  // two bits to a byte
      *word = (*word | *word << 24) & 0x000000ff000000ff;
      *word = (*word | *word << 12) & 0x000f000f000f000f;
      *word = (*word | *word << 6) & 0x0303030303030303;
    }
    times(less(reinterpret_cast<Bytes16>(Words2{low, high}), 1), d, out + 16 * k);
  }
}

template <>
inline void block<Ggml::q4_0>(const Byte* b, Grid, float* out) {
  nibbles(b + 2, f16_at(b), 8, out);
}

template <>
inline void block<Ggml::q4_1>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b), minimum = -f16_at(b + 2);
  const Bytes16 q = sixteen(b + 4);
  times_less(less(q & 15, 0), d, minimum, out);
  times_less(less(q >> 4, 0), d, minimum, out + 16);
}

template <>
inline void block<Ggml::q5_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b);
  const Fives q(b + 2, b + 6);
  times(less(q.low, 16), d, out);
  times(less(q.high, 16), d, out + 16);
}

template <>
inline void block<Ggml::q5_1>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b), minimum = -f16_at(b + 2);
  const Fives q(b + 4, b + 8);
  times_less(less(q.low, 0), d, minimum, out);
  times_less(less(q.high, 0), d, minimum, out + 16);
}

template <>
inline void block<Ggml::q8_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b);
  times(less(sixteen(b + 2), 0), d, out);
  times(less(sixteen(b + 18), 0), d, out + 16);
}

// Two bits of group `k` of 16, in runs of 32 bytes.
inline Bytes16 twos(const Byte* from, int k) { return sixteen(from + k / 8 * 32 + k % 2 * 16) >> (k % 8 / 2 * 2) & 3; }

template <>
inline void block<Ggml::q2_k>(const Byte* b, Grid, float* out) {
  float scales[16], minima[16];
  const Bytes16 both = sixteen(b);
  times(less(both & 15, 0), f16_at(b + 80), scales);
  times(less(both >> 4, 0), f16_at(b + 82), minima);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) times_less(less(twos(b + 16, k), 0), scales[k], minima[k], out + 16 * k);
}

template <>
inline void block<Ggml::q3_k>(const Byte* b, Grid, float* out) {
  float scales[16];
  const auto low = word_at<std::uint64_t>(b + 96);
  const auto high = word_at<std::uint32_t>(b + 104);
  const Bytes16 lows = reinterpret_cast<Bytes16>(Words2{low, low >> 4}) & 15;
  const Bytes16 highs = reinterpret_cast<Bytes16>(Words4{high, high >> 2, high >> 4, high >> 6}) & 3;
  times(less(lows | highs << 4, 32), f16_at(b + 108), scales);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    const Bytes16 top = sixteen(b + k % 2 * 16) >> (k / 2) & 1;
    times(less(twos(b + 32, k) | top << 2, 4), scales[k], out + 16 * k);
  }
}

// Scales and minima of Q4_K and Q5_K: six bits each, in 12 bytes.
struct SixBits {
  float numbers[16];  // scales, then minima
  explicit SixBits(const Byte* b) {
    const auto first = word_at<std::uint32_t>(b + 4), second = word_at<std::uint32_t>(b + 8),
               rest = word_at<std::uint32_t>(b + 12);
    const Words4 low = {first, rest & 0x0f0f0f0f, second, rest >> 4 & 0x0f0f0f0f},
                 high = {0, first >> 2, 0, second >> 2};
    const Bytes16 full = (reinterpret_cast<Bytes16>(low) & 63) | (reinterpret_cast<Bytes16>(high) & 48);
    times(less(full, 0), 1, numbers);
    const float d = f16_at(b), dmin = f16_at(b + 2);
    for (int k = 0; k < 8; ++k) numbers[k] *= d;
    for (int k = 8; k < 16; ++k) numbers[k] *= dmin;
  }
};

// The values of Q4_K and Q5_K, whose nibbles begin at `quants`; `top(k)` are the bits above them for group `k` of 16.
template <class Top>
inline void six_bit_block(const Byte* b, const Byte* quants, const Top& top, float* out) {
  const SixBits scales(b);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    const Bytes16 q = sixteen(quants + k / 4 * 32 + k % 2 * 16) >> (k % 4 / 2 * 4) & 15;
    times_less(less(q | top(k), 0), scales.numbers[k / 2], scales.numbers[8 + k / 2], out + 16 * k);
  }
}

template <>
inline void block<Ggml::q4_k>(const Byte* b, Grid, float* out) {
  six_bit_block(b, b + 16, [](int) { return Bytes16{}; }, out);
}

template <>
inline void block<Ggml::q5_k>(const Byte* b, Grid, float* out) {
  const auto top = [b](int k) -> Bytes16 { return (sixteen(b + 16 + k % 2 * 16) >> (k / 2) & 1) << 4; };
  six_bit_block(b, b + 48, top, out);
}

template <>
inline void block<Ggml::q6_k>(const Byte* b, Grid, float* out) {
  float scales[16];
  times(less(sixteen(b + 192), 0), f16_at(b + 208), scales);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    const Bytes16 q = sixteen(b + k / 8 * 64 + k % 4 * 16) >> (k % 8 / 4 * 4) & 15;
    times(less(q | twos(b + 128, k) << 4, 32), scales[k], out + 16 * k);
  }
}

template <>
inline void block<Ggml::iq4_nl>(const Byte* b, Grid, float* out) {
  looked_up(sixteen(b + 2), kIq4, f16_at(b), out);
}

template <>
inline void block<Ggml::iq4_xs>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k)
    looked_up(sixteen(b + 8 + 16 * k), kIq4, d * static_cast<float>(iq4_xs_scale(b, k)), out + 32 * k);
}

// The first digit of q / 256 in base 3, minus 1: q * 3 >> 8.
inline Codes16 third(Bytes16 q) { return Codes16{} - 1 - (q > 85) - (q > 170); }

// Elements of a run of bytes in base 3; the first digits of all bytes come first.
template <int kRun>
inline void thirds(const Byte* from, float d, float* out) {
  for (int j = 0; j < kRun; j += 16) {
    Bytes16 q = sixteen(from + j);
    for (int n = 0; n < 5; ++n, q = q + q + q) times(third(q), d, out + n * kRun + j);
  }
}

template <>
inline void block<Ggml::tq1_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b + 52);
  thirds<32>(b, d, out);
  thirds<16>(b + 32, d, out + 160);
  const auto last = word_at<std::uint32_t>(b + 48);  // four bytes of four digits
  const Bytes16 power = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
  times(third(reinterpret_cast<Bytes16>(Words4{last, last, last, last}) * power), d, out + 240);
}

template <>
inline void block<Ggml::tq2_0>(const Byte* b, Grid, float* out) {
  const float d = f16_at(b + 64);
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) times(less(twos(b, k), 1), d, out + 16 * k);
}

template <>
inline void block<Ggml::mxfp4>(const Byte* b, Grid, float* out) {
  const std::uint32_t e = b[0];
  looked_up(sixteen(b + 1), kE2m1, std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23), out);
}

// Half of the numbers of E4M3, without the sign; 0x7F is 0.
constexpr float half_of_e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float power = std::bit_cast<float>(static_cast<std::uint32_t>(exponent - 11 + 127) << 23);
  if (code == 0x7f) return 0;
  return exponent == 0 ? static_cast<float>(mantissa) * 0x1p-10f : static_cast<float>(mantissa + 8) * power;
}
constexpr auto kHalfOfE4m3 = [] {
  std::array<float, 256> all{};
  for (int code = 0; code < 256; ++code) all[static_cast<std::size_t>(code)] = half_of_e4m3(code);
  return all;
}();

template <>
inline void block<Ggml::nvfp4>(const Byte* b, Grid, float* out) {
  for (int k = 0; k < 4; ++k) {  // eight low nibbles, then eight high ones
    const auto q = word_at<std::uint64_t>(b + 4 + 8 * k);
    times(entries(kE2m1, reinterpret_cast<Bytes16>(Words2{q, q >> 4}) & 15), kHalfOfE4m3[b[k]], out + 16 * k);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
