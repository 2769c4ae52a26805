// The candidate for a group's scale that leaves the least squared error (spec/affine.md, "Quantizers"). Values are multiplied
// by 1 / s, which is several times faster than dividing: the quotient is then wrong by less than two units in the last
// place, and rounds to another integer only where it lies next to the middle of two. A group with such a value is divided
// once more by that candidate, so that all sums are those of dividing.
#pragma once
#include "kernels/affine_choose.h"
#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kParts = kLanes / kWidth;
// Candidates whose extremes alone leave more than the best are out. Sums of so many values err by less than kSure.
constexpr std::size_t kPruned = std::size_t{1} << 16;
constexpr float kSure = 0.99F;

// All candidates, a number of each side by side.
struct Grids {
  alignas(64) float low[kCandidates], high[kCandidates], scale[kCandidates], zero[kCandidates], offset[kCandidates];

  AffineGrid at(int k) const { return {low[k], high[k], scale[k], zero[k], offset[k]}; }
  void set(int k, const AffineGrid& grid) {
    low[k] = grid.low;
    high[k] = grid.high;
    scale[k] = grid.scale;
    zero[k] = grid.zero;
    offset[k] = grid.offset;
  }
};

template <Dtype kDtype>
inline void round_all(float* values) {
  for (int k = 0; k < kCandidates; ++k) values[k] = Element<kDtype>::load(Element<kDtype>::store(values[k]));
}

inline void round_all(float* values, Dtype type) {
  if (type == Dtype::f16) round_all<Dtype::f16>(values);
  if (type == Dtype::bf16) round_all<Dtype::bf16>(values);
}

// The grids of a range shrunk by 1 - k / 32, towards its middle where there are offsets. The range holds more than one
// value; scales are infinite where a type cannot hold them or the offset.
inline void find_grids(const Chooser& chooser, float low, float high, Grids& to) {
  const AffineChoice& choice = chooser.choice;
  const float levels = static_cast<float>((1 << chooser.bits) - 1), least = chooser.least_scale();
  const float most = chooser.symmetric_most(), magnitude = -low > high ? -low : high;
  const AffineGrid plain = chooser.limits(1, 0);
  alignas(64) float bottom[kCandidates];
  for (int k = 0; k < kCandidates; ++k) {
    const float shrink = static_cast<float>(32 - k) * 0x1p-5f;
    const float off = (high - low) * (static_cast<float>(k) * 0x1p-6f);
    bottom[k] = choice.offset ? low + off : low * shrink;
    const float top = choice.offset ? high - off : high * shrink;
    to.scale[k] = choice.symmetric ? magnitude * shrink / most : (top - bottom[k]) / levels;
  }
  round_all(to.scale, choice.scale_type);
  for (int k = 0; k < kCandidates; ++k) {
    to.scale[k] = to.scale[k] > 0 ? to.scale[k] : least;
    to.low[k] = plain.low;
    to.high[k] = plain.high;
    to.zero[k] = plain.zero;
    to.offset[k] = 0;
  }
  if (choice.offset) {
    round_all(bottom, choice.scale_type);
    for (int k = 0; k < kCandidates; ++k) {
      to.low[k] = to.zero[k] = 0;
      to.high[k] = levels;
      to.offset[k] = bottom[k];
      if (!is_finite(bottom[k])) to.scale[k] = std::bit_cast<float>(kInfinity);
    }
  } else if (!choice.symmetric) {
    for (int k = 0; k < kCandidates; ++k) {
      float zero = -bottom[k] / to.scale[k];
      zero = zero < levels ? zero : levels;
      zero = round_even(zero) + 0.0f - choice.shift;
      to.zero[k] = zero;
      to.low[k] = -(zero + choice.shift);
      to.high[k] = levels - (zero + choice.shift);
    }
  }
}

// The squared error of one value by each candidate.
inline void errors_of(float value, const Grids& grids, float* errors) {
  for (int k = 0; k < kCandidates; ++k) {
    float level = (value - grids.offset[k]) / grids.scale[k];
    level = level > grids.low[k] ? level : grids.low[k];
    level = level < grids.high[k] ? level : grids.high[k];
    const float error = value - (grids.scale[k] * round_even(level) + grids.offset[k]);
    errors[k] = error * error;
  }
}

