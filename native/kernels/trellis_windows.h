// Extracts windows of streams (spec/trellis.md): twelve bits from each of many columns, at one row. All columns'
// windows begin at the same bit of their words, so that they are extracted in parallel.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/trellis.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kWindows = 1024;  // columns processed at a time
constexpr std::uint32_t kWindowMask = kTrellisStates - 1;

class RowWindows {
 public:
  RowWindows(const TrellisBand& band, std::size_t row)
      : words_(band.words), cols_(band.cols), total_(band.rows * static_cast<std::size_t>(band.bits)) {
    const std::size_t begin = row * static_cast<std::size_t>(band.bits);
    place_ = begin / 16;
    shift_ = static_cast<int>(begin % 16);
    left_ = total_ - begin;  // bits from the window's first bit to the end of the stream
  }

  // windows[j] is that of column `start + j`.
  void read(std::size_t start, std::size_t count, std::uint16_t* __restrict windows) const {
    const std::uint8_t* __restrict low = word_at(place_, start);
    if (shift_ + kTrellisBits <= 16 && left_ >= kTrellisBits) {
      for (std::size_t j = 0; j < count; ++j)
        windows[j] = static_cast<std::uint16_t>((load(low, j) >> shift_) & kWindowMask);
    } else if (left_ >= kTrellisBits) {
      const std::uint8_t* __restrict high = word_at(place_ + 1, start);
      const int up = 15 - shift_;  // and one: each shift is below 16
      for (std::size_t j = 0; j < count; ++j) {
        const auto upper = static_cast<std::uint16_t>(load(high, j) << up);
        windows[j] = static_cast<std::uint16_t>((load(low, j) >> shift_ | upper << 1) & kWindowMask);
      }
    } else {
      for (std::size_t j = 0; j < count; ++j) windows[j] = round(start + j);
    }
  }

 private:
  const std::uint8_t* word_at(std::size_t position, std::size_t col) const {
    return words_ + 2 * (position * cols_ + col);
  }

  static std::uint16_t load(const std::uint8_t* words, std::size_t j) {
    std::uint16_t word;
    std::memcpy(&word, words + 2 * j, 2);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap16(word);
    return word;
  }

  // A window that continues at the stream's first bit, several times if the stream is shorter than a window.
  std::uint16_t round(std::size_t col) const {
    const std::size_t last = (total_ + 15) / 16;
    std::uint32_t result = load(word_at(place_, col), 0);
    if (place_ + 1 < last) result |= static_cast<std::uint32_t>(load(word_at(place_ + 1, col), 0)) << 16;
    result = (result >> shift_) & ((std::uint32_t{1} << left_) - 1);  // left_ is below twelve
    const std::uint32_t first =
        load(word_at(0, col), 0) & ((std::uint32_t{1} << std::min<std::size_t>(total_, 16)) - 1);
    for (std::size_t have = left_; have < kTrellisBits; have += std::min<std::size_t>(total_, 16))
      result |= first << have;
    return static_cast<std::uint16_t>(result & kWindowMask);
  }

  const std::uint8_t* words_;
  std::size_t cols_, total_, place_, left_;
  int shift_;
};

// out[j] = values[windows[j]]
inline void look_up(const float* __restrict values, const std::uint16_t* __restrict windows, std::size_t count,
                    float* __restrict out) {
  std::size_t j = 0;
#if defined(__AVX512F__)
  for (; j + 16 <= count; j += 16) {
    const __m512i indices = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(windows + j)));
    _mm512_storeu_ps(out + j, _mm512_i32gather_ps(indices, values, 4));
  }
#elif defined(__AVX2__)
  for (; j + 8 <= count; j += 8) {
    const __m256i indices = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(windows + j)));
    _mm256_storeu_ps(out + j, _mm256_i32gather_ps(values, indices, 4));
  }
#endif
  for (; j < count; ++j) out[j] = values[windows[j]];
}

}  // namespace
}  // namespace ingot::INGOT_ISA
