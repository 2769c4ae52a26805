// Computes the scale and zero point of a group from its range, once per instruction set.
#pragma once
#include "core/affine.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 256;         // values widened to f32 at a time
constexpr std::size_t kLanes = 16;          // partial sums of the squared error
constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding and subtracting it rounds |x| <= 2^22 to an integer
constexpr std::int32_t kInfinity = 0x7f800000;
constexpr std::int32_t kMagnitude = 0x7fffffff;

inline float round_even(float x) { return (x + kRound) - kRound; }

// The order-preserving map from the bits of floats to integers, bits ^ ((bits >> 31) & kMagnitude), is its own inverse.
// Minima and maxima of integers can be vectorized and do not lose NaN.
inline float from_key(std::int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & kMagnitude)); }

// Codes and their limits: q = clip(rint((w - offset) / s), low, high) + zero, modulo 2^bits. `zero` is the stored
// value, which is below that of unsigned codes by the choice's shift.
struct AffineGrid {
  float low;
  float high;
  float scale;
  float zero;
  float offset = 0;
};

struct Chooser {
  int bits;
  AffineChoice choice;

  float least_scale() const {
    return choice.scale_type == Dtype::f16 ? 0x1p-24f : choice.scale_type == Dtype::bf16 ? 0x1p-133f : 0x1p-149f;
  }
  float round_scale(float scale) const {
    if (choice.scale_type == Dtype::f16) scale = f16_to_f32(f32_to_f16(scale));
    if (choice.scale_type == Dtype::bf16) scale = bf16_to_f32(f32_to_bf16(scale));
    return scale > 0 ? scale : least_scale();
  }

  // Limits for a known scale and zero point; symmetric codes are `signed`.
  AffineGrid limits(float scale, float zero) const {
    const float half = static_cast<float>(1 << (bits - 1)), levels = static_cast<float>((1 << bits) - 1);
    if (choice.symmetric && choice.zero_point >= 0) {
      const float constant = static_cast<float>(choice.zero_point);
      return {-constant, levels - constant, scale, constant};
    }
    if (choice.symmetric) return {-half, half - 1, scale, 0};
    const float offset = zero + choice.shift;
    return {-offset, levels - offset, scale, zero};
  }

  // The largest magnitude that codes have with both signs.
  float symmetric_most() const {
    const int top = (1 << (bits - 1)) - 1, point = choice.zero_point, above = (1 << bits) - 1 - point;
    return static_cast<float>(point < 0 ? top : point < above ? point : above);
  }

  float round_offset(float offset) const {
    if (choice.scale_type == Dtype::f16) return f16_to_f32(f32_to_f16(offset));
    if (choice.scale_type == Dtype::bf16) return bf16_to_f32(f32_to_bf16(offset));
    return offset;
  }

  // A range that need not contain 0; the scale is infinite if an element type cannot represent it or the offset.
  AffineGrid offset_whole(float low, float high) const {
    const float levels = static_cast<float>((1 << bits) - 1), bottom = low + 0.0f, offset = round_offset(bottom);
    float scale = low == high ? 1.0f : round_scale((high - bottom) / levels);
    if (!is_finite(offset)) scale = std::bit_cast<float>(kInfinity);
    return {0, levels, scale, 0, offset};
  }

  // Returns whether the range is a single value, whose grid does not change by shrinking.
  bool flat(float low, float high) const { return choice.offset ? low == high : !(low < 0) && !(high > 0); }

  // The grid of the complete range.
  AffineGrid full_range(float low, float high) const {
    const float levels = static_cast<float>((1 << bits) - 1);
    if (choice.offset) return offset_whole(low, high);
    if (!(low < 0) && !(high > 0)) return limits(1, 0 - choice.shift);
    if (choice.symmetric) {
      const float amax = symmetric_most();
      const float magnitude = -low > high ? -low : high;
      return limits(round_scale(magnitude / amax), 0);
    }
    const float scale = round_scale((high - low) / levels);
    float zero = -low / scale;
    zero = zero < levels ? zero : levels;
    return limits(scale, round_even(zero) + 0.0f - choice.shift);
  }
};

}  // namespace
}  // namespace ingot::INGOT_ISA
