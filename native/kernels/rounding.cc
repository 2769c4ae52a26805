// Scales by weighted search, rounding with feedback (GPTQ, arXiv 2210.17323), and coordinate descent on the error under
// two factors. Sums have one order at any width of vectors.
#include "core/rounding.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kSixteen = 16;
constexpr int kFactors = 16, kTurns = 3;
constexpr float kFirstFactor = 0.40f, kFactorStep = 0.052f;  // of the scale by which the largest magnitude just fits

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

  // The code whose level is nearest; of two as near the even integer, or the lower level of a table.
  std::uint8_t nearest(float x) const {
    if (grid_.uniform) {
      const float low = grid_.levels[0];
      float place = std::min(std::max(x, low), low + last_);
      place = to_integer(place) - low;
      return static_cast<std::uint8_t>(place > 0 ? place : 0.0f);  // NaN: the first
    }
    std::size_t code = 0;
    for (std::size_t step = grid_.count / 2; step > 0; step /= 2) code += x > between_[code + step - 1] ? step : 0;
    return static_cast<std::uint8_t>(code);
  }

  // levels[j] = the level nearest to x[j].
  void nearest_levels(const float* __restrict x, std::size_t n, float* __restrict found) const {
    const float low = grid_.levels[0], high = low + last_;
    if (grid_.uniform) {
      for (std::size_t j = 0; j < n; ++j) {
        float place = x[j] > low ? x[j] : low;
        place = place < high ? place : high;
        found[j] = to_integer(place);
      }
      return;
    }
    for (std::size_t j = 0; j < n; ++j) found[j] = low;
    for (std::size_t k = 0; k + 1 < grid_.count; ++k) {
      const float limit = between_[k], level = grid_.levels[k + 1];
      for (std::size_t j = 0; j < n; ++j) found[j] = x[j] > limit ? level : found[j];
    }
  }

  float level(std::uint8_t code) const { return grid_.levels[code]; }

  float value(std::uint8_t code, float scale, float zero) const {
    return grid_.offset ? scale * level(code) + zero : scale * (level(code) - zero);
  }

  // What a value is among the levels.
  float among(float value, float scale, float zero) const {
    return grid_.offset ? (value - zero) / scale : value / scale + zero;
  }

 private:
  const Grid& grid_;
  float last_;
  std::array<float, kMostLevels> between_;
};

inline float total(const float* lanes) {
  float sum = 0;
  for (std::size_t lane = 0; lane < kSixteen; ++lane) sum += lanes[lane];
  return sum;
}

// Values of one group with what their errors weigh, padded to whole lanes with weights of 0.
struct Group {
  std::vector<float> values, weights, among, levels;
  std::size_t size = 0;

  void resize(std::size_t n) {
    size = (n + kSixteen - 1) / kSixteen * kSixteen;
    for (auto* each : {&values, &weights, &among, &levels}) each->assign(size, 0.0f);
  }

  struct Sums {
    float error, product, square;  // sum h (t - v)^2, sum h t l, sum h l l, with l = v / scale (less the zero)
  };

  Sums measure(const Levels& levels_of, float scale, float zero, bool offset) {
    for (std::size_t j = 0; j < size; ++j) among[j] = levels_of.among(values[j], scale, zero);
    levels_of.nearest_levels(among.data(), size, levels.data());
    float error[kSixteen] = {}, product[kSixteen] = {}, square[kSixteen] = {};
    const float shift = offset ? 0.0f : zero, base = offset ? zero : 0.0f;
    for (std::size_t j = 0; j < size; j += kSixteen)
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        const float level = levels[j + lane] - shift, value = values[j + lane] - base, weight = weights[j + lane];
        const float away = value - scale * level;
        error[lane] += weight * away * away;
        product[lane] += weight * value * level;
        square[lane] += weight * level * level;
      }
    return {total(error), total(product), total(square)};
  }
};

struct Best {
  float scale = 0, zero = 0, error = std::numeric_limits<float>::infinity();
};

