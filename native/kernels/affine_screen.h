// Excludes candidates of a group that cannot have the least squared error (affine_search.h). The errors of all
// candidates are approximated to about four digits, one candidate per lane. Usually one candidate remains, and only the
// remaining ones are measured exactly.
//
// Definitions: X is the exact error and A the approximate error, both in units of the squared scale s^2. T is at least
// 1 plus the largest quotient of a value and s. n is the number of values, and e = 2^-19 T.
//
// Approximate quotients have an error of at most 2^-22 T. If exact and approximate quotient round to the same integer,
// the remainders differ by this error and by the rounding of s * q + z and of the difference, which is again at most
// 2^-22 T. If they round to different integers, both remainders are within this distance of 1/2. So the magnitudes of
// remainders differ by at most e. By the triangle inequality, sqrt(X) and sqrt(A) differ by at most e sqrt(n). For any
// t between 0 and 1 follows
//  (1 - t) A - e^2 n / t <= X <= (1 + t) A + e^2 n (1 + 1 / t).
// A sum of n squares in f32 has a relative error of 2^-24 per addition. Scales are neither small nor large, so nothing
// is rounded to 0 or infinity.
#pragma once
#include <algorithm>
#include <limits>

#include "kernels/affine_grids.h"
#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::uint32_t kAllOf = (1u << kCandidates) - 1;
constexpr std::size_t kScreened = std::size_t{1} << 16;  // values, at most
constexpr float kLeastScale = 0x1p-40F, kMostScale = 0x1p40F, kMostQuotient = 0x1p15F;

// The errors of kWidth candidates.
template <bool kOffset>
class Side {
 public:
  Side(const Grids& grids, std::size_t first)
      : scale(load_floats(grids.scale + first)), by(1.0F / scale), offset(load_floats(grids.offset + first)),
        low_(load_floats(grids.low + first) + kRound), high_(load_floats(grids.high + first) + kRound) {}

  // Adds the errors of at most a block of values.
  void add(const float* values, std::size_t n) {
    Floats sums[2] = {};
    std::size_t i = 0;
    for (; i + 2 <= n; i += 2)
      for (std::size_t j = 0; j < 2; ++j) sums[j] = add(sums[j], values[i + j]);
    if (i < n) sums[0] = add(sums[0], values[i]);
    total += sums[0] + sums[1];
  }

  Floats scale, by, offset, total{};

 private:
  // Floats near kRound are integers. Fused and separate additions are both accurate enough here.
  Floats add(Floats sum, float value) const {
    const Floats from = kOffset ? splat(value) - offset : splat(value);
    const Floats level = smaller(larger(plus_product<true>(all(kRound), from, by), low_), high_) - kRound;
    const Floats error = plus_product<true>(level, from, -by);
    return plus_product<true>(sum, error, error);
  }

  Floats low_, high_;
};

template <Dtype kDtype, bool kOffset>
class Screen {
 public:
  Screen(const TypeOf<kDtype>* in, std::size_t n, const AffineRange& range, const Grids& grids)
      : in_(in), n_(n), ends_{range.low, range.high}, grids_(grids) {}

  // Returns a bit for each candidate that may be the best; the first candidate has the lowest bit.
  std::uint32_t run() {
    if (n_ > kScreened) return kAllOf;
    if (n_ <= kBlock) load_block<kDtype>(in_, n_, block_);
    std::uint32_t there[kPadded / kWidth] = {}, found = 0;
    Floats smallest[kPadded / kWidth];
    for (std::size_t i = 0; i * kWidth < kCandidates; ++i) {
      Side<kOffset> side(grids_, i * kWidth);
      if (!finite(side, there[i])) return kAllOf;
      if (i) {  // what its two extremes leave may tell
        Side<kOffset> two = side;
        two.add(ends_, 2);
        there[i] &= none_above(at_least(two), all(best_));
        if (!there[i]) continue;
      }
      add_all(side);
      smallest[i] = at_least(side);
      best_ = std::min(best_, least_of(at_most(side)));
    }
    for (std::size_t i = 0; i * kWidth < kCandidates; ++i)
      if (there[i]) found |= (there[i] & none_above(smallest[i], all(best_))) << (i * kWidth);
    return found;
  }

 private:
  void add_all(Side<kOffset>& side) {
    for (std::size_t start = 0; start < n_; start += kBlock) {
      const std::size_t size = n_ - start < kBlock ? n_ - start : kBlock;
      if (n_ > kBlock) load_block<kDtype>(in_ + start, size, block_);
      side.add(block_, size);
    }
  }

  // Sets the candidates with a finite scale; returns false if the bounds do not hold for one of them.
  bool finite(const Side<kOffset>& side, std::uint32_t& there) const {
    there = none_above(side.scale, all(std::numeric_limits<float>::max()));
    const std::uint32_t fine = none_above(all(kLeastScale), side.scale) & none_above(side.scale, all(kMostScale)) &
                               none_above(quotient(side), all(kMostQuotient));
    return !(there & ~fine);
  }

  // T of the definitions above.
  Floats quotient(const Side<kOffset>& side) const {
    const float amax = -ends_[0] > ends_[1] ? -ends_[0] : ends_[1];
    return (amax + magnitude(side.offset)) * side.by + 2;
  }
  // t, which is 2^-13 or 2^-17 T, plus the relative error of the sums.
  Floats share(const Side<kOffset>& side) const {
    const float n = static_cast<float>(n_);
    return larger(quotient(side) * 0x1p-17F, all(0x1p-13F)) + (n * 0x1p-4F + n * 0x1p-8F + 160) * 0x1p-23F;
  }
  // e^2 n (1 + 1 / t).
  Floats tail_of(const Side<kOffset>& side) const {
    const Floats base = quotient(side), square = base * base;
    return (square + smaller(square * 0x1p13F, base * 0x1p17F)) * (static_cast<float>(n_) * 0x1p-38F);
  }
  Floats at_least(const Side<kOffset>& side) const {
    return (side.total * (1 - share(side)) - tail_of(side)) * (side.scale * side.scale);
  }
  Floats at_most(const Side<kOffset>& side) const {
    return (side.total * (1 + share(side)) + tail_of(side)) * (side.scale * side.scale);
  }

  const TypeOf<kDtype>* in_;
  std::size_t n_;
  float ends_[2];
  const Grids& grids_;
  float best_ = std::numeric_limits<float>::infinity();
  alignas(64) float block_[kBlock];
};

}  // namespace
}  // namespace ingot::INGOT_ISA
