// The largest differences by magnitude, and the range of the rest: of all, in one pass after a look at a sample, or
// piece after piece.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/wdelta_differences.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr std::size_t kBins = std::size_t{1} << 16;
constexpr std::size_t kSample = std::size_t{1} << 15;  // values that tell about where the largest begin
constexpr std::size_t kSmall = 4 * kSample;            // values of which no sample is worth while

std::uint32_t magnitude(float x) { return std::bit_cast<std::uint32_t>(x) & kMagnitude; }

// Walks bins from the top until they hold `k` values; returns the bin, and lowers `k` by what lies above it.
std::size_t bin_of(const std::uint64_t* bins, std::size_t k, std::size_t& above) {
  std::size_t bin = kBins - 1;
  while (above + bins[bin] < k) above += bins[bin--];
  return bin;
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

template <class At>
Bracket bracket_of(const At& value_at, std::size_t n, std::size_t k) {
  std::vector<std::uint32_t> sample(kSample);
  // A step that is odd and no simple fraction of n visits all columns of a matrix.
  const std::size_t step = n / kSample | 1;
  for (std::size_t i = 0, at = 0; i < kSample; ++i, at = at + step < n ? at + step : at + step - n)
    sample[i] = magnitude(value_at(at));
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

template <class At>
Bracket bracket_in(std::size_t n, std::size_t k, const At& value_at) {
  return n < kSmall ? Bracket{0, kMagnitude} : bracket_of(value_at, n, k);
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
  std::size_t above = 0;
  for (std::size_t i = 0; i < n; ++i) above += magnitude(values[i]) > high;
  const auto held = std::make_unique_for_overwrite<std::uint32_t[]>(n - above + 1);  // one more is written to
  const std::span doubtful(held.get(), n - above);
  for (std::size_t i = 0, at = 0; i < n; ++i) {
    held[at] = magnitude(values[i]);
    at += held[at] <= high;
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

// Sixteen at a time, so that no comparison waits for the one before.
using Lanes = float __attribute__((vector_size(64)));
constexpr std::size_t kLanes = 16;

void widen(FloatRange& range, float x) {
  range.low = x < range.low ? x : range.low;
  range.high = x > range.high ? x : range.high;
}

#if !defined(__AVX512F__)
using Words = std::int32_t __attribute__((vector_size(64)));
#endif

// A bit for each of sixteen values whose magnitude is above `below`; the others widen the range.
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

// Takes differences apart: those that go to their places, and the range of the others. Positions are counted, or known.
class Sieve {
 public:
  explicit Sieve(const TopPlaces& to, const std::int64_t* known = nullptr)
      : to_(to), known_(known), equals_(to.equals) {}

  // Returns whether there was room.
  bool take(std::size_t start, std::size_t n, const float* in) {
    const std::int32_t below = equals_ ? to_.bound - 1 : to_.bound;
    Lanes lows = lows_, highs = highs_;
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      std::uint32_t hits = sieve(in + i, below, lows, highs);
      if (!hits || put_sixteen(hits, start + i, in + i)) continue;
      for (; hits; hits &= hits - 1) {
        const std::size_t at = i + static_cast<std::size_t>(std::countr_zero(hits));
        if (!put(start + at, in[at])) return false;
      }
    }
    for (; i < n; ++i)
      if (static_cast<std::int32_t>(magnitude(in[i])) <= below)
        widen(rest_, in[i]);
      else if (!put(start + i, in[i]))
        return false;
    lows_ = lows, highs_ = highs;
    return true;
  }

  std::size_t count() const { return count_; }

  FloatRange rest() const {
    FloatRange range = rest_;
    for (std::size_t j = 0; j < kLanes; ++j) {
      range.low = lows_[j] < range.low ? lows_[j] : range.low;
      range.high = highs_[j] > range.high ? highs_[j] : range.high;
    }
    return range;
  }

 private:
  // Puts those of sixteen that are hit, in registers; false where that is not possible.
  bool put_sixteen([[maybe_unused]] std::uint32_t hits, [[maybe_unused]] std::size_t at,
                   [[maybe_unused]] const float* in) {
#if defined(__AVX512F__)
    if (to_.room - count_ < kLanes) return false;
    const __m512 x = _mm512_loadu_ps(in);
    if (to_.equals) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(kMagnitude)));
      const __m512i bound = _mm512_set1_epi32(to_.bound);
      const std::uint32_t equal = _mm512_mask_cmpeq_epi32_mask(static_cast<__mmask16>(hits), bits, bound);
      const auto some = static_cast<std::size_t>(std::popcount(equal));
      if (some > equals_) return false;
      equals_ -= some;
    }
    const __m512i ramp = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i first = _mm512_add_epi64(ramp, _mm512_set1_epi64(to_.offset + static_cast<std::int64_t>(at)));
    __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(8));
    if (known_) first = _mm512_loadu_si512(known_ + at), second = _mm512_loadu_si512(known_ + at + 8);
    const auto low = static_cast<__mmask8>(hits), high = static_cast<__mmask8>(hits >> 8);
    std::int64_t* places = to_.positions + count_;
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi64(low, first));
    _mm512_storeu_si512(places + std::popcount(hits & 0xffu), _mm512_maskz_compress_epi64(high, second));
    _mm512_storeu_ps(to_.values + count_, _mm512_maskz_compress_ps(static_cast<__mmask16>(hits), x));
    count_ += static_cast<std::size_t>(std::popcount(hits));
    return true;