// Tries a scale, then the scale of least error for the levels that it gave, and so on.
void consider(Group& group, const Levels& levels, const Grid& grid, float scale, float zero, Best& best) {
  for (int turn = 0; turn < kTurns; ++turn) {
    scale = as_stored(scale, grid.scale_type);
    if (scale == 0 || !is_finite(scale) || (!grid.turned && scale < 0)) return;
    const Group::Sums sums = group.measure(levels, scale, zero, grid.offset);
    if (sums.error < best.error) best = {scale, zero, sums.error};
    if (!(sums.square > 0)) return;
    const float better = as_stored(sums.product / sums.square, grid.scale_type);
    if (better == scale) return;
    scale = better;
  }
}

// Of values between a lowest and a highest: with zero points (integers) or offsets.
void consider_range(Group& group, const Levels& levels, const Grid& grid, float low, float high, Best& best) {
  const float first = grid.levels[0], span = grid.levels[grid.count - 1] - first;
  for (int k = 0; k < kFactors; ++k) {
    const float factor = kFirstFactor + kFactorStep * static_cast<float>(k);
    const float scale = as_stored((high - low) * factor / span, grid.scale_type);
    if (scale == 0 || !is_finite(scale)) continue;
    const float from = low + (high - low) * (1 - factor) / 2;
    float zero;
    if (grid.offset) {
      zero = as_stored(from - scale * first, grid.scale_type);
    } else {
      zero = to_integer(first - from / scale);
      zero = std::min(std::max(zero, first), first + span);
    }
    if (is_finite(zero)) consider(group, levels, grid, scale, zero, best);
  }
}

}  // namespace

std::size_t rounding_scales(const Grid& grid, const float* values, std::size_t stride, std::size_t rows, std::size_t cols,
                            const float* weights, float* scales, float* zeros, std::size_t scale_stride) {
  const Levels levels(grid);
  Group group;
  group.resize(cols);
  std::copy_n(weights, cols, group.weights.data());
  const float most = std::max(std::fabs(grid.levels[0]), std::fabs(grid.levels[grid.count - 1]));
  for (std::size_t row = 0; row < rows; ++row) {
    std::copy_n(values + row * stride, cols, group.values.data());
    float low = 0, high = 0;
    for (std::size_t j = 0; j < cols; ++j) {
      low = std::min(low, group.values[j]);
      high = std::max(high, group.values[j]);
    }
    const float magnitude = std::max(-low, high);
    Best best;
    if (zeros != nullptr) {
      consider_range(group, levels, grid, low, high, best);
      zeros[row * scale_stride] = best.zero;
    } else {
      for (int k = 0; k < kFactors; ++k)
        for (const float sign : {1.0f, -1.0f})
          consider(group, levels, grid, sign * (magnitude / most * (kFirstFactor + kFactorStep * static_cast<float>(k))), 0, best);
    }
    scales[row * scale_stride] = best.scale;
    if (magnitude > 0 && best.scale == 0 && magnitude / most > 1) return row;  // past the range of the scales' type
  }
  return rows;
}

void rounding_nearest(const Grid& grid, const Rounded& to, const float* values) {
  const Levels levels(grid);
  for (std::size_t row = 0; row < to.rows; ++row)
    for (std::size_t j = 0; j < to.cols; ++j) {
      const std::size_t at = row * to.groups + static_cast<std::size_t>(to.group_of[j]);
      const float scale = to.scales[at], zero = to.zeros ? to.zeros[at] : 0.0f;
      to.codes[row * to.cols + j] = levels.nearest(scale == 0 ? zero : levels.among(values[row * to.cols + j], scale, zero));
    }
}

// Columns first to last, whose targets take in the errors of all before; these of each other are added here.
void rounding_feedback(const Grid& grid, const Rounded& to, std::size_t first, std::size_t last, const float* wanted,
                       float* targets, const float* factor, float* errors) {
  const Levels levels(grid);
  const std::size_t n = to.cols;
  for (std::size_t row = 0; row < to.rows; ++row) {
    float* __restrict target = targets + row * n;
    for (std::size_t j = first; j < last; ++j) {
      const std::size_t at = row * to.groups + static_cast<std::size_t>(to.group_of[j]);
      const float scale = to.scales[at], zero = to.zeros ? to.zeros[at] : 0.0f;
      const std::uint8_t code = levels.nearest(scale == 0 ? zero : levels.among(target[j], scale, zero));
      to.codes[row * n + j] = code;
      const float error = wanted[row * n + j] - levels.value(code, scale, zero);
      errors[row * n + j] = error;
      const float* __restrict next = factor + j * n;
      for (std::size_t k = j + 1; k < last; ++k) target[k] += error * next[k];
    }
  }
}

