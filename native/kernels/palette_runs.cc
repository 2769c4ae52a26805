// What exact k-means in one dimension spends its time on (spec/palette.md, "Codebooks"): the values of a histogram in ascending
// order, and the best partition for a penalty. Sums of doubles, without contraction: the same on every machine.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/palette.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// Ends of runs that are tried at once; not worth it in registers of two doubles.
#if defined(__AVX512F__)
constexpr std::size_t kWindow = 8;
#else
constexpr std::size_t kWindow = 4;
#endif
#if defined(__AVX__)
constexpr bool kAtOnce = true;
#else
constexpr bool kAtOnce = false;
#endif
using Ends = double __attribute__((vector_size(kWindow * sizeof(double))));
constexpr unsigned kEach = (1u << kWindow) - 1;
constexpr double kSure = 0x1p-50, kTiny = 0x1p-960;

inline void load(const double* from, Ends& to) { std::memcpy(&to, from, sizeof to); }

// A bit for each lane where a < b, the first in the lowest.
inline unsigned below(const Ends& a, const Ends& b) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ);
#elif defined(__AVX__)
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_LT_OQ)));
#elif defined(__SSE2__)
  __m128d x[2], y[2];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  return static_cast<unsigned>(_mm_movemask_pd(_mm_cmplt_pd(x[0], y[0])) | _mm_movemask_pd(_mm_cmplt_pd(x[1], y[1])) << 2);
#else
  unsigned found = 0;
  for (std::size_t lane = 0; lane < kWindow; ++lane) found |= static_cast<unsigned>(a[lane] < b[lane]) << lane;
  return found;
#endif
}

// The best beginning of the last run never moves back (the squared error has the quadrangle inequality): a queue of candidates,
// each with the point from which on it is best, finds all of them in about O(n) (Galil, Park: "Dynamic programming with convexity,
// concavity and sparsity", 1992, section 4).
class Penalized {
 public:
  explicit Penalized(const PaletteRuns& at) : at_(at) {}

  void solve(double penalty) {
    at_.best[0] = 0;
    at_.queue[0] = {0, 1};
    for (std::size_t r = 1; r <= at_.n; ++r) {
      while (front_ < back_ && at_.queue[front_ + 1].start <= r) ++front_;
      const std::uint32_t l = at_.queue[front_].from;
      at_.best[r] = value(l, r) + penalty;
      at_.from[r] = l;
      if (r < at_.n) insert(static_cast<std::uint32_t>(r));
    }
  }

 private:
  double value(std::size_t l, std::size_t r) const {
    const double s = at_.sum[r] - at_.sum[l];
    return at_.best[l] - s * s / (at_.weight[r] - at_.weight[l]);
  }
  bool beats(std::uint32_t newer, std::uint32_t older, std::size_t r) const { return value(newer, r) < value(older, r); }

  // Whether a run that begins at `newer` beats one from `older`, for ends from `first` on: kWindow of them, or up to the last.
  // Both sides times both weights tell it without a division, where they differ by more than rounding does to either: each
  // quotient, sum or product is wrong by 2^-53 of itself, all of them by less than kSure of what they are made of.
  unsigned won(std::uint32_t newer, std::uint32_t older, std::size_t first) const {
    const std::size_t start = std::min(first, at_.n + 1 - kWindow), before = first - start;
    const double less = at_.best[older] - at_.best[newer], both = std::abs(at_.best[older]) + std::abs(at_.best[newer]);
    Ends sum, weight;
    load(at_.sum + start, sum);
    load(at_.weight + start, weight);
    const Ends s = sum - at_.sum[newer], t = sum - at_.sum[older];
    const Ends v = weight - at_.weight[newer], w = weight - at_.weight[older];
    const Ends gain = t * t * v, loss = s * s * w, weights = v * w;
    const Ends apart = (gain - loss) - less * weights, room = ((gain + loss) + both * weights) * kSure + kTiny;
    const unsigned wins = below(apart, -room);
    const bool sure = !(((wins | below(room, apart)) ^ kEach) >> before);
    return (sure ? wins : divided(newer, older, start)) >> before;
  }

  // The same by the quotients themselves, from `start` on.
  unsigned divided(std::uint32_t newer, std::uint32_t older, std::size_t start) const {
    unsigned found = 0;
    for (std::size_t i = 0; i < kWindow; ++i) found |= static_cast<unsigned>(beats(newer, older, start + i)) << i;
    return found;
  }

