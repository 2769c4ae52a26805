// What exact k-means in one dimension spends its time on (spec/palette.md, "Codebooks"): the values of a histogram in ascending
// order, and the best partition for a penalty. Sums of doubles, without contraction: the same on every machine.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "core/palette.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

// The best beginning of the last run never moves back (the squared error has the quadrangle inequality): a queue of
// candidates, each with the point from which on it is best, finds all of them in about O(n) (Galil, Park: "Dynamic programming
// with convexity, concavity and sparsity", 1992, section 4).
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

  void insert(std::uint32_t l) {
    while (back_ > front_ && beats(l, at_.queue[back_].from, at_.queue[back_].start)) --back_;
    const std::uint32_t older = at_.queue[back_].from, low = std::max(at_.queue[back_].start, l + 1);
    if (back_ == front_ && beats(l, older, low))
      at_.queue[back_] = {l, low};
    else
      look(l, older, low);
  }

  // The newer one wins from some point past `low` on: near the beginning as a rule, so steps grow from there.
  void look(std::uint32_t l, std::uint32_t older, std::size_t low) {
    std::size_t high = low, step = 1;
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
    at_.queue[++back_] = {l, static_cast<std::uint32_t>(high)};
  }

  const PaletteRuns at_;
  std::size_t front_ = 0, back_ = 0;
};

#if defined(__AVX__)  // compilers make nothing good of choices among two doubles without it
// Doubles side by side.
#if defined(__AVX512F__)
constexpr std::size_t kSide = 8;
#else
constexpr std::size_t kSide = 4;
#endif
using Ends = double __attribute__((vector_size(kSide * sizeof(double))));
using Numbers = std::int64_t __attribute__((vector_size(kSide * sizeof(double))));
#if defined(__AVX512F__)
constexpr Numbers kUp = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Numbers kUp = {0, 1, 2, 3};
#endif
constexpr std::size_t kShare = 5, kMost = 128;  // a block takes at most such a share of a run as they are wanted, and so many ends

inline void load(const double* from, Ends& to) { std::memcpy(&to, from, sizeof to); }

// The same where runs are long: for blocks of ends whose runs all begin before the block, and between those of the end before the
// block and the last in it. So that of the last is looked for first, then that of the one in the middle, and so on; those of
// kSide ends in a row are found side by side, an end a lane. Here too the first of equals counts.
class Blocks {
 public:
  explicit Blocks(const PaletteRuns& at) : at_(at) {}

  // False if a run begins and ends in one block: then nothing was found.
  bool solve(double penalty, std::size_t block) {
    at_.best[0] = 0;
    penalty_ = penalty;
    std::size_t low = 0;
    for (std::size_t first = 1, size; first <= at_.n; first += size) {
      const std::size_t left = at_.n + 1 - first;
      size = left >= block ? block : left > kSide ? left / kSide * kSide : left;
      const std::size_t last = first + size - 1;
      fill(first, size, low, begin(last, low, first - 1));
      if (first < last && value_of(begin(last, first, last - 1), last) + penalty < at_.best[last]) return false;
      low = at_.from[last];
    }
    return true;
  }

 private:
  // The first best beginning from `low` to `high` of a run that ends at r.
  std::size_t begin(std::size_t r, std::size_t low, std::size_t high) const {
    const Ends sum = Ends{} + at_.sum[r], weight = Ends{} + at_.weight[r];
    Ends least = Ends{} + std::numeric_limits<double>::infinity();
    Numbers which = Numbers{} + static_cast<std::int64_t>(low), number = which + kUp;
    std::size_t l = low;
    for (; l + kSide <= high + 1; l += kSide, number += static_cast<std::int64_t>(kSide)) {
      Ends s, w, best;
      load(at_.sum + l, s);
      load(at_.weight + l, w);
      load(at_.best + l, best);
      s = sum - s;
      const Ends value = best - s * s / (weight - w);
      which = value < least ? number : which;
      least = value < least ? value : least;
    }
    double found = std::numeric_limits<double>::infinity();
    std::size_t from = low;
    for (std::size_t lane = 0; lane < kSide; ++lane) {
      const auto there = static_cast<std::size_t>(which[lane]);
      if (least[lane] < found || (least[lane] <= found && there < from)) {
        found = least[lane];
        from = there;
      }
    }
    for (; l <= high; ++l) {
      const double value = value_of(l, r);
      if (value < found) {
        found = value;
        from = l;
      }
    }
    return from;
  }

  double value_of(std::size_t l, std::size_t r) const {
    const double s = at_.sum[r] - at_.sum[l];
    return at_.best[l] - s * s / (at_.weight[r] - at_.weight[l]);
  }

  // The ends from `first` on, whose runs begin from `low` to `high`.
  void fill(std::size_t first, std::size_t size, std::size_t low, std::size_t high) {
    if (size > kSide) {
      const std::size_t half = size / 2 / kSide * kSide, middle = begin(first + half - 1, low, high);
      fill(first, half, low, middle);
      return fill(first + half, size - half, middle, high);
    }
    if (size == kSide) return side_by_side(first, low, high);
    for (std::size_t r = first; r < first + size; ++r) {
      const std::size_t l = begin(r, low, high);
      at_.best[r] = value_of(l, r) + penalty_;
      at_.from[r] = static_cast<std::uint32_t>(l);
    }
  }

  void side_by_side(std::size_t first, std::size_t low, std::size_t high) {
    Ends sum, weight, least = Ends{} + std::numeric_limits<double>::infinity();
    load(at_.sum + first, sum);
    load(at_.weight + first, weight);
    Numbers which = Numbers{} + static_cast<std::int64_t>(low);
    for (std::size_t l = low; l <= high; ++l) {
      const Ends s = sum - at_.sum[l], value = at_.best[l] - s * s / (weight - at_.weight[l]);
      which = value < least ? Numbers{} + static_cast<std::int64_t>(l) : which;
      least = value < least ? value : least;
    }
    least += penalty_;
    std::memcpy(at_.best + first, &least, sizeof least);
    for (std::size_t lane = 0; lane < kSide; ++lane) at_.from[first + lane] = static_cast<std::uint32_t>(which[lane]);
  }

  const PaletteRuns at_;
  double penalty_ = 0;
};
#endif

constexpr std::size_t kEight = 8;  // bins that are passed over at once

// The values of the bins from `first` in steps of 1 or -1 that weigh something.
template <Dtype kDtype, bool kDown>
std::size_t take(const double* weights, std::size_t first, std::size_t bins, double* values, double* found) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < bins; i += kEight) {
    const std::size_t start = kDown ? first - i - (kEight - 1) : first + i;
    std::uint64_t eight[kEight], some = 0;
    std::memcpy(eight, weights + start, sizeof eight);
    for (const std::uint64_t bits : eight) some |= bits;
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

void palette_runs(const PaletteRuns& at, double penalty, [[maybe_unused]] std::size_t runs) {
#if defined(__AVX__)
  const std::size_t block = std::min(std::bit_floor(at.n / runs / kShare), kMost);
  if (block >= kSide && Blocks(at).solve(penalty, block)) return;
#endif
  Penalized(at).solve(penalty);
}

std::size_t palette_points(const double* weights, Dtype type, double* values, double* found) {
  return type == Dtype::f16 ? points<Dtype::f16>(weights, values, found) : points<Dtype::bf16>(weights, values, found);
}

}  // namespace ingot::INGOT_ISA
