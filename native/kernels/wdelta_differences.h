// Computes differences of two arrays, or reads given differences, in blocks that stay in the first-level cache.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/wdelta.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

// The sum, or difference. If operands are NaN, the result is the first NaN; compilers could exchange them.
template <bool kLess>
inline float sum_of(float first, float second) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(first);
  const float sum = kLess ? first - second : first + second;
  return (bits & 0x7fffffffu) > 0x7f800000u ? std::bit_cast<float>(bits | 0x00400000u) : sum;
}

constexpr std::size_t kDifferences = 2048;  // elements of a block

template <Dtype kDtype>
void subtract_block(const TypeOf<kDtype>* __restrict first, const TypeOf<kDtype>* __restrict second, std::size_t n,
                    float* __restrict out) {
  if constexpr (kDtype == Dtype::f16) {
    alignas(64) float minuend[kDifferences], subtrahend[kDifferences];
    load_block<kDtype>(first, n, minuend);
    load_block<kDtype>(second, n, subtrahend);
    for (std::size_t i = 0; i < n; ++i) out[i] = sum_of<true>(minuend[i], subtrahend[i]);
  } else {
    for (std::size_t i = 0; i < n; ++i)
      out[i] = sum_of<true>(Element<kDtype>::load(first[i]), Element<kDtype>::load(second[i]));
  }
}

// Writes `n` differences, at most a block's, from element `first` on.
inline void differences_of(const Differences& differences, std::size_t first, std::size_t n, float* out) {
  const auto run = [&]<Dtype kDtype>() {
    using T = TypeOf<kDtype>;
    subtract_block<kDtype>(static_cast<const T*>(differences.tuned) + first,
                           static_cast<const T*>(differences.base) + first, n, out);
  };
  if (differences.type == Dtype::f16) return run.template operator()<Dtype::f16>();
  if (differences.type == Dtype::bf16) return run.template operator()<Dtype::bf16>();
  run.template operator()<Dtype::f32>();
}

inline float difference_at(const Differences& differences, std::size_t i) {
  if (!differences.base) return static_cast<const float*>(differences.tuned)[i];
  return sum_of<true>(load_at(differences.tuned, differences.type, i), load_at(differences.base, differences.type, i));
}

// Calls `each(start, n, values)` for block after block of elements from `first` to `last`.
template <class Each>
void by_blocks(const Differences& differences, std::size_t first, std::size_t last, const Each& for_each) {
  alignas(64) float values[kDifferences];
  for (std::size_t start = first; start < last; start += kDifferences) {
    const std::size_t n = last - start < kDifferences ? last - start : kDifferences;
    if (differences.base) differences_of(differences, start, n, values);
    for_each(start, n, differences.base ? values : static_cast<const float*>(differences.tuned) + start);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
