// Improves the scale, and zero, of a group of one row to reduce the error under both factors: values are scale * level
// + base, and the error is quadratic in scale and base. Only representable values are considered: an element type,
// integers, or integers times a unit.
#pragma once
#include <vector>

#include "kernels/rounding_levels.h"

namespace ingot::INGOT_ISA {
namespace {

struct Fitted {
  float scale, zero;
};

// Rows and columns of A that belong to a group.
struct Square {
  const float* a;
  std::size_t stride, size;
};

class Refit {
 public:
  Refit(const Grid& grid, const Rounded& to, const Square& square)
      : grid_(grid), to_(to), square_(square), along_(square.size) {
    if (to.zeros == nullptr) return;
    rows_.resize(square.size);
    float lanes[kSixteen] = {};
    for (std::size_t j = 0; j < square.size; ++j) {
      float local[kSixteen] = {};
      for (std::size_t k = 0; k < square.size; ++k) local[k % kSixteen] += square.a[j * square.stride + k];
      rows_[j] = total(local);
      lanes[j % kSixteen] += rows_[j];
    }
    ones_ = total(lanes);
  }

  // Tries a better fit for the present levels; m is G D A of these weights, `diagonal` the row's entry of G, `index` that of
  // its scale.
  Fitted better(const Fitted& now, const float* levels, const float* m, float diagonal, std::size_t index) const {
    const Error error = error_of(levels, m, diagonal);
    if (to_.zeros == nullptr) {
      if (!(error.squares > 0)) return now;
      const float scale = stored_scale(now.scale - error.along / error.squares, now.scale, index);
      return allowed(scale) && error.change(scale - now.scale, 0) < 0 ? Fitted{scale, 0} : now;
    }
    Fitted best = now;
    float smallest = 0;
    const auto attempt = [&](float scale, float base) {
      if (!allowed(scale)) return;
      const float zero = stored_zero(scale, base, now.zero, index);
      if (!is_finite(zero)) return;
      const float result = error.change(scale - now.scale, this->base(scale, zero) - this->base(now.scale, now.zero));
      if (result < smallest) {
        smallest = result;
        best = {scale, zero};
      }
    };
    const float from = base(now.scale, now.zero);
    if (error.ones > 0) attempt(now.scale, from - error.shift / error.ones);
    if (error.squares > 0) attempt(stored_scale(now.scale - error.along / error.squares, now.scale, index), from);
    const float spread = error.squares * error.ones - error.both * error.both;
    if (spread > 0x1p-18f * (error.squares * error.ones)) {
      const float scale =
          stored_scale(now.scale + (error.both * error.shift - error.ones * error.along) / spread, now.scale, index);
      // The best base for the rounded scale.
      attempt(scale, from - (error.shift + error.both * (scale - now.scale)) / error.ones);
    }
    return best;
  }

 private:
  // The change of the error for a change of scale and base.
  struct Error {
    float along, shift = 0, squares, both = 0, ones = 0;

    float change(float scale, float base) const {
      return scale * (2 * along + scale * squares) + base * (2 * shift + base * ones) + 2 * scale * base * both;
    }
  };

  Error error_of(const float* levels, const float* m, float diagonal) const {
    Error error{};
    const std::size_t size = square_.size;
    float* __restrict along = along_.data();
    std::fill(along_.begin(), along_.end(), 0.0f);
    for (std::size_t j = 0; j < size; ++j) {
      const float* __restrict input = square_.a + j * square_.stride;
      const float level = levels[j];
      for (std::size_t k = 0; k < size; ++k) along[k] += level * input[k];
    }
    error.along = dot(m, levels, size);
    error.squares = dot(along, levels, size);
    error.squares *= diagonal;
    if (to_.zeros == nullptr) return error;
    for (std::size_t j = 0; j < size; ++j) error.shift += m[j];
    error.both = dot(levels, rows_.data(), size);
    error.both *= diagonal;
    error.ones = diagonal * ones_;
    return error;
  }

  // Returns the value of level 0.
  float base(float scale, float zero) const { return grid_.offset ? zero : -(scale * zero); }

  bool allowed(float scale) const { return scale != 0 && is_finite(scale) && (grid_.turned || scale > 0); }

  float stored_scale(float scale, float now, std::size_t index) const {
    if (to_.units == nullptr) return as_stored(scale, grid_.scale_type);
    const float unit = to_.units[index];
    if (unit == 0) return now;
    return unit * to_integer(std::min(std::max(scale / unit, grid_.step_low), grid_.step_high));
  }

  float stored_zero(float scale, float base, float now, std::size_t index) const {
    if (!grid_.offset) {
      const float first = grid_.levels[0], last = grid_.levels[grid_.count - 1];
      return to_integer(std::min(std::max(-base / scale, first), last));
    }
    if (to_.zero_units == nullptr) return as_stored(base, grid_.scale_type);
    const float unit = to_.zero_units[index];
    return unit == 0 ? now : -(unit * to_integer(std::min(std::max(-base / unit, 0.0f), grid_.minimum_high)));
  }

  const Grid& grid_;
  const Rounded& to_;
  const Square square_;
  std::vector<float> rows_;           // sums of A's rows
  mutable std::vector<float> along_;  // A times the levels
  float ones_ = 0;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
