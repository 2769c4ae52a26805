// Encoding of float32 differences: the largest by magnitude, 4-bit codes of the rest, signs with row sums.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr std::size_t kBins = std::size_t{1} << 16;
constexpr std::size_t kSample = std::size_t{1} << 15;  // values that tell about where the largest begin
constexpr std::size_t kSmall = 4 * kSample;            // values of which no sample is worth while
constexpr std::size_t kCodes = 4096;                   // values that wait to be packed

std::uint32_t magnitude(float x) { return std::bit_cast<std::uint32_t>(x) & kMagnitude; }

std::uint32_t largest_magnitude(const float* in, std::size_t n) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t m = magnitude(in[i]);
    most = m > most ? m : most;
  }
  return most;
}

// Walks bins from the top until they hold `k` values; returns the bin, and lowers `k` by what lies above it.
std::size_t bin_of(const std::uint64_t* bins, std::size_t k, std::size_t& above) {
  std::size_t bin = kBins - 1;
  while (above + bins[bin] < k) above += bins[bin--];
  return bin;
}

// NumPy's pairwise sum of magnitudes (numpy/_core/src/umath/loops_utils.h describes it): blocks of 128 in eight running
// sums, halves of a multiple of eight above that. The mean of a row must round to the same float16 everywhere.
float pairwise(const float* in, std::size_t n) {
  if (n < 8) {
    float sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += std::bit_cast<float>(magnitude(in[i]));
    return sum;
  }
  if (n > 128) {
    const std::size_t half = n / 2 - n / 2 % 8;
    return pairwise(in, half) + pairwise(in + half, n - half);
  }
  float sums[8];
  for (std::size_t j = 0; j < 8; ++j) sums[j] = std::bit_cast<float>(magnitude(in[j]));
  const std::size_t whole = n - n % 8;
  for (std::size_t i = 8; i < whole; i += 8)
    for (std::size_t j = 0; j < 8; ++j) sums[j] += std::bit_cast<float>(magnitude(in[i + j]));
  float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (std::size_t i = whole; i < n; ++i) sum += std::bit_cast<float>(magnitude(in[i]));
  return sum;
}

#if defined(__AVX2__)
constexpr struct Reversed {
  std::uint8_t of[256];
  constexpr Reversed() : of() {
    for (int i = 0; i < 256; ++i)
      for (int bit = 0; bit < 8; ++bit) of[i] = static_cast<std::uint8_t>(of[i] | ((i >> bit & 1) << (7 - bit)));
  }
} kReversed;
#endif

// One bit per value, set unless it is below zero, the first value in the highest bit; the last byte is filled with 0.
void pack_signs(const float* in, std::size_t n, std::uint8_t* out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(in + i), _mm256_setzero_ps(), _CMP_GE_OQ);
    out[i / 8] = kReversed.of[_mm256_movemask_ps(positive)];
  }
#endif
  for (; i < n; i += 8) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < 8 && i + j < n; ++j) byte |= unsigned{in[i + j] >= 0} << (7 - j);
    out[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// Magnitude of the k-th largest value, and how many are strictly larger.
struct TopBound {
  std::uint32_t bits;
  std::size_t above;
};

// Magnitudes between which that of the k-th largest value lies in all likelihood, by a sample.
struct Bracket {
  std::uint32_t low, high;
};

Bracket bracket_of(const float* in, std::size_t n, std::size_t k) {
  if (n < kSmall) return {0, kMagnitude};
  std::vector<std::uint32_t> sample(kSample);
  // A step that is odd and no simple fraction of n visits all columns of a matrix.
  const std::size_t step = n / kSample | 1;
  for (std::size_t i = 0, at = 0; i < kSample; ++i, at = at + step < n ? at + step : at + step - n)
    sample[i] = magnitude(in[at]);
  const double rank = static_cast<double>(k) / static_cast<double>(n) * kSample;
  const double slack = 5 * __builtin_sqrt(rank) + 5;
  const auto at = [&](double index) {
    const std::size_t place = static_cast<std::size_t>(index < 0 ? 0 : index);
    if (place >= kSample) return std::uint32_t{0};
    const auto middle = sample.begin() + static_cast<std::ptrdiff_t>(place);
    std::nth_element(sample.begin(), middle, sample.end(), std::greater<>());
    return *middle;
  };
  const std::uint32_t low = at(rank + slack);
  return {low, rank < slack ? kMagnitude : at(rank - slack)};
}

// Positions and values of all magnitudes of at least `least`; returns how many, or more than `room` where they are more.
std::size_t collect(const float* in, std::size_t n, std::uint32_t least, std::int64_t* positions, float* values,
                    std::size_t room) {
  std::size_t found = 0, i = 0;
#if defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(kMagnitude));
  const __m256i below = _mm256_set1_epi32(static_cast<int>(least) - 1);
  const auto above = [&](std::size_t at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at));
    const __m256i large = _mm256_cmpgt_epi32(_mm256_and_si256(bits, mask), below);
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(large)));
  };
  for (; i + 32 <= n; i += 32) {
    std::uint32_t hits = above(i) | above(i + 8) << 8 | above(i + 16) << 16 | above(i + 24) << 24;
    if (found + 32 > room) break;
    for (; hits; hits &= hits - 1) {
      const std::size_t at = i + static_cast<std::size_t>(std::countr_zero(hits));
      positions[found] = static_cast<std::int64_t>(at);
      values[found++] = in[at];
    }
  }
