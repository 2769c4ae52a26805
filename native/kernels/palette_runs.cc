// The slow part of exact k-means in one dimension (spec/palette.md, "Codebooks"): the values of a histogram in
// ascending order, and the best partition for a penalty. Sums are doubles without contraction, which are the same on
// every machine.
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

// The best beginning of the last run never moves back, because the squared error satisfies the quadrangle inequality. A
// queue of candidates, each with the first end for which it is best, finds all beginnings in about O(n) (Galil, Park:
// "Dynamic programming with convexity, concavity and sparsity", 1992, section 4).
class Penalized {
 public:
  explicit Penalized(const PaletteRuns& input) : input_(input) {}

  void solve(double penalty) {
    input_.best[0] = 0;
    input_.queue[0] = {0, 1};
    for (std::size_t r = 1; r <= input_.n; ++r) {
      while (front_ < back_ && input_.queue[front_ + 1].start <= r) ++front_;
      const std::uint32_t l = input_.queue[front_].from;
      input_.best[r] = value(l, r) + penalty;
      input_.from[r] = l;
      if (r < input_.n) insert(static_cast<std::uint32_t>(r));
    }
  }

 private:
  double value(std::size_t l, std::size_t r) const {
    const double s = input_.sum[r] - input_.sum[l];
    return input_.best[l] - s * s / (input_.weight[r] - input_.weight[l]);
  }
  bool beats(std::uint32_t newer, std::uint32_t older, std::size_t r) const { return value(newer, r) < value(older, r); }

  void insert(std::uint32_t l) {
    while (back_ > front_ && beats(l, input_.queue[back_].from, input_.queue[back_].start)) --back_;
    const std::uint32_t older = input_.queue[back_].from, low = std::max(input_.queue[back_].start, l + 1);
    if (back_ == front_ && beats(l, older, low))
      input_.queue[back_] = {l, low};
    else
      look(l, older, low);
  }

  // Finds the first end past `low` for which the newer candidate wins: usually close to `low`, so steps grow from
  // there.
  void look(std::uint32_t l, std::uint32_t older, std::size_t low) {
    std::size_t high = low, step = 1;
    while (true) {
      high = std::min(low + step, input_.n);
      if (high == low) return;  // never
      if (beats(l, older, high)) break;
      low = high;
      step *= 2;
    }
    while (high - low > 1) {
      const std::size_t middle = low + (high - low) / 2;
      (beats(l, older, middle) ? high : low) = middle;
    }
    input_.queue[++back_] = {l, static_cast<std::uint32_t>(high)};
  }

  const PaletteRuns input_;
  std::size_t front_ = 0, back_ = 0;
};

#if defined(__AVX__)  // compilers do not vectorize selections between two doubles without it
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
// A block has at most 1 / kShare of the requested ends of a run, and at most kMost ends.
constexpr std::size_t kShare = 5, kMost = 128;

inline void load(const double* from, Ends& to) { std::memcpy(&to, from, sizeof to); }

// The least value and its index, lane by lane; ties go to the first.
struct Best {
  Ends smallest;
  Numbers which;

  void see(Ends value, Numbers number) {
    which = value < smallest ? number : which;
    smallest = value < smallest ? value : smallest;
  }
  // The index in the least lane; ties go to the least index.
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
    const Ends value = __builtin_shufflevector(smallest, smallest, kLanes...);
    const Numbers number = __builtin_shufflevector(which, which, kLanes...);
    const Numbers better = (value < smallest) | ((value <= smallest) & (number < which));
    which = better ? number : which;
    smallest = better ? value : smallest;
  }
};

// The same for long runs: for blocks of ends whose runs all begin before the block, between the beginnings of the end
// before the block and of the last end in it. So the beginning of the last end is computed first, then that of the
// middle end, and so on; those of kSide consecutive ends are computed in parallel, one end per lane. Ties go to the
// first here too.
class Blocks {
 public:
  explicit Blocks(const PaletteRuns& input) : input_(input) {}

  // Returns false, without a result, if a run begins and ends in one block.
  bool solve(double penalty, std::size_t block) {
    input_.best[0] = 0;
    penalty_ = penalty;
    std::size_t low = 0;
    for (std::size_t first = 1, size; first <= input_.n; first += size) {
      const std::size_t remaining = input_.n + 1 - first;
      size = remaining >= block ? block : remaining > kSide ? remaining / kSide * kSide : remaining;
      const std::size_t last = first + size - 1;
      fill(first, size, low, begin(last, low, first - 1));
      if (first < last && value_of(begin(last, first, last - 1), last) + penalty < input_.best[last]) return false;
      low = input_.from[last];
    }
    return true;
  }

 private:
  // The first best beginning from `low` to `high` for a run that ends at r.
  std::size_t begin(std::size_t r, std::size_t low, std::size_t high) const {
    if (high + 1 < kSide) return begin_early(r, low, high);
    const Ends sum = Ends{} + input_.sum[r], weight = Ends{} + input_.weight[r],
               never = Ends{} + std::numeric_limits<double>::infinity();
    const Numbers from = Numbers{} + static_cast<std::int64_t>(low);
    Best result{never, from};
    const std::size_t last = high + 1 - kSide;  // lanes of this register may be before `low`, or were processed before
    for (std::size_t l = low;; l += kSide) {
      l = std::min(l, last);
      Ends s, w, best;
      load(input_.sum + l, s);
      load(input_.weight + l, w);
      load(input_.best + l, best);
      s = sum - s;
      const Ends value = best - s * s / (weight - w);
      const Numbers number = kUp + static_cast<std::int64_t>(l);
      result.see(number < from ? never : value, number);
      if (l == last) return result.number();
    }
  }

