// Decodes blocks of ggml whose indices refer to a grid to f32: IQ1, IQ2 and IQ3 (spec/gguf.md).
#pragma once
#include "kernels/ggml_values.h"

namespace ingot::INGOT_ISA {
namespace {

// Seven signs and the eighth, which makes the number of set bits even.
inline std::uint32_t even(std::uint32_t seven) {
  return seven | static_cast<std::uint32_t>(__builtin_parity(seven)) << 7;
}

// Two entries of eight values; `signs` negates some of them.
inline Codes16 eights(Grid grid, std::uint32_t first, std::uint32_t second, std::uint32_t signs) {
  const Words2 both = {word_at<std::uint64_t>(grid + 8 * first), word_at<std::uint64_t>(grid + 8 * second)};
  return negated(reinterpret_cast<Codes16>(both), spread(signs));
}

// Four entries of four values.
inline Codes16 fours(Grid grid, std::uint32_t first, std::uint32_t second, std::uint32_t three, std::uint32_t four,
                     std::uint32_t signs) {
  const Words4 all = {word_at<std::uint32_t>(grid + 4 * first), word_at<std::uint32_t>(grid + 4 * second),
                      word_at<std::uint32_t>(grid + 4 * three), word_at<std::uint32_t>(grid + 4 * four)};
  return negated(reinterpret_cast<Codes16>(all), spread(signs));
}

// Two entries of values -1, 0, 1, plus an eighth, or minus an eighth if `down`, in eighths.
inline Codes16 eighths(Grid grid, std::uint32_t first, std::uint32_t second, bool down_one, bool down_two) {
  const Words2 both = {word_at<std::uint64_t>(grid + 8 * first), word_at<std::uint64_t>(grid + 8 * second)};
  const std::uint64_t up = 0x0101010101010101, down = ~std::uint64_t{0};
  const Words2 moved = {down_one ? down : up, down_two ? down : up};
  return reinterpret_cast<Codes16>((reinterpret_cast<Bytes16>(both) << 3) + reinterpret_cast<Bytes16>(moved));
}

template <>
inline void block<Ggml::iq1_s>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b) * 0.125f;
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t word = u16_at(b + 34 + 2 * k);
    const float scale = d * static_cast<float>(2 * (word >> 12 & 7) + 1);
    const bool down = word >= 0x8000;
    for (int i = 0; i < 4; i += 2)
      times(eighths(grid, b[2 + 4 * k + i] | (word >> 3 * i & 7) << 8, b[3 + 4 * k + i] | (word >> (3 * i + 3) & 7) << 8,
                    down, down),
            scale, out + 32 * k + 8 * i);
  }
}

template <>
inline void block<Ggml::iq1_m>(const Byte* b, Grid grid, float* out) {
  std::uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) bits |= u16_at(b + 48 + 2 * k) >> 12 << 4 * k;
  const float d = half(bits) * 0.125f;
  for (int k = 0; k < 16; ++k) {
    const std::uint32_t three = u16_at(b + 48 + k / 4 * 2) >> 3 * (k % 4) & 7, more = b[32 + k];
    const float scale = d * static_cast<float>(2 * three + 1);
    times(eighths(grid, b[2 * k] | (more & 7) << 8, b[2 * k + 1] | (more >> 4 & 7) << 8, (more & 8) != 0, more >= 128), scale,
          out + 16 * k);
  }
}

template <>
inline void block<Ggml::iq2_xxs>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) {
    const Byte* bytes = b + 2 + 8 * k;
    const auto word = word_at<std::uint32_t>(bytes + 4);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
    for (int i = 0; i < 4; i += 2)
      times(eights(grid, bytes[i], bytes[i + 1], even(word >> 7 * i & 127) | even(word >> (7 * i + 7) & 127) << 8),
            scale, out + 32 * k + 8 * i);
  }
}

template <>
inline void block<Ggml::iq2_xs>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 16; ++k) {
    const std::uint32_t first = u16_at(b + 2 + 4 * k), second = u16_at(b + 4 + 4 * k);
    const float scale = d * (0.5f + static_cast<float>(nibble(b + 66, k))) * 0.25f;
    times(eights(grid, first & 511, second & 511, even(first >> 9) | even(second >> 9) << 8), scale, out + 16 * k);
  }
}

template <>
inline void block<Ggml::iq2_s>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 16; ++k) {
    const std::uint32_t high = nibble(b + 66, k);
    const float scale = d * (0.5f + static_cast<float>(nibble(b + 74, k))) * 0.25f;
    times(eights(grid, b[2 + 2 * k] | (high & 3) << 8, b[3 + 2 * k] | (high >> 2) << 8, u16_at(b + 34 + 2 * k)), scale,
          out + 16 * k);
  }
}

template <>
inline void block<Ggml::iq3_xxs>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) {
    const auto word = word_at<std::uint32_t>(b + 66 + 4 * k);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
    for (int i = 0; i < 2; ++i) {
      const Byte* bytes = b + 2 + 8 * k + 4 * i;
      const std::uint32_t signs = even(word >> 14 * i & 127) | even(word >> (14 * i + 7) & 127) << 8;
      times(fours(grid, bytes[0], bytes[1], bytes[2], bytes[3], signs), scale, out + 32 * k + 16 * i);
    }
  }
}

template <>
inline void block<Ggml::iq3_s>(const Byte* b, Grid grid, float* out) {
  const float d = f16_at(b);
  for (int k = 0; k < 16; ++k) {
    const Byte* bytes = b + 2 + 4 * k;
    const std::uint32_t ninth = nibble(b + 66, k);
    const float scale = d * static_cast<float>(1 + 2 * nibble(b + 106, k / 2));
    times(fours(grid, bytes[0] | (ninth & 1) << 8, bytes[1] | (ninth & 2) << 7, bytes[2] | (ninth & 4) << 6,
                bytes[3] | (ninth & 8) << 5, u16_at(b + 74 + 2 * k)),
          scale, out + 16 * k);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
