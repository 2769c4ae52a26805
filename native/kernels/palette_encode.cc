// Weights of values in 65536 bins, and the nearest entry of a codebook for each value (spec/palette.md); vectors are in
// palette_vectors.cc.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/palette.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kHalf = kBins / 2;

// The bits of the value at position `place` in ascending order, negative values first.
inline std::uint16_t key_at(std::size_t position) {
  return static_cast<std::uint16_t>(position < kHalf ? kBins - 1 - position : position - kHalf);
}

template <Dtype kDtype>
std::size_t count(const void* source, std::size_t n, std::size_t cols, const double* importance, double scale,
                  double* weights, double* sums) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(source);
  for (std::size_t row = 0; row < n; row += cols)
    for (std::size_t col = 0; col < cols; ++col) {
      const double weight = importance ? importance[col] : 1.0;
      if constexpr (kDtype == Dtype::f16 || kDtype == Dtype::bf16) {
        weights[in[row + col]] += weight;
      } else {
        const float value = Element<kDtype>::load(in[row + col]);
        if (!is_finite(value)) return row + col;
        const std::uint16_t key = f32_to_f16(static_cast<float>(static_cast<double>(value) * scale));
        weights[key] += weight;
        sums[key] += weight * static_cast<double>(value);
      }
    }
  return n;
}

template <Dtype kDtype>
std::size_t first_bad(const void* source, std::size_t n) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(source);
  constexpr unsigned exponent = kDtype == Dtype::f16 ? 0x7c00 : 0x7f80;
  std::size_t i = 0;
  while (i < n && (in[i] & exponent) != exponent) ++i;
  return i;
}

// Fills `codes` with a table over all 16-bit values: a range of it per entry.
template <Dtype kDtype>
void assign_narrow(const void* source, std::size_t n, const double* thresholds, std::size_t k, std::uint8_t* codes) {
  std::vector<std::uint8_t> table(kBins);
  const auto above = [](std::size_t position, double limit) {
    return static_cast<double>(Element<kDtype>::load(key_at(position))) > limit;
  };
  constexpr std::size_t infinity = kDtype == Dtype::f16 ? 0x7c00 : 0x7f80;
  std::size_t from = 0;
  for (std::size_t entry = 0; entry < k; ++entry) {
    std::size_t to = kBins;
    if (entry + 1 < k) {  // the first finite value above the threshold
      std::size_t low = kHalf - infinity - 1, high = kHalf + infinity;
      while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (above(middle, thresholds[entry]))
          high = middle;
        else
          low = middle + 1;
      }
      to = low;
    }
    if (to <= from) continue;
    const auto code = static_cast<std::uint8_t>(entry);
    std::uint8_t* const bits = table.data();  // negative values are in reverse order at the end
    if (from < kHalf) std::fill(bits + kBins - std::min(to, kHalf), bits + kBins - from, code);
    if (to > kHalf) std::fill(bits + std::max(from, kHalf) - kHalf, bits + to - kHalf, code);
    from = to;
  }
  const auto* in = static_cast<const std::uint16_t*>(source);
  for (std::size_t i = 0; i < n; ++i) codes[i] = table[in[i]];
}

// Bisection without branches; after the last threshold there is infinity.
template <Dtype kDtype>
void assign_wide(const void* source, std::size_t n, const double* thresholds, std::size_t k, std::uint8_t* codes) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(source);
  double limits[256];
  for (std::size_t i = 0; i < 256; ++i) limits[i] = i + 1 < k ? thresholds[i] : std::numeric_limits<double>::infinity();
  const std::size_t first = std::bit_ceil(k) / 2;
  for (std::size_t i = 0; i < n; ++i) {
    const double value = static_cast<double>(Element<kDtype>::load(in[i]));
    std::size_t code = 0;
    for (std::size_t step = first; step > 0; step /= 2) code += value > limits[code + step - 1] ? step : 0;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

}  // namespace

std::size_t palette_count(const void* in, Dtype type, std::size_t n, std::size_t cols, const double* importance,
                          int exponent, double* weights, double* sums) {
  const double scale = std::ldexp(1.0, exponent);
  switch (type) {
    case Dtype::f16: {
      const std::size_t bad = first_bad<Dtype::f16>(in, n);
      return bad < n ? bad : count<Dtype::f16>(in, n, cols, importance, scale, weights, sums);
    }
    case Dtype::bf16: {
      const std::size_t bad = first_bad<Dtype::bf16>(in, n);
      return bad < n ? bad : count<Dtype::bf16>(in, n, cols, importance, scale, weights, sums);
    }
    case Dtype::f32:
      return count<Dtype::f32>(in, n, cols, importance, scale, weights, sums);
    default:
      return count<Dtype::f64>(in, n, cols, importance, scale, weights, sums);
  }
}

void palette_assign(const void* in, Dtype type, std::size_t n, const double* thresholds, std::size_t k,
                    std::uint8_t* codes) {
  switch (type) {
    case Dtype::f16:
      return assign_narrow<Dtype::f16>(in, n, thresholds, k, codes);
    case Dtype::bf16:
      return assign_narrow<Dtype::bf16>(in, n, thresholds, k, codes);
    case Dtype::f32:
      return assign_wide<Dtype::f32>(in, n, thresholds, k, codes);
    default:
      return assign_wide<Dtype::f64>(in, n, thresholds, k, codes);
  }
}

}  // namespace ingot::INGOT_ISA