#endif
  for (; i < n; ++i) {
    if (magnitude(in[i]) < least) continue;
    if (found == room) return room + 1;
    positions[found] = static_cast<std::int64_t>(i);
    values[found++] = in[i];
  }
  return found;
}

// Finds the bound among collected values, which hold at least the k largest.
TopBound bound_among(const float* values, std::size_t n, std::size_t k, std::uint32_t high) {
  std::vector<std::uint32_t> doubtful;
  std::size_t above = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t m = magnitude(values[i]);
    if (m > high)
      ++above;
    else
      doubtful.push_back(m);
  }
  if (above >= k) return bound_among(values, n, k, kMagnitude);
  const auto middle = doubtful.begin() + static_cast<std::ptrdiff_t>(k - above - 1);
  std::nth_element(doubtful.begin(), middle, doubtful.end(), std::greater<>());
  const std::uint32_t bits = *middle;
  for (auto m = doubtful.begin(); m != middle; ++m) above += *m > bits;
  return {bits, above};
}

// The bound by counting, whatever the values are.
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
  const std::uint32_t rest = static_cast<std::uint32_t>(bin_of(low, k, above));
  return {bin << 16 | rest, above};
}

// Keeps the values that reach the bound, of those that equal it the first.
void keep(const std::int64_t* positions, const float* values, const TopBound& bound, std::size_t k,
          std::int64_t* kept_positions, float* kept_values) {
  std::size_t ties = k - bound.above;
  for (std::size_t i = 0, found = 0; found < k; ++i) {
    const std::uint32_t m = magnitude(values[i]);
    const std::size_t tie = m == bound.bits && ties != 0;
    ties -= tie;
    kept_positions[found] = positions[i];
    kept_values[found] = values[i];
    found += (m > bound.bits) | tie;
  }
}

std::size_t count_above(const float* in, std::size_t n, std::uint32_t bits) {
  std::size_t found = 0;
  for (std::size_t start = 0; start < n; start += kSmall) {  // blocks: 32-bit sums vectorize better
    const std::size_t stop = n - start < kSmall ? n : start + kSmall;
    std::uint32_t some = 0;
    for (std::size_t i = start; i < stop; ++i) some += magnitude(in[i]) > bits;
    found += some;
  }
  return found;
}

// As keep, out of all values, in whole registers once all ties are found.
void keep_of_all(const float* in, std::size_t n, const TopBound& bound, std::size_t k, std::int64_t* positions,
                 float* values) {
  std::size_t ties = k - bound.above, found = 0, i = 0;
  for (; ties != 0; ++i) {
    const std::uint32_t m = magnitude(in[i]);
    const std::size_t tie = m == bound.bits;
    ties -= tie;
    positions[found] = static_cast<std::int64_t>(i);
    values[found] = in[i];
    found += (m > bound.bits) | tie;
  }
  if (found == k) return;
  collect(in + i, n - i, bound.bits + 1, positions + found, values + found, k - found);
  for (; found < k; ++found) positions[found] += static_cast<std::int64_t>(i);
}

// Collects values and packs their codes two per byte, the first in the high bits.
class NibblePacker {
 public:
  NibblePacker(const Int4Grid& grid, std::uint8_t* out) : grid_(grid), out_(out) {}

  void add(const float* in, std::size_t n) {
    while (n) {
      const std::size_t room = kCodes - filled_, count = n < room ? n : room;
      std::memcpy(values_ + filled_, in, count * sizeof *in);
      filled_ += count;
      in += count;
      n -= count;
      if (filled_ == kCodes) flush();
    }
  }

  void finish() {
    if (filled_ % 2) values_[filled_++] = grid_.low;  // code 0
    flush();
  }

