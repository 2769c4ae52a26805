// The candidates for a group's scale in the search for the least squared error (spec/affine.md, "Quantizers").
#pragma once
#include "kernels/affine_choose.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kPadded = 32;  // candidates, padded to a multiple of any vector width

// All candidates, several in parallel. Padding has infinite scales, so that it never wins.
struct Grids {
  alignas(64) float low[kPadded] = {}, high[kPadded] = {}, scale[kPadded], zero[kPadded] = {}, offset[kPadded] = {};

  Grids() {
    for (float& item : scale) item = std::bit_cast<float>(kInfinity);
  }

  AffineGrid grid(int k) const { return {low[k], high[k], scale[k], zero[k], offset[k]}; }
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
#if defined(__AVX2__) && defined(__F16C__)
  if constexpr (kDtype == Dtype::f16) {
    for (int k = 0; k < kCandidates; k += 8)
      _mm256_storeu_ps(values + k, _mm256_cvtph_ps(store_eight<kDtype>(_mm256_loadu_ps(values + k))));
    return;
  }
#endif
  for (int k = 0; k < kCandidates; ++k) values[k] = Element<kDtype>::load(Element<kDtype>::store(values[k]));
}

inline void round_all(float* values, Dtype type) {
  if (type == Dtype::f16) round_all<Dtype::f16>(values);
  if (type == Dtype::bf16) round_all<Dtype::bf16>(values);
}

// The grids of a range shrunk by 1 - k / 32, towards its middle if there are offsets. The range has more than one
// value; a scale is infinite if an element type cannot represent it or the offset.
inline void find_grids(const Chooser& chooser, float low, float high, Grids& to) {
  const AffineChoice& choice = chooser.choice;
  const float levels = static_cast<float>((1 << chooser.bits) - 1), least = chooser.least_scale();
  const float amax = chooser.symmetric_most(), magnitude = -low > high ? -low : high;
  const AffineGrid plain = chooser.limits(1, 0);
  alignas(64) float bottom[kCandidates];
  for (int k = 0; k < kCandidates; ++k) {
    const float shrink = static_cast<float>(32 - k) * 0x1p-5f;
    const float off = (high - low) * (static_cast<float>(k) * 0x1p-6f);
    bottom[k] = choice.offset ? low + off : low * shrink;
    const float top = choice.offset ? high - off : high * shrink;
    to.scale[k] = choice.symmetric ? magnitude * shrink / amax : (top - bottom[k]) / levels;
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

}  // namespace
}  // namespace ingot::INGOT_ISA