  std::size_t begin_early(std::size_t r, std::size_t low, std::size_t high) const {
    double smallest = std::numeric_limits<double>::infinity();
    std::size_t from = low;
    for (std::size_t l = low; l <= high; ++l) {
      const double value = value_of(l, r);
      if (value < smallest) {
        smallest = value;
        from = l;
      }
    }
    return from;
  }

  double value_of(std::size_t l, std::size_t r) const {
    const double s = input_.sum[r] - input_.sum[l];
    return input_.best[l] - s * s / (input_.weight[r] - input_.weight[l]);
  }

  // Processes the ends from `first` on, whose runs begin from `low` to `high`.
  void fill(std::size_t first, std::size_t size, std::size_t low, std::size_t high) {
    if (size > kSide) {
      const std::size_t half = size / 2 / kSide * kSide, middle = begin(first + half - 1, low, high);
      fill(first, half, low, middle);
      return fill(first + half, size - half, middle, high);
    }
    if (size == kSide) return side_by_side(first, low, high);
    for (std::size_t r = first; r < first + size; ++r) {
      const std::size_t l = begin_early(r, low, high);
      input_.best[r] = value_of(l, r) + penalty_;
      input_.from[r] = static_cast<std::uint32_t>(l);
    }
  }

  void side_by_side(std::size_t first, std::size_t low, std::size_t high) {
    Ends sum, weight, smallest = Ends{} + std::numeric_limits<double>::infinity();
    load(input_.sum + first, sum);
    load(input_.weight + first, weight);
    Numbers which = Numbers{} + static_cast<std::int64_t>(low);
    for (std::size_t l = low; l <= high; ++l) {
      const Ends s = sum - input_.sum[l], value = input_.best[l] - s * s / (weight - input_.weight[l]);
      which = value < smallest ? Numbers{} + static_cast<std::int64_t>(l) : which;
      smallest = value < smallest ? value : smallest;
    }
    smallest += penalty_;
    std::memcpy(input_.best + first, &smallest, sizeof smallest);
    for (std::size_t lane = 0; lane < kSide; ++lane)
      input_.from[first + lane] = static_cast<std::uint32_t>(which[lane]);
  }

  const PaletteRuns input_;
  double penalty_ = 0;
};
#endif

// Collects the bins with weight among kPassed bins from `first` on, ascending or descending; returns their number. Up
// to kPassed elements may be written.
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
  const unsigned mask = _mm512_cmp_pd_mask(low, _mm512_setzero_pd(), _CMP_GT_OQ) |
                        static_cast<unsigned>(_mm512_cmp_pd_mask(high, _mm512_setzero_pd(), _CMP_GT_OQ)) << (kPassed / 2);
  if (!mask) return count;
  numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(static_cast<int>(first)));
  const __m256i result = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), numbers));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys), result);
  count = static_cast<std::size_t>(std::popcount(mask));
#else
  std::uint64_t all[kPassed], mask = 0;
  std::memcpy(all, weights + first, sizeof all);
  for (const std::uint64_t bits : all) mask |= bits;
  if (!mask) return count;
  for (std::size_t i = 0; i < kPassed; ++i) {
    const std::size_t key = kDown ? first + (kPassed - 1 - i) : first + i;
    keys[count] = static_cast<std::uint16_t>(key);
    count += weights[key] > 0;
  }
#endif
  return count;
}

template <Dtype kDtype>
std::size_t points(const double* weights, const std::uint16_t* keys, std::size_t n, double* values,
                   double* result_out) {
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = static_cast<double>(Element<kDtype>::load(keys[i]));
    result_out[i] = weights[keys[i]];
  }
  const std::size_t half = static_cast<std::size_t>(std::find_if(keys, keys + n, [](auto key) { return key < kBins / 2; }) - keys);
  if (!half || half == n || values[half - 1] < values[half]) return n;
  result_out[half - 1] += result_out[half];  // -0 and +0
  std::copy(values + half + 1, values + n, values + half);
  std::copy(result_out + half + 1, result_out + n, result_out + half);
  return n - 1;
}

}  // namespace

void palette_runs(const PaletteRuns& input, double penalty, [[maybe_unused]] std::size_t runs) {
#if defined(__AVX__)
  const std::size_t block = std::min(std::bit_floor(input.n / runs / kShare), kMost);
  if (block >= kSide && Blocks(input).solve(penalty, block)) return;
#endif
  Penalized(input).solve(penalty);
}

std::size_t palette_keys(const double* weights, std::uint16_t* keys) {
  std::size_t count = 0;
  for (std::size_t i = kBins; i > kBins / 2; i -= kPassed) count += keys_of<true>(weights, i - kPassed, keys + count);
  for (std::size_t i = 0; i < kBins / 2; i += kPassed) count += keys_of<false>(weights, i, keys + count);
  return count;
}

std::size_t palette_points(const double* weights, const std::uint16_t* keys, std::size_t n, Dtype type, double* values,
                           double* result_out) {
  return type == Dtype::f16 ? points<Dtype::f16>(weights, keys, n, values, result_out)
                            : points<Dtype::bf16>(weights, keys, n, values, result_out);
}

}  // namespace ingot::INGOT_ISA