 private:
  void flush() {
    for (std::size_t i = 0; i < filled_; ++i) {
      float x = (values_[i] - grid_.low) / grid_.divisor * grid_.factor;
      x = x > 0 ? x : 0;
      x = x < 15 ? x : 15;
      // Where a unit of f32 is 1, adding rounds to nearest even and leaves the integer in the low bits.
      codes_[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(x + 0x1.8p23f) & 15u);
    }
    for (std::size_t i = 0; i < filled_ / 2; ++i)
      out_[i] = static_cast<std::uint8_t>(codes_[2 * i] << 4 | codes_[2 * i + 1]);
    out_ += filled_ / 2;
    filled_ = 0;
  }

  const Int4Grid grid_;
  std::uint8_t* out_;
  std::size_t filled_ = 0;
  alignas(64) float values_[kCodes];
  alignas(64) std::uint8_t codes_[kCodes];
};

// Sixteen at a time, so that no comparison waits for the one before.
using Lanes = float __attribute__((vector_size(64)));
constexpr std::size_t kLanes = 16;

void widen(FloatRange& range, float x) {
  range.low = x < range.low ? x : range.low;
  range.high = x > range.high ? x : range.high;
}

}  // namespace

std::size_t top_select(const float* in, std::size_t n, std::size_t k, std::int64_t* positions, float* values) {
  const Bracket bracket = bracket_of(in, n, k);
  const std::size_t room = n < kSmall ? n : bracket.low ? k + k / 2 + kSample : 0;
  const auto at = std::make_unique_for_overwrite<std::int64_t[]>(room);
  const auto found = std::make_unique_for_overwrite<float[]>(room);
  const std::size_t count = room ? collect(in, n, bracket.low, at.get(), found.get(), room) : 0;
  if (count >= k && count <= room) {
    const std::uint32_t high = n < kSmall ? kMagnitude : bracket.high;
    keep(at.get(), found.get(), bound_among(found.get(), count, k, high), k, positions, values);
  } else {  // many equal values, which then are the bound, or a sample that misled
    const std::size_t above = count > room ? count_above(in, n, bracket.low) : k;
    keep_of_all(in, n, above < k ? TopBound{bracket.low, above} : bound_by_bins(in, n, k), k, positions, values);
  }
  // What is not finite has the largest magnitudes, so that some of it is among what was kept.
  for (std::size_t i = 0; i < k; ++i)
    if (!is_finite(values[i]))
      for (std::size_t j = 0; j < n; ++j)
        if (!is_finite(in[j])) return j;
  return n;
}

FloatRange range_between(const float* in, std::size_t n, const std::int64_t* skipped, std::size_t count) {
  const float infinity = std::bit_cast<float>(kInfinity);
  FloatRange range{infinity, -infinity};
  Lanes lows = Lanes{} + infinity, highs = Lanes{} - infinity, x;
  std::size_t at = 0;
  for (std::size_t j = 0; j <= count; ++j) {
    const std::size_t end = j < count ? static_cast<std::size_t>(skipped[j]) : n;
    if (end - at < kLanes) {
      for (; at < end; ++at) widen(range, in[at]);
    } else {
      for (; at < end; at += kLanes) {
        if (end - at < kLanes) at = end - kLanes;  // once more over what was seen changes nothing
        std::memcpy(&x, in + at, sizeof x);
        lows = x < lows ? x : lows;
        highs = x > highs ? x : highs;
      }
    }
    at = end + 1;
  }
  for (std::size_t j = 0; j < kLanes; ++j) {
    range.low = lows[j] < range.low ? lows[j] : range.low;
    range.high = highs[j] > range.high ? highs[j] : range.high;
  }
  return range;
}

void int4_encode(const float* in, std::size_t n, const std::int64_t* skipped, std::size_t count, const Int4Grid& grid,
                 std::uint8_t* packed) {
  NibblePacker packer(grid, packed);
  std::size_t at = 0;
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t end = static_cast<std::size_t>(skipped[j]);
    packer.add(in + at, end - at);
    at = end + 1;
  }
  packer.add(in + at, n - at);
  packer.finish();
}

std::size_t sign_encode(const float* in, std::size_t rows, std::size_t cols, float* sums, std::uint8_t* bits) {
  const std::size_t n = rows * cols;
  std::size_t packed = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    const float* start = in + row * cols;
    if (largest_magnitude(start, cols) >= kInfinity)
      for (std::size_t i = 0; i < cols; ++i)
        if (!is_finite(start[i])) return row * cols + i;
    sums[row] = pairwise(start, cols);
    const std::size_t end = row + 1 < rows ? (row + 1) * cols / 8 * 8 : n;
    pack_signs(in + packed, end - packed, bits + packed / 8);
    packed = end;
  }
  return n;
}

}  // namespace ingot::INGOT_ISA