void rounding_descend(const Grid& grid, const Rounded& to, const Descent& down) {
  const Levels levels(grid);
  const std::size_t rows = to.rows, n = to.cols;
  std::vector<float> change(rows * n, 0.0f), slope, part, moved;  // change of D A; gradient of the group; its levels
  for (std::size_t first = 0; first < n;) {
    std::size_t last = first + 1;
    while (last < n && to.group_of[last] == to.group_of[first]) ++last;
    const std::size_t size = last - first, group = static_cast<std::size_t>(to.group_of[first]);
    slope.resize(size);
    part.resize(size);
    moved.assign(rows * size, 0.0f);
    bool any = false;
    for (std::size_t row = 0; row < rows; ++row) {
      const float own = down.outputs[row * rows + row];
      float& scale = to.scales[row * to.groups + group];
      const float zero = to.zeros ? to.zeros[row * to.groups + group] : 0.0f;
      if (scale == 0 || !(own > 0)) continue;
      float* __restrict m = slope.data();
      std::copy_n(down.gradient + row * n + first, size, m);
      for (std::size_t other = 0; other < rows; ++other) {
        const float link = down.outputs[row * rows + other];
        const float* __restrict theirs = change.data() + other * n + first;
        for (std::size_t j = 0; j < size; ++j) m[j] += link * theirs[j];
      }
      float* __restrict mine = change.data() + row * n + first;
      const auto shift = [&](std::size_t j, float by) {
        const float* __restrict input = down.inputs + (first + j) * n + first;
        moved[row * size + j] += by;
        any = true;
        for (std::size_t k = 0; k < size; ++k) {
          mine[k] += by * input[k];
          m[k] += own * by * input[k];
        }
      };
      std::uint8_t* codes = to.codes + row * n + first;
      for (std::size_t j = 0; j < size; ++j) {
        const float curve = own * down.inputs[(first + j) * n + first + j], value = levels.value(codes[j], scale, zero);
        const std::uint8_t code = levels.nearest(levels.among(value - m[j] / curve, scale, zero));
        if (code == codes[j]) continue;
        codes[j] = code;
        shift(j, levels.value(code, scale, zero) - value);
      }
      if (!down.refit) continue;
      // D changes by (new scale - scale) * level: the gradient and the curve along that.
      float along = 0, curve = 0;
      for (std::size_t j = 0; j < size; ++j) part[j] = levels.level(codes[j]) - (grid.offset ? 0.0f : zero);
      for (std::size_t j = 0; j < size; ++j) along += m[j] * part[j];
      for (std::size_t j = 0; j < size; ++j) {
        const float* __restrict input = down.inputs + (first + j) * n + first;
        float lanes[kSixteen] = {};
        for (std::size_t k = 0; k < size; ++k) lanes[k % kSixteen] += input[k] * part[k];
        curve += part[j] * total(lanes);
      }
      curve *= own;
      if (!(curve > 0)) continue;
      const float better = as_stored(scale - along / curve, grid.scale_type), by = better - scale;
      if (better == 0 || !is_finite(better) || (!grid.turned && better < 0) || !(by * (2 * along + by * curve) < 0)) continue;
      for (std::size_t j = 0; j < size; ++j)
        shift(j, levels.value(codes[j], better, zero) - levels.value(codes[j], scale, zero));
      scale = better;
    }
    if (any) {  // the other columns of D A
      const float* input = down.inputs + first * n;
      multiply_add<float>(moved.data(), size, input, n, change.data(), n, rows, size, first, 1.0f);
      multiply_add<float>(moved.data(), size, input + last, n, change.data() + last, n, rows, size, n - last, 1.0f);
    }
    first = last;
  }
  for (std::size_t i = 0; i < rows * n; ++i) down.product[i] += change[i];
}

}  // namespace ingot::INGOT_ISA
