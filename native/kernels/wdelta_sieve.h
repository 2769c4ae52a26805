// Separates values by a bound: those above it are stored with their positions, the others extend the range.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/wdelta.h"

#include "kernels/vectors.h"
#include "kernels/wdelta_bound.h"

namespace ingot::INGOT_ISA {
namespace {

// Sixteen at a time, so that no comparison waits for the previous one.
using Lanes = float __attribute__((vector_size(64)));
constexpr std::size_t kLanes = 16;

void widen(FloatRange& range, float x) {
  range.low = x < range.low ? x : range.low;
  range.high = x > range.high ? x : range.high;
}

#if !defined(__AVX512F__)
using Words = std::int32_t __attribute__((vector_size(64)));
#endif

// A bit for each of sixteen values whose magnitude is above `below`; the others extend the range.
inline std::uint32_t sieve(const float* in, std::int32_t below, Lanes& lows, Lanes& highs) {
#if defined(__AVX512F__)
  const __m512 x = _mm512_loadu_ps(in);
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(kMagnitude)));
  const __mmask16 others = _mm512_cmple_epi32_mask(bits, _mm512_set1_epi32(below));
  lows = _mm512_mask_min_ps(lows, others, lows, x);
  highs = _mm512_mask_max_ps(highs, others, highs, x);
  return static_cast<std::uint32_t>(others) ^ 0xffffu;
#else
  Lanes x;
  Words bits;
  std::memcpy(&x, in, sizeof x);
  std::memcpy(&bits, in, sizeof bits);
  const Words large = (bits & static_cast<std::int32_t>(kMagnitude)) > below;
  lows = (x < lows) & ~large ? x : lows;
  highs = (x > highs) & ~large ? x : highs;
  std::uint32_t hits = 0;
#if defined(__AVX2__)
  float masks[kLanes];
  std::memcpy(masks, &large, sizeof masks);
  hits = static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(masks))) |
         static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(masks + 8))) << 8;
#else
  for (std::size_t j = 0; j < kLanes; ++j) hits |= (static_cast<std::uint32_t>(large[j]) & 1u) << j;
#endif
  return hits;
#endif
}

// Separates differences: stores the selected ones, and computes the range of the others. Positions are counted, or
// given.
class Sieve {
 public:
  explicit Sieve(const TopPlaces& to, const std::int64_t* sorted = nullptr)
      : to_(to), known_(sorted), equals_(to.equals) {}

  // Returns false if there is no space.
  bool take(std::size_t start, std::size_t n, const float* in) {
    const std::int32_t below = equals_ ? to_.bound - 1 : to_.bound;
    Lanes lows = lows_, highs = highs_;
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      std::uint32_t hits = sieve(in + i, below, lows, highs);
      if (!hits || put_sixteen(hits, start + i, in + i)) continue;
      for (; hits; hits &= hits - 1) {
        const std::size_t index = i + static_cast<std::size_t>(std::countr_zero(hits));
        if (!put(start + index, in[index])) return false;
      }
    }
    for (; i < n; ++i)
      if (static_cast<std::int32_t>(magnitude(in[i])) <= below)
        widen(others_, in[i]);
      else if (!put(start + i, in[i]))
        return false;
    lows_ = lows, highs_ = highs;
    return true;
  }

  std::size_t count() const { return count_; }

  FloatRange others() const {
    FloatRange range = others_;
    for (std::size_t j = 0; j < kLanes; ++j) {
      range.low = lows_[j] < range.low ? lows_[j] : range.low;
      range.high = highs_[j] > range.high ? highs_[j] : range.high;
    }
    return range;
  }

 private:
  // Stores the selected ones of sixteen values, in registers; returns false if that is not possible.
  bool put_sixteen([[maybe_unused]] std::uint32_t hits, [[maybe_unused]] std::size_t index,
                   [[maybe_unused]] const float* in) {
#if defined(__AVX512F__)
    if (to_.room - count_ < kLanes) return false;
    const __m512 x = _mm512_loadu_ps(in);
    if (to_.equals) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(kMagnitude)));
      const __m512i bound = _mm512_set1_epi32(to_.bound);
      const std::uint32_t equal = _mm512_mask_cmpeq_epi32_mask(static_cast<__mmask16>(hits), bits, bound);
      const auto batch = static_cast<std::size_t>(std::popcount(equal));
      if (batch > equals_) return false;
      equals_ -= batch;
    }
    const __m512i ramp = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i first = _mm512_add_epi64(ramp, _mm512_set1_epi64(to_.offset + static_cast<std::int64_t>(index)));
    __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(8));
    if (known_) first = _mm512_loadu_si512(known_ + index), second = _mm512_loadu_si512(known_ + index + 8);
    const auto low = static_cast<__mmask8>(hits), high = static_cast<__mmask8>(hits >> 8);
    std::int64_t* offsets = to_.positions + count_;
    _mm512_storeu_si512(offsets, _mm512_maskz_compress_epi64(low, first));
    _mm512_storeu_si512(offsets + std::popcount(hits & 0xffu), _mm512_maskz_compress_epi64(high, second));
    _mm512_storeu_ps(to_.values + count_, _mm512_maskz_compress_ps(static_cast<__mmask16>(hits), x));
    count_ += static_cast<std::size_t>(std::popcount(hits));
    return true;
#else
    return false;
#endif
  }

  // Returns false if there is no space.
  bool put(std::size_t index, float x) {
    if (static_cast<std::int32_t>(magnitude(x)) == to_.bound) {
      if (!equals_) {
        widen(others_, x);
        return true;
      }
      --equals_;
    }
    if (count_ == to_.room) return false;
    to_.positions[count_] = known_ ? known_[index] : to_.offset + static_cast<std::int64_t>(index);
    to_.values[count_++] = x;
    return true;
  }

  static constexpr float kEndless = std::bit_cast<float>(kInfinity);
  const TopPlaces to_;
  const std::int64_t* const known_;
  std::size_t equals_, count_ = 0;
  FloatRange others_{kEndless, -kEndless};
  Lanes lows_ = Lanes{} + kEndless, highs_ = Lanes{} - kEndless;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
