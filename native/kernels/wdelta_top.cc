// Finds the largest differences by magnitude, and the range of the others: in one pass after a sample, or piece after
// piece.
#include <bit>
#include <cstring>
#include <memory>

#include "kernels/kernels.h"
#include "kernels/wdelta_bound.h"
#include "kernels/wdelta_differences.h"
#include "kernels/wdelta_sieve.h"

namespace ingot::INGOT_ISA {
namespace {

// Separates differences; stops if there is no space.
bool sieve_all(const Differences& differences, Sieve& sieve) {
  bool fits = true;
  by_blocks(differences, 0, differences.count, [&](std::size_t start, std::size_t n, const float* values) {
    fits = fits && sieve.take(start, n, values);
  });
  return fits;
}

// Keeps the found values above the bound and the first that equal it; the others extend the range.
void keep_of_found(const TopPlaces& from, std::size_t count, const TopPlaces& to, FloatRange& other_range) {
  Sieve sieve(to, from.positions);
  for (std::size_t i = 0; i < count; i += kDifferences)
    sieve.take(i, count - i < kDifferences ? count - i : kDifferences, from.values + i);
  const FloatRange others = sieve.others();
  other_range.low = others.low < other_range.low ? others.low : other_range.low;
  other_range.high = others.high > other_range.high ? others.high : other_range.high;
}

std::size_t first_not_finite(const Differences& differences) {
  std::size_t bad = differences.count;
  by_blocks(differences, 0, differences.count, [&](std::size_t start, std::size_t n, const float* values) {
    for (std::size_t i = 0; i < n && bad == differences.count; ++i)
      if (!is_finite(values[i])) bad = start + i;
  });
  return bad;
}

// Values that are not finite have the largest magnitudes, so that some of them are among the selected ones.
bool all_finite(const float* largest, std::size_t k) {
  bool finite = true;
  for (std::size_t i = 0; i < k; ++i) finite &= is_finite(largest[i]);
  return finite;
}

// Keeps, of all differences, those above the bound and the first that equal it.
TopFound kept_of(const Differences& differences, const TopBound& bound, std::size_t k, std::int64_t* positions,
                 float* values) {
  Sieve sieve({static_cast<std::int32_t>(bound.bits), k - bound.above, 0, positions, values, k});
  sieve_all(differences, sieve);
  return {k, all_finite(values, k) ? differences.count : first_not_finite(differences), sieve.others(), -1, 0};
}

}  // namespace

FloatRange range_between(const float* in, std::size_t n, const std::int64_t* skipped, std::size_t count) {
  const float infinity = std::bit_cast<float>(kInfinity);
  FloatRange range{infinity, -infinity};
  Lanes lows = Lanes{} + infinity, highs = Lanes{} - infinity, x;
  std::size_t index = 0;
  for (std::size_t j = 0; j <= count; ++j) {
    const std::size_t end = j < count ? static_cast<std::size_t>(skipped[j]) : n;
    if (end - index < kLanes) {
      for (; index < end; ++index) widen(range, in[index]);
    } else {
      for (; index < end; index += kLanes) {
        if (end - index < kLanes) index = end - kLanes;  // repeating it for values already seen changes nothing
        std::memcpy(&x, in + index, sizeof x);
        lows = x < lows ? x : lows;
        highs = x > highs ? x : highs;
      }
    }
    index = end + 1;
  }
  for (std::size_t j = 0; j < kLanes; ++j) {
    range.low = lows[j] < range.low ? lows[j] : range.low;
    range.high = highs[j] > range.high ? highs[j] : range.high;
  }
  return range;
}

TopFound top_of(const Differences& differences, std::size_t k, std::int64_t* positions, float* values) {
  const std::size_t n = differences.count;
  const Bracket bracket = bracket_in(n, k, [&](std::size_t i) { return difference_at(differences, i); });
  const std::size_t limit = 2 * k + kSample, room = n < kSmall || n < limit ? n : limit;
  const auto index = std::make_unique_for_overwrite<std::int64_t[]>(room);
  const auto result = std::make_unique_for_overwrite<float[]>(room);
  const bool small = n < kSmall;
  const std::int32_t smallest = small ? -1 : static_cast<std::int32_t>(bracket.low);
  const TopPlaces to{smallest, small ? 0 : k, 0, index.get(), result.get(), room};
  Sieve sieve(to);
  if (sieve_all(differences, sieve) && sieve.count() >= k) {
    FloatRange other_range = sieve.others();
    const TopBound bound = bound_among(result.get(), sieve.count(), k, {0, bracket.high});
    const auto bits = static_cast<std::int32_t>(bound.bits);
    keep_of_found(to, sieve.count(), {bits, k - bound.above, 0, positions, values, k}, other_range);
    return {k, all_finite(values, k) ? n : first_not_finite(differences), other_range, -1, 0};
  }
  // The sample was misleading.
  const auto all = std::make_unique_for_overwrite<float[]>(n);
  by_blocks(differences, 0, n, [&](std::size_t start, std::size_t batch, const float* from) {
    std::memcpy(all.get() + start, from, batch * sizeof *from);
  });
  return kept_of({all.get(), nullptr, n, Dtype::f32}, bound_by_bins(all.get(), n, k), k, positions, values);
}

TopFound top_collect(const Differences& differences, const TopPlaces& to) {
  const std::size_t n = differences.count;
  Sieve sieve(to);
  if (!sieve_all(differences, sieve)) return {to.room + 1, n, {}, -1, 0};
  std::size_t remaining = n, count = sieve.count(), bad = n;
  for (std::size_t i = count; i > 0; --i)
    if (!is_finite(to.values[i - 1])) bad = static_cast<std::size_t>(to.positions[i - 1] - to.offset);
  for (; remaining && count && to.positions[count - 1] - to.offset == static_cast<std::int64_t>(remaining - 1);
       --remaining)
    --count;
  const float value = remaining ? difference_at(differences, remaining - 1) : 0;
  return {sieve.count(), bad, sieve.others(), static_cast<std::int64_t>(remaining) - 1, value};
}

std::int32_t top_prune(std::int64_t* positions, float* values, std::size_t n, std::size_t k) {
  const Bracket bracket = bracket_in(n, k, [&](std::size_t i) { return values[i]; });
  const TopBound bound = bound_among(values, n, k, bracket);
  const auto bits = static_cast<std::int32_t>(bound.bits);
  // In place: kept values move only to lower positions, and sixteen are read before they are written.
  Sieve sieve({bits, k - bound.above, 0, positions, values, n}, positions);
  sieve.take(0, n, values);
  return bits;
}

}  // namespace ingot::INGOT_ISA
