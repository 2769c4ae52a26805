// Chooses the candidate scale of a group with the least squared error (spec/affine.md, "Quantizers"). Values are
// multiplied by 1 / s, which is several times faster than division. The quotient is then wrong by less than two units
// in the last place, and rounds to another integer only if it is close to the middle of two. The errors of a group with
// such a value are computed again with divisions for that candidate, so that all sums equal those of division. Most
// candidates are excluded before (affine_screen.h).
#pragma once
#include <bit>

#include "kernels/affine_screen.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kParts = kLanes / kWidth;

// (w - z) / s, ties to even, limited to the range of codes; `farthest` is the largest distance from an integer so far.
template <bool kDivide>
inline Floats nearest_level(Floats value, Floats low, Floats high, Floats by, Floats& farthest) {
  const Floats level = smaller(larger(kDivide ? value / by : value * by, low), high);
#if defined(__AVX512DQ__)
  const Floats error = _mm512_maskz_reduce_ps(0xffff, level, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  farthest = _mm512_maskz_range_ps(0xffff, farthest, error, 0xb);  // the larger magnitude
  return level - error;
#else
  const Floats integer = (level + kRound) - kRound;
  farthest = larger(farthest, magnitude(level - integer));
  return integer;
#endif
}

// The upper half of sixteen sums is added to the lower, four times.
inline float halved(const Floats (&sums)[kParts]) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  __m256 lower, upper;
  std::memcpy(&lower, &sums[0], sizeof lower);
  std::memcpy(&upper, reinterpret_cast<const char*>(&sums[0]) + sizeof lower, sizeof upper);
  const __m256 eight = _mm256_add_ps(lower, upper);
#else
  const __m256 eight = _mm256_add_ps(sums[0], sums[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  alignas(64) float all_of[kLanes];
  std::memcpy(all_of, sums, sizeof all_of);
  for (std::size_t width = kLanes / 2; width; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane) all_of[lane] += all_of[lane + width];
  return all_of[0];
#endif
}

// The values of a group. Element i is added to partial sum i % 16.
template <Dtype kDtype>
class Trial {
 public:
  Trial(const TypeOf<kDtype>* in, std::size_t n, const Grids& grids, int count) : in_(in), n_(n), grids_(grids), count_(count) {
    if (n <= kBlock) load(0, n);
    float widest = 0, least = 1, most = 1;
    for (int k = 0; k < kCandidates; ++k) {
      const float reach = k < count ? (grids.high[k] > -grids.low[k] ? grids.high[k] : -grids.low[k]) : 0;
      const float scale = k < count ? grids.scale[k] : 1;
      widest = reach > widest ? reach : widest;
      least = scale < least ? scale : least;
      most = scale > most && scale < std::bit_cast<float>(kInfinity) ? scale : most;
    }
    near_ = least > 0x1p-100F && most < 0x1p100F ? 0.5F - (widest + 1) * 0x1p-21F : 0;
  }

  // errors[k] = sum of (w - s * (q - z))^2 in f32; infinite for candidates with an infinite scale, or whose bit in
  // `wanted` is 0.
  template <bool kOffset>
  void run(std::uint32_t requested, float* errors) {
    for (int k = 0; k < count_; ++k) {
      errors[k] = std::bit_cast<float>(kInfinity);
      if (!(requested >> k & 1) || !is_finite(grids_.scale[k])) continue;
      Floats farthest{};
      if (near_ > 0) errors[k] = grid_error<false, kOffset>(grids_.grid(k), farthest);
      if (!(near_ > 0 && all_below(farthest, near_))) errors[k] = grid_error<true, kOffset>(grids_.grid(k), farthest);
    }
  }

 private:
  // Values past the end are 0.
  void load(std::size_t start, std::size_t size) {
    load_block<kDtype>(in_ + start, size, block_);
    for (std::size_t i = size; i % kLanes; ++i) block_[i] = 0;
  }

  template <bool kDivide, bool kOffset>
  float grid_error(const AffineGrid& grid, Floats& farthest) {
    const Floats low = all(grid.low), high = all(grid.high), scale = all(grid.scale), offset = all(grid.offset);
    const Floats by = kDivide ? scale : all(1.0F / grid.scale);
    Floats sums[kParts]{}, far = farthest;
    for (std::size_t start = 0; start < n_; start += kBlock) {
      const std::size_t size = n_ - start < kBlock ? n_ - start : kBlock;
      if (n_ > kBlock) load(start, size);
      for (std::size_t i = 0; i < size; i += kLanes)
        for (std::size_t part = 0; part < kParts; ++part) {
          const Floats value = ingot::INGOT_ISA::load_floats(block_ + i + part * kWidth);
          const Floats level = nearest_level<kDivide>(kOffset ? value - offset : value, low, high, by, far);
          Floats error = value - (kOffset ? scale * level + offset : scale * level);
          if (kOffset && i + kLanes > size) error = only(error, size - i, part);
          sums[part] += error * error;
        }
    }
    farthest = far;
    return halved(sums);
  }

  // The errors of the group's values only: if grids have offsets, padding with 0 has errors too.
  static Floats only(Floats error, std::size_t there, std::size_t part) {
    for (std::size_t lane = 0; lane < kWidth; ++lane)
      if (part * kWidth + lane >= there) error[lane] = 0;
    return error;
  }

  const TypeOf<kDtype>* in_;
  std::size_t n_;
  const Grids& grids_;
  int count_;
  float near_;
  alignas(64) float block_[kBlock];
};

// The first candidate with the least error, -1 if no scale is finite.
template <Dtype kDtype, bool kOffset>
int best_of(const TypeOf<kDtype>* in, std::size_t n, const AffineRange& range, const Grids& grids) {
  const std::uint32_t remaining = Screen<kDtype, kOffset>(in, n, range, grids).run();
  if (std::has_single_bit(remaining)) return std::countr_zero(remaining);
  alignas(64) float errors[kCandidates];
  Trial<kDtype>(in, n, grids, kCandidates).template run<kOffset>(remaining, errors);
  int best = -1;
  for (int k = 0; k < kCandidates; ++k)
    if (remaining >> k & 1 && is_finite(grids.scale[k]) && (best < 0 || errors[k] < errors[best])) best = k;
  return best;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
