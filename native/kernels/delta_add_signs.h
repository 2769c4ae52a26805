// Adds signs with one scale to bf16 in registers: even and odd elements separately, in the halves of 32-bit words.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using Singles = float __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kSigns = kVectorBytes / 2;  // bits that a vector's elements take, two in each word

// The bit of each even element, or of each odd one, in a word of their bits; the first bit of a byte is the highest.
constexpr std::array<std::uint32_t, kSigns / 2> sign_bits(std::size_t parity) {
  std::array<std::uint32_t, kSigns / 2> result{};
  for (std::size_t lane = 0; lane < result.size(); ++lane) {
    const std::size_t index = 2 * lane + parity;
    result[lane] = std::uint32_t{0x80} >> index % 8 << index / 8 * 8;
  }
  return result;
}
alignas(kVectorBytes) constexpr std::array<std::uint32_t, kSigns / 2> kEvenBits = sign_bits(0), kOddBits = sign_bits(1);

// number_to_bf16 in the high half of each word; a NaN, which is quiet because it is a sum, keeps its bits.
inline Words rounded_sum(Singles sum) {
  const Words bits = std::bit_cast<Words>(sum);
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  return sum != sum ? bits : rounded;
}

// Adds as many of `n` elements as complete vectors hold; returns their number. `scale` is not NaN, so no sum depends on
// the order of its operands. `back` may be null.
template <bool kLess>
std::size_t add_signs(const std::uint8_t* bits, float scale, const std::uint16_t* base, std::size_t n, std::uint16_t* out,
                      std::uint16_t* back) {
  const Words high = Words{} + 0xffff0000u, scales = Words{} + std::bit_cast<std::uint32_t>(scale);
  Words bit[2];
  std::memcpy(&bit[0], kEvenBits.data(), sizeof bit[0]);
  std::memcpy(&bit[1], kOddBits.data(), sizeof bit[1]);
  std::size_t i = 0;
  for (; i + kSigns <= n; i += kSigns) {
    std::uint32_t signs = 0;
    std::memcpy(&signs, bits + i / 8, kSigns / 8);
    Words from, sum[2], less[2];
    std::memcpy(&from, base + i, sizeof from);
    for (std::size_t parity = 0; parity < 2; ++parity) {
      const Words minus = std::bit_cast<Words>(((Words{} + signs) & bit[parity]) == 0);
      const Singles by = std::bit_cast<Singles>(scales ^ minus << 31);
      const Singles wide = std::bit_cast<Singles>(parity ? from & high : from << 16);
      sum[parity] = rounded_sum(kLess ? wide - by : wide + by);
      if (back) less[parity] = rounded_sum(std::bit_cast<Singles>(sum[parity] & high) - by);
    }
    const Words both = sum[0] >> 16 | (sum[1] & high);
    std::memcpy(out + i, &both, sizeof both);
    if (!back) continue;
    const Words again = less[0] >> 16 | (less[1] & high);
    std::memcpy(back + i, &again, sizeof again);
  }
  return i;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