  // The last of the queue gives way in half of all cases: what holds with and without it is found side by side.
  void insert(std::uint32_t l) {
    if (!kAtOnce || at_.n + 1 < kWindow) return insert_by_one(l);
    if (front_ < back_) {
      const PaletteStart last = at_.queue[back_], other = at_.queue[back_ - 1];
      const std::uint32_t low = last.start, lower = std::max(other.start, l + 1);
      const unsigned found = won(l, last.from, low), then = won(l, other.from, lower);
      const std::uint32_t gone = found & 1, kept = gone - 1;
      const unsigned here = (found & kept) | (then & ~kept);
      if (here && !(here & 1)) {
        back_ -= gone;
        push(l, ((low & kept) | (lower & ~kept)) + static_cast<std::uint32_t>(std::countr_zero(here)));
        return;
      }
    }
    insert_far(l);
  }

  void insert_far(std::uint32_t l) {
    std::size_t low = 0;
    std::uint32_t older = 0;
    unsigned found = 0;
    while (true) {
      older = at_.queue[back_].from;
      low = std::max(at_.queue[back_].start, l + 1);
      found = won(l, older, low);
      if (!(found & 1)) break;
      if (back_ == front_) {
        at_.queue[back_] = {l, static_cast<std::uint32_t>(low)};
        return;
      }
      --back_;
    }
    // The newer one wins from some point on: near the beginning as a rule.
    if (found)
      push(l, low + static_cast<std::size_t>(std::countr_zero(found)));
    else if (low + kWindow <= at_.n)
      look(l, older, low + kWindow - 1, kWindow);
  }

  void insert_by_one(std::uint32_t l) {
    while (back_ > front_ && beats(l, at_.queue[back_].from, at_.queue[back_].start)) --back_;
    const std::uint32_t older = at_.queue[back_].from, low = std::max(at_.queue[back_].start, l + 1);
    if (back_ == front_ && beats(l, older, low))
      at_.queue[back_] = {l, low};
    else
      look(l, older, low, 1);
  }

  // Where the newer one wins, which it does not at `low`: in growing steps, then by halves.
  void look(std::uint32_t l, std::uint32_t older, std::size_t low, std::size_t step) {
    std::size_t high = low;
    while (true) {
      high = std::min(low + step, at_.n);
      if (high == low) return;  // never
      if (beats(l, older, high)) break;
      low = high;
      step *= 2;
    }
    while (high - low > 1) {
      const std::size_t middle = low + (high - low) / 2;
      (beats(l, older, middle) ? high : low) = middle;
    }
    push(l, high);
  }

  void push(std::uint32_t l, std::size_t start) { at_.queue[++back_] = {l, static_cast<std::uint32_t>(start)}; }

  const PaletteRuns at_;
  std::size_t front_ = 0, back_ = 0;
};

constexpr std::size_t kEight = 8;  // bins that are passed over at once

// The values of the bins from `first` in steps of 1 or -1 that weigh something.
template <Dtype kDtype, bool kDown>
std::size_t take(const double* weights, std::size_t first, std::size_t bins, double* values, double* found) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < bins; i += kEight) {
    const std::size_t start = kDown ? first - i - (kEight - 1) : first + i;
    unsigned some = 0;
    for (std::size_t j = 0; j < kEight; j += kWindow) {
      Ends of;
      load(weights + start + j, of);
      some |= below(Ends{}, of) << j;
    }
    if (!some) continue;
    for (std::size_t j = 0; j < kEight; ++j) {
      const std::size_t key = kDown ? first - i - j : first + i + j;
      values[count] = static_cast<double>(Element<kDtype>::load(static_cast<std::uint16_t>(key)));
      found[count] = weights[key];
      count += weights[key] > 0;
    }
  }
  return count;
}

template <Dtype kDtype>
std::size_t points(const double* weights, double* values, double* found) {
  const std::size_t half = take<kDtype, true>(weights, kBins - 1, kBins / 2, values, found);
  std::size_t rest = take<kDtype, false>(weights, 0, kBins / 2, values + half, found + half);
  if (half && rest && !(values[half - 1] < values[half])) {  // -0 and +0
    found[half - 1] += found[half];
    --rest;
    std::memmove(values + half, values + half + 1, rest * sizeof(double));
    std::memmove(found + half, found + half + 1, rest * sizeof(double));
  }
  return half + rest;
}

}  // namespace

void palette_runs(const PaletteRuns& at, double penalty) { Penalized(at).solve(penalty); }

std::size_t palette_points(const double* weights, Dtype type, double* values, double* found) {
  return type == Dtype::f16 ? points<Dtype::f16>(weights, values, found) : points<Dtype::bf16>(weights, values, found);
}

}  // namespace ingot::INGOT_ISA
