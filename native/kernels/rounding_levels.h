// Levels of codes, and the scales and zeros that can be stored with them.
#pragma once
#include "core/rounding.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/float_vectors.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kSixteen = 16;

inline float as_stored(float value, Dtype type) {
  if (type == Dtype::f16) return f16_to_f32(f32_to_f16(value));
  if (type == Dtype::bf16) return bf16_to_f32(f32_to_bf16(value));
  return value;
}

// To the nearest integer, ties to even; of magnitudes below 2^22.
inline float to_integer(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

class Levels {
 public:
  explicit Levels(const Grid& grid) : grid_(grid), last_(static_cast<float>(grid.count - 1)) {
    between_.fill(std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i + 1 < grid.count; ++i) between_[i] = grid.levels[i] + (grid.levels[i + 1] - grid.levels[i]) / 2;
  }

  // Returns the code of the nearest level; ties go to the even integer, or to the lower level of a table.
  std::uint8_t nearest(float x) const {
    if (grid_.uniform) {
      const float low = grid_.levels[0];
      float coordinate = std::min(std::max(x, low), low + last_);
      coordinate = to_integer(coordinate) - low;
      return static_cast<std::uint8_t>(coordinate > 0 ? coordinate : 0.0f);  // NaN: the first
    }
    std::size_t code = 0;
    for (std::size_t step = grid_.count / 2; step > 0; step /= 2) code += x > between_[code + step - 1] ? step : 0;
    return static_cast<std::uint8_t>(code);
  }

  // levels[j] = the level nearest to x[j].
  void nearest_levels(const float* __restrict x, std::size_t n, float* __restrict result_out) const {
    const float low = grid_.levels[0], high = low + last_;
    if (grid_.uniform) {
      for (std::size_t j = 0; j < n; ++j) {
        float coordinate = x[j] > low ? x[j] : low;
        coordinate = coordinate < high ? coordinate : high;
        result_out[j] = to_integer(coordinate);
      }
      return;
    }
    for (std::size_t j = 0; j < n; ++j) result_out[j] = low;
    for (std::size_t k = 0; k + 1 < grid_.count; ++k) {
      const float limit = between_[k], level = grid_.levels[k + 1];
      for (std::size_t j = 0; j < n; ++j) result_out[j] = x[j] > limit ? level : result_out[j];
    }
  }

  // Returns the levels nearest to the lanes of x.
  Floats nearest_levels(const Floats& x) const {
    const Floats low = all(grid_.levels[0]);
    if (grid_.uniform) {
      const Floats coordinate = smaller(larger(x, low), low + all(last_)), far = all(0x1.8p23f);
      return (coordinate + far) - far;
    }
    Floats result = low;
    for (std::size_t k = 0; k + 1 < grid_.count; ++k)
      result = x > all(between_[k]) ? all(grid_.levels[k + 1]) : result;
    return result;
  }

  float level(std::uint8_t code) const { return grid_.levels[code]; }

  float value(std::uint8_t code, float scale, float zero) const {
    return grid_.offset ? scale * level(code) + zero : scale * (level(code) - zero);
  }

  // Returns a value in units of the levels.
  float among(float value, float scale, float zero) const {
    return grid_.offset ? (value - zero) / scale : value / scale + zero;
  }

 private:
  const Grid& grid_;
  float last_;
  std::array<float, kMostLevels> between_;
};

// Adds the halves, then the quarters, and so on.
inline float total(const float* lanes) {
  float sums[kSixteen / 2];
  for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] = lanes[lane] + lanes[lane + 8];
  for (std::size_t lane = 0; lane < 4; ++lane) sums[lane] += sums[lane + 4];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

inline float dot(const float* __restrict a, const float* __restrict b, std::size_t n) {
  float lanes[kSixteen] = {};
  std::size_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen)
    for (std::size_t lane = 0; lane < kSixteen; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) lanes[i % kSixteen] += a[i] * b[i];
  return total(lanes);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