// (w - z) / s, ties to even, within the codes' limits; `farthest` is from integers, of all seen.
template <bool kDivide>
inline Floats nearest_level(Floats value, Floats low, Floats high, Floats by, Floats& farthest) {
  const Floats level = smaller(larger(kDivide ? value / by : value * by, low), high);
#if defined(__AVX512DQ__)
  const Floats left = _mm512_maskz_reduce_ps(0xffff, level, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  farthest = _mm512_maskz_range_ps(0xffff, farthest, left, 0xb);  // the larger magnitude
  return level - left;
#else
  const Floats whole = (level + kRound) - kRound;
  farthest = larger(farthest, magnitude(level - whole));
  return whole;
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

// The values of a group. Element i goes to partial sum i % 16.
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

  // errors[k] = sum of (w - s * (q - z))^2 in f32; infinite for candidates that `cut` times kSure puts behind the best.
  template <bool kOffset>
  void run(const float* cut, float* errors) {
    float best = std::bit_cast<float>(kInfinity);
    for (int k = 0; k < count_; ++k) {
      errors[k] = std::bit_cast<float>(kInfinity);
      if (!is_finite(grids_.scale[k]) || (cut && cut[k] * kSure > best)) continue;
      Floats farthest{};
      if (near_ > 0) errors[k] = one<false, kOffset>(grids_.at(k), farthest);
      if (!(near_ > 0 && all_below(farthest, near_))) errors[k] = one<true, kOffset>(grids_.at(k), farthest);
      best = errors[k] < best ? errors[k] : best;
    }
  }

 private:
  // Values past the end are 0.
  void load(std::size_t start, std::size_t size) {
    load_block<kDtype>(in_ + start, size, block_);
    for (std::size_t i = size; i % kLanes; ++i) block_[i] = 0;
  }

  template <bool kDivide, bool kOffset>
  float one(const AffineGrid& grid, Floats& farthest) {
    const Floats low = all(grid.low), high = all(grid.high), scale = all(grid.scale), offset = all(grid.offset);
    const Floats by = kDivide ? scale : all(1.0F / grid.scale);
    Floats sums[kParts]{}, far = farthest;
    for (std::size_t start = 0; start < n_; start += kBlock) {
      const std::size_t size = n_ - start < kBlock ? n_ - start : kBlock;
      if (n_ > kBlock) load(start, size);
      for (std::size_t i = 0; i < size; i += kLanes)
        for (std::size_t part = 0; part < kParts; ++part) {
          const Floats value = ingot::INGOT_ISA::load(block_ + i + part * kWidth);
          const Floats level = nearest_level<kDivide>(kOffset ? value - offset : value, low, high, by, far);
          Floats error = value - (kOffset ? scale * level + offset : scale * level);
          if (kOffset && i + kLanes > size) error = only(error, size - i, part);
          sums[part] += error * error;
        }
    }
    farthest = far;
    return halved(sums);
  }

  // The errors of values that are there; a group that is filled up with 0 has others where grids have offsets.
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

// The first candidate of the least error, -1 where no scale is finite.
template <Dtype kDtype>
int best_of(const TypeOf<kDtype>* in, std::size_t n, const AffineRange& range, const Grids& grids, bool offset) {
  alignas(64) float errors[kCandidates], cut[kCandidates], other[kCandidates];
  errors_of(range.low, grids, cut);
  errors_of(range.high, grids, other);
  for (int k = 0; k < kCandidates; ++k) cut[k] += other[k];
  Trial<kDtype> trial(in, n, grids, kCandidates);
  const float* const bound = n <= kPruned ? cut : nullptr;
  offset ? trial.template run<true>(bound, errors) : trial.template run<false>(bound, errors);
  int best = -1;
  for (int k = 0; k < kCandidates; ++k)
    if (is_finite(grids.scale[k]) && (best < 0 || errors[k] < errors[best])) best = k;
  return best;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
