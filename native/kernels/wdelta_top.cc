// The largest differences by magnitude, and the range of the rest: of all, in one pass after a look at a sample, or
// piece after piece.
#include <bit>
#include <cstring>
#include <memory>

#include "kernels/kernels.h"
#include "kernels/wdelta_bound.h"
#include "kernels/wdelta_differences.h"
#include "kernels/wdelta_sieve.h"

namespace ingot::INGOT_ISA {
namespace {

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

// What is not finite has the largest magnitudes, so that some of it is among what was kept.
bool all_finite(const float* kept, std::size_t k) {
  bool finite = true;
  for (std::size_t i = 0; i < k; ++i) finite &= is_finite(kept[i]);
  return finite;
}

// Keeps of all differences those above the bound and the first that equal it.
TopFound kept_of(const Differences& of, const TopBound& bound, std::size_t k, std::int64_t* positions, float* values) {
  Sieve sieve({static_cast<std::int32_t>(bound.bits), k - bound.above, 0, positions, values, k});
  sieve_all(of, sieve);
  return {k, all_finite(values, k) ? of.count : first_not_finite(of), sieve.rest(), -1, 0};
}

}  // namespace

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
    const TopBound bound = bound_among(found.get(), sieve.count(), k, {0, bracket.high});
    const auto bits = static_cast<std::int32_t>(bound.bits);
    keep_of_found(to, sieve.count(), {bits, k - bound.above, 0, positions, values, k}, rest);
    return {k, all_finite(values, k) ? n : first_not_finite(of), rest, -1, 0};
  }
  // A sample that misled.
  const auto all = std::make_unique_for_overwrite<float[]>(n);
  by_blocks(of, 0, n, [&](std::size_t start, std::size_t some, const float* from) {
    std::memcpy(all.get() + start, from, some * sizeof *from);
  });
  return kept_of({all.get(), nullptr, n, Dtype::f32}, bound_by_bins(all.get(), n, k), k, positions, values);
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

std::int32_t top_prune(std::int64_t* positions, float* values, std::size_t n, std::size_t k) {
  const Bracket bracket = bracket_in(n, k, [&](std::size_t i) { return values[i]; });
  const TopBound bound = bound_among(values, n, k, bracket);
  const auto bits = static_cast<std::int32_t>(bound.bits);
  // In place: what is kept never lies before where it goes, and sixteen are read before they are written.
  Sieve sieve({bits, k - bound.above, 0, positions, values, n}, positions);
  sieve.take(0, n, values);
  return bits;
}

}  // namespace ingot::INGOT_ISA
