// What exact k-means in one dimension spends its time on (spec/palette.md, "Codebooks"): the values of a histogram in ascending
// order, and the best partition for a penalty. Sums of doubles, without contraction: the same on every machine.
#include "kernels/gcc_headers.h"
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "core/palette.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

// The least of some values and its number, lane by lane; of equals the first.
struct Best {
  Ends least;
  Numbers which;

  void see(Ends value, Numbers number) {
    which = value < least ? number : which;
    least = value < least ? value : least;
  }
  // The number in the least lane, of equals the least one.
  std::size_t number() const {
    Best all = *this;
#if defined(__AVX512F__)
    all.see_lanes<4, 5, 6, 7, 0, 1, 2, 3>();
    all.see_lanes<2, 3, 0, 1, 6, 7, 4, 5>();
    all.see_lanes<1, 0, 3, 2, 5, 4, 7, 6>();
#else
    all.see_lanes<2, 3, 0, 1>();
    all.see_lanes<1, 0, 3, 2>();
#endif
    return static_cast<std::size_t>(all.which[0]);
  }

 private:
  template <int... kLanes>
  void see_lanes() {
    const Ends value = __builtin_shufflevector(least, least, kLanes...);
    const Numbers number = __builtin_shufflevector(which, which, kLanes...);
    const Numbers better = (value < least) | ((value <= least) & (number < which));
    which = better ? number : which;
    least = better ? value : least;
  }
};

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
    if (high + 1 < kSide) return begin_early(r, low, high);
    const Ends sum = Ends{} + at_.sum[r], weight = Ends{} + at_.weight[r], never = Ends{} + std::numeric_limits<double>::infinity();
    const Numbers from = Numbers{} + static_cast<std::int64_t>(low);
    Best found{never, from};
    const std::size_t last = high + 1 - kSide;  // of this register lanes may lie before `low`, or be seen again
    for (std::size_t l = low;; l += kSide) {
      l = std::min(l, last);
      Ends s, w, best;
      load(at_.sum + l, s);
      load(at_.weight + l, w);
      load(at_.best + l, best);
      s = sum - s;
      const Ends value = best - s * s / (weight - w);
      const Numbers number = kUp + static_cast<std::int64_t>(l);
      found.see(number < from ? never : value, number);
      if (l == last) return found.number();
    }
  }

  std::size_t begin_early(std::size_t r, std::size_t low, std::size_t high) const {
    double least = std::numeric_limits<double>::infinity();
    std::size_t from = low;
    for (std::size_t l = low; l <= high; ++l) {
      const double value = value_of(l, r);
      if (value < least) {
        least = value;
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
      const std::size_t l = begin_early(r, low, high);
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

// Those of kPassed bins from `first` on that weigh something, ascending or descending; returns how many. As many elements may be
// written as there are bins.
template <bool kDown>
inline std::size_t keys_of(const double* weights, std::size_t first, std::uint16_t* keys) {
  std::size_t count = 0;
#if defined(__AVX512F__)
  __m512d low = _mm512_loadu_pd(weights + first), high = _mm512_loadu_pd(weights + first + kPassed / 2);
  __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  if constexpr (kDown) {
    const __m512i down = _mm512_set_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512d last = _mm512_permutexvar_pd(down, low);
    low = _mm512_permutexvar_pd(down, high);
    high = last;
    numbers = _mm512_sub_epi32(_mm512_set1_epi32(kPassed - 1), numbers);
  }
  const unsigned some = _mm512_cmp_pd_mask(low, _mm512_setzero_pd(), _CMP_GT_OQ) |
                        static_cast<unsigned>(_mm512_cmp_pd_mask(high, _mm512_setzero_pd(), _CMP_GT_OQ)) << (kPassed / 2);
  if (!some) return count;
  numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(static_cast<int>(first)));
  const __m256i found = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(static_cast<__mmask16>(some), numbers));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys), found);
  count = static_cast<std::size_t>(std::popcount(some));
#else
  std::uint64_t all[kPassed], some = 0;
  std::memcpy(all, weights + first, sizeof all);
  for (const std::uint64_t bits : all) some |= bits;
  if (!some) return count;
  for (std::size_t i = 0; i < kPassed; ++i) {
    const std::size_t key = kDown ? first + (kPassed - 1 - i) : first + i;
    keys[count] = static_cast<std::uint16_t>(key);
    count += weights[key] > 0;
  }
#endif
  return count;
}

template <Dtype kDtype>
std::size_t points(const double* weights, const std::uint16_t* keys, std::size_t n, double* values, double* found) {
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = static_cast<double>(Element<kDtype>::load(keys[i]));
    found[i] = weights[keys[i]];
  }
  const std::size_t half = static_cast<std::size_t>(std::find_if(keys, keys + n, [](auto key) { return key < kBins / 2; }) - keys);
  if (!half || half == n || values[half - 1] < values[half]) return n;
  found[half - 1] += found[half];  // -0 and +0
  std::copy(values + half + 1, values + n, values + half);
  std::copy(found + half + 1, found + n, found + half);
  return n - 1;
}

}  // namespace

void palette_runs(const PaletteRuns& at, double penalty, [[maybe_unused]] std::size_t runs) {
#if defined(__AVX__)
  const std::size_t block = std::min(std::bit_floor(at.n / runs / kShare), kMost);
  if (block >= kSide && Blocks(at).solve(penalty, block)) return;
#endif
  Penalized(at).solve(penalty);
}

std::size_t palette_keys(const double* weights, std::uint16_t* keys) {
  std::size_t count = 0;
  for (std::size_t i = kBins; i > kBins / 2; i -= kPassed) count += keys_of<true>(weights, i - kPassed, keys + count);
  for (std::size_t i = 0; i < kBins / 2; i += kPassed) count += keys_of<false>(weights, i, keys + count);
  return count;
}

std::size_t palette_points(const double* weights, const std::uint16_t* keys, std::size_t n, Dtype type, double* values,
                           double* found) {
  return type == Dtype::f16 ? points<Dtype::f16>(weights, keys, n, values, found)
                            : points<Dtype::bf16>(weights, keys, n, values, found);
}

}  // namespace ingot::INGOT_ISA
