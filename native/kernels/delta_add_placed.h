// Adds differences at some positions to a base. The difference of all other elements is 0, which changes only zeros and
// NaNs.
#pragma once
#include <cstring>

#include "kernels/delta_add_sums.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kPlaced = kBlock;  // elements of a block, all of which may have a difference

// round(0 + x), or round(x - 0).
template <Dtype kDtype, bool kLess>
TypeOf<kDtype> with_zero(TypeOf<kDtype> x) {
  if constexpr (kDtype == Dtype::f32) {
    return kLess ? sum_of<true>(x, 0.0f) : sum_of<false>(0.0f, x);
  } else {
    constexpr std::uint16_t kInfinity = kDtype == Dtype::f16 ? 0x7c00 : 0x7f80, kQuiet = kDtype == Dtype::f16 ? 0x200 : 0x40;
    const std::uint16_t magnitude = x & 0x7fff, number = kLess || magnitude ? x : std::uint16_t{0};
    return magnitude > kInfinity ? static_cast<std::uint16_t>(x | kQuiet) : number;
  }
}

// `out` may be the base: a block's elements are read before anything is written to it.
template <Dtype kDtype, bool kLess>
void add_placed(const Placed& values, const Addition& addition) {
  using T = TypeOf<kDtype>;
  const T* base = static_cast<const T*>(addition.base);
  const float* from = static_cast<const float*>(values.values);
  T *out = static_cast<T*>(addition.out), *back = static_cast<T*>(addition.back);
  alignas(64) T buffer[kPlaced], some[kPlaced], sums[kPlaced];
  std::size_t next = 0;
  for (std::size_t start = 0; start < addition.count; start += kPlaced) {
    const std::size_t n = addition.count - start < kPlaced ? addition.count - start : kPlaced, first = next;
    const std::int64_t* next_positions = values.positions + first;
    std::memcpy(buffer, base + start, n * sizeof *buffer);
    for (; next < values.count; ++next) {
      const std::size_t index = static_cast<std::size_t>(values.positions[next]) - start;
      if (index >= n) break;
      some[next - first] = buffer[index];
    }
    const std::size_t count = next - first;
    add_some<kDtype, kLess>(from + first, some, count, sums);
    for (std::size_t i = 0; i < n; ++i) out[start + i] = with_zero<kDtype, kLess>(buffer[i]);
    if (back) std::memcpy(back + start, out + start, n * sizeof *back);  // minus 0 leaves them unchanged
    for (std::size_t i = 0; i < count; ++i) out[next_positions[i]] = sums[i];
    if (!back) continue;
    add_some<kDtype, true>(from + first, sums, count, some);
    for (std::size_t i = 0; i < count; ++i) back[next_positions[i]] = some[i];
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