#else
    return false;
#endif
  }

  // Returns whether there was room.
  bool put(std::size_t at, float x) {
    if (static_cast<std::int32_t>(magnitude(x)) == to_.bound) {
      if (!equals_) {
        widen(rest_, x);
        return true;
      }
      --equals_;
    }
    if (count_ == to_.room) return false;
    to_.positions[count_] = known_ ? known_[at] : to_.offset + static_cast<std::int64_t>(at);
    to_.values[count_++] = x;
    return true;
  }

  static constexpr float kEndless = std::bit_cast<float>(kInfinity);
  const TopPlaces to_;
  const std::int64_t* const known_;
  std::size_t equals_, count_ = 0;
  FloatRange rest_{kEndless, -kEndless};
  Lanes lows_ = Lanes{} + kEndless, highs_ = Lanes{} - kEndless;
};

// Sorts differences; stops where there is no room.
bool sieve_all(const Differences& of, Sieve& sieve) {
  bool fits = true;
  by_blocks(of, 0, of.count, [&](std::size_t start, std::size_t n, const float* values) {
    fits = fits && sieve.take(start, n, values);
  });
  return fits;
}

// Keeps of those found the ones above the bound and the first that equal it; what is not kept widens the range.
void keep_of_found(const TopPlaces& from, std::size_t count, const TopPlaces& to, FloatRange& rest) {
  Sieve sieve(to, from.positions);
  for (std::size_t i = 0; i < count; i += kDifferences)
    sieve.take(i, count - i < kDifferences ? count - i : kDifferences, from.values + i);
  const FloatRange others = sieve.rest();
  rest.low = others.low < rest.low ? others.low : rest.low;
  rest.high = others.high > rest.high ? others.high : rest.high;
}

std::size_t first_not_finite(const Differences& of) {
  std::size_t bad = of.count;
  by_blocks(of, 0, of.count, [&](std::size_t start, std::size_t n, const float* values) {
    for (std::size_t i = 0; i < n && bad == of.count; ++i)
      if (!is_finite(values[i])) bad = start + i;
  });
  return bad;
}

}  // namespace

std::size_t top_select(const float* in, std::size_t n, std::size_t k, std::int64_t* positions, float* values) {
  const Bracket bracket = bracket_in(n, k, [&](std::size_t i) { return in[i]; });
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

TopFound top_of(const Differences& of, std::size_t k, std::int64_t* positions, float* values) {
  const std::size_t n = of.count;
  const Bracket bracket = bracket_in(n, k, [&](std::size_t i) { return difference_at(of, i); });
  const std::size_t most = 2 * k + kSample, room = n < kSmall || n < most ? n : most;
  const auto at = std::make_unique_for_overwrite<std::int64_t[]>(room);
  const auto found = std::make_unique_for_overwrite<float[]>(room);
  const bool small = n < kSmall;
  const std::int32_t least = small ? -1 : static_cast<std::int32_t>(bracket.low);
  const TopPlaces to{least, small ? 0 : k, 0, at.get(), found.get(), room};
  Sieve sieve(to);
  if (sieve_all(of, sieve) && sieve.count() >= k) {
    FloatRange rest = sieve.rest();
    const TopBound bound = bound_among(found.get(), sieve.count(), k, bracket.high);
    const auto bits = static_cast<std::int32_t>(bound.bits);
    keep_of_found(to, sieve.count(), {bits, k - bound.above, 0, positions, values, k}, rest);
    // What is not finite has the largest magnitudes, so that some of it is among what was kept.
    bool finite = true;
    for (std::size_t i = 0; i < k; ++i) finite &= is_finite(values[i]);
    return {k, finite ? n : first_not_finite(of), rest, -1, 0};
  }
  // A sample that misled.
  const auto all = std::make_unique_for_overwrite<float[]>(n);
  by_blocks(of, 0, n, [&](std::size_t start, std::size_t some, const float* from) {
    std::memcpy(all.get() + start, from, some * sizeof *from);
  });
  const std::size_t bad = top_select(all.get(), n, k, positions, values);
  return {k, bad, bad < n ? FloatRange{} : range_between(all.get(), n, positions, k), -1, 0};
}

TopFound top_collect(const Differences& of, const TopPlaces& to) {
  const std::size_t n = of.count;
  Sieve sieve(to);
  if (!sieve_all(of, sieve)) return {to.room + 1, n, {}, -1, 0};
  std::size_t left = n, count = sieve.count(), bad = n;
  for (std::size_t i = count; i > 0; --i)
    if (!is_finite(to.values[i - 1])) bad = static_cast<std::size_t>(to.positions[i - 1] - to.offset);
  for (; left && count && to.positions[count - 1] - to.offset == static_cast<std::int64_t>(left - 1); --left) --count;
  const float value = left ? difference_at(of, left - 1) : 0;
  return {sieve.count(), bad, sieve.rest(), static_cast<std::int64_t>(left) - 1, value};
}

}  // namespace ingot::INGOT_ISA
