// Finds the magnitude of the k-th largest of many values: by a sample and the values near its estimate, or by counting.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace ingot::INGOT_ISA {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr std::size_t kBins = std::size_t{1} << 16;
constexpr std::size_t kSample = std::size_t{1} << 15;  // size of the sample
constexpr std::size_t kSmall = 4 * kSample;            // number of values below which a sample does not pay

std::uint32_t magnitude(float x) { return std::bit_cast<std::uint32_t>(x) & kMagnitude; }

// Walks bins from the top until they contain `k` values; returns the bin, and decreases `k` by the number of values
// above it.
std::size_t bin_of(const std::uint64_t* bins, std::size_t k, std::size_t& above) {
  std::size_t bin = kBins - 1;
  while (above + bins[bin] < k) above += bins[bin--];
  return bin;
}

// The magnitude of the k-th largest value, and the number of strictly larger values.
struct TopBound {
  std::uint32_t bits;
  std::size_t above;
};

// Returns magnitudes between which that of the k-th largest value very likely is, from a sample.
struct Bracket {
  std::uint32_t low, high;
};

template <class At>
Bracket bracket_of(const At& value_at, std::size_t n, std::size_t k) {
  std::vector<std::uint32_t> sample(kSample);
  // An odd step that is not a simple fraction of n visits all columns of a matrix.
  const std::size_t step = n / kSample | 1;
  for (std::size_t i = 0, at = 0; i < kSample; ++i, at = at + step < n ? at + step : at + step - n)
    sample[i] = magnitude(value_at(at));
  const double rank = static_cast<double>(k) / static_cast<double>(n) * kSample;
  const double slack = 5 * __builtin_sqrt(rank) + 5;
  const auto element_at = [&](double index) {
    const std::size_t position = static_cast<std::size_t>(index < 0 ? 0 : index);
    if (position >= kSample) return std::uint32_t{0};
    const auto middle = sample.begin() + static_cast<std::ptrdiff_t>(position);
    std::nth_element(sample.begin(), middle, sample.end(), std::greater<>());
    return *middle;
  };
  const std::uint32_t low = element_at(rank + slack);
  return {low, rank < slack ? kMagnitude : element_at(rank - slack)};
}

template <class At>
Bracket bracket_in(std::size_t n, std::size_t k, const At& value_at) {
  return n < kSmall ? Bracket{0, kMagnitude} : bracket_of(value_at, n, k);
}

// Finds the bound among values that include the k largest, and that is probably inside of the bracket.
TopBound bound_among(const float* values, std::size_t n, std::size_t k, const Bracket& bracket) {
  std::size_t above = 0, reach = 0;
  for (std::size_t start = 0; start < n; start += kSmall) {  // blocks: 32-bit sums vectorize better
    const std::size_t stop = n - start < kSmall ? n : start + kSmall;
    std::uint32_t mask = 0, more = 0;
    for (std::size_t i = start; i < stop; ++i) {
      mask += magnitude(values[i]) > bracket.high;
      more += magnitude(values[i]) >= bracket.low;
    }
    above += mask, reach += more;
  }
  if (above >= k || reach < k) return bound_among(values, n, k, {0, kMagnitude});  // the sample was misleading
  const auto filled = std::make_unique_for_overwrite<std::uint32_t[]>(reach - above + 1);  // one more is written to
  const std::span doubtful(filled.get(), reach - above);
  for (std::size_t i = 0, at = 0; i < n; ++i) {
    filled[at] = magnitude(values[i]);
    at += (filled[at] >= bracket.low) & (filled[at] <= bracket.high);
  }
  const auto middle = doubtful.begin() + static_cast<std::ptrdiff_t>(k - above - 1);
  std::nth_element(doubtful.begin(), middle, doubtful.end(), std::greater<>());
  const std::uint32_t bits = *middle;
  for (auto m = doubtful.begin(); m != middle; ++m) above += *m > bits;
  return {bits, above};
}

// Finds the bound by counting, for any values.
TopBound bound_by_bins(const float* in, std::size_t n, std::size_t k) {
  const auto bins = std::make_unique<std::uint64_t[]>(2 * kBins);
  std::uint64_t *high = bins.get(), *low = high + kBins;
  for (std::size_t i = 0; i < n; ++i) ++high[magnitude(in[i]) >> 16];
  std::size_t above = 0;
  const std::uint32_t bin = static_cast<std::uint32_t>(bin_of(high, k, above));
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t m = magnitude(in[i]);
    if (m >> 16 == bin) ++low[m & 0xffffu];
  }
  const std::uint32_t remainder = static_cast<std::uint32_t>(bin_of(low, k, above));
  return {bin << 16 | remainder, above};
}

}  // namespace
}  // namespace ingot::INGOT_ISA
