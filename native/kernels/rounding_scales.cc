// Finds scales, and zeros, of a group by weighted search. Sums have a fixed order for any width of vectors.
#include <vector>

#include "kernels/kernels.h"
#include "kernels/rounding_levels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr int kFactors = 16, kTurns = 3;
// Relative to the scale at which the largest magnitude just fits.
constexpr float kFirstFactor = 0.40f, kFactorStep = 0.052f;

// Values of a group with the weights of their errors, padded to complete lanes with weights of 0.
struct Group {
  std::vector<float> values, weights, among, levels;
  std::size_t size = 0;

  void resize(std::size_t n) {
    size = (n + kSixteen - 1) / kSixteen * kSixteen;
    for (auto* item : {&values, &weights, &among, &levels}) item->assign(size, 0.0f);
  }

  // Weighted sums over the group: of the error, and of v, l, v l and l l, where l is the level minus the zero point (if
  // there are zero points).
  struct Sums {
    float error, value, level, product, square;
  };

  // Without zeros, the sums of v and l are not needed.
  template <bool kZeros>
  Sums measure(const Levels& levels_of, float scale, float zero, bool offset) {
    for (std::size_t j = 0; j < size; ++j) among[j] = levels_of.among(values[j], scale, zero);
    levels_of.nearest_levels(among.data(), size, levels.data());
    float error[kSixteen] = {}, value[kSixteen] = {}, level[kSixteen] = {}, product[kSixteen] = {}, square[kSixteen] = {};
    const float shift = offset ? 0.0f : zero, base = offset ? zero : 0.0f;
    for (std::size_t j = 0; j < size; j += kSixteen)
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        const float l = levels[j + lane] - shift, v = values[j + lane], weight = weights[j + lane];
        const float away = (v - base) - scale * l;
        error[lane] += weight * away * away;
        if constexpr (kZeros) {
          value[lane] += weight * v;
          level[lane] += weight * l;
        }
        product[lane] += weight * v * l;
        square[lane] += weight * l * l;
      }
    return {total(error), total(value), total(level), total(product), total(square)};
  }
};

struct Best {
  float scale = 0, zero = 0, error = std::numeric_limits<float>::infinity();
};

// Tries a scale, then repeatedly the best scale for the resulting levels.
void consider(Group& group, const Levels& levels, const Grid& grid, float scale, Best& best) {
  for (int turn = 0; turn < kTurns; ++turn) {
    scale = as_stored(scale, grid.scale_type);
    if (scale == 0 || !is_finite(scale) || (!grid.turned && scale < 0)) return;
    const Group::Sums sums = group.measure<false>(levels, scale, 0, false);
    if (sums.error < best.error) best = {scale, 0, sums.error};
    if (!(sums.square > 0)) return;
    const float better = as_stored(sums.product / sums.square, grid.scale_type);
    if (better == scale) return;
    scale = better;
  }
}

// The same with a zero point (an integer among the levels) or an offset; scale and zero by linear regression.
void consider_both(Group& group, const Levels& levels, const Grid& grid, float scale, float zero, float weight, Best& best) {
  const float first = grid.levels[0], last = grid.levels[grid.count - 1];
  for (int turn = 0; turn < kTurns; ++turn) {
    scale = as_stored(scale, grid.scale_type);
    zero = grid.offset ? as_stored(zero, grid.scale_type) : to_integer(std::min(std::max(zero, first), last));
    if (!(scale > 0) || !is_finite(scale) || !is_finite(zero)) return;
    const Group::Sums sums = group.measure<true>(levels, scale, zero, grid.offset);
    if (sums.error < best.error) best = {scale, zero, sums.error};
    const float spread = weight * sums.square - sums.level * sums.level;
    if (!(spread > 0x1p-18f * (weight * sums.square))) return;
    const float slope = (weight * sums.product - sums.value * sums.level) / spread, rest = (sums.value - slope * sums.level) / weight;
    if (!(slope > 0)) return;
    // Zero points: v = slope * (level - zero) + rest, and the next zero absorbs the rest.
    const float other = grid.offset ? rest : zero - rest / slope;
    if (slope == scale && other == zero) return;
    scale = slope;
    zero = other;
  }
}

// Tries scales for values between a lowest and a highest.
void consider_range(Group& group, const Levels& levels, const Grid& grid, float low, float high, Best& best) {
  const float first = grid.levels[0], span = grid.levels[grid.count - 1] - first, reach = high - low;
  float lanes[kSixteen] = {};
  for (std::size_t j = 0; j < group.size; ++j) lanes[j % kSixteen] += group.weights[j];
  const float weight = total(lanes);
  for (int k = 0; k < kFactors; ++k) {
    const float factor = kFirstFactor + kFactorStep * static_cast<float>(k);
    const float scale = reach * factor / span, from = low + reach * (1 - factor) / 2;
    consider_both(group, levels, grid, scale, grid.offset ? from - scale * first : first - from / scale, weight, best);
  }
}

// If all values are equal: an offset, or a zero point in the middle with a scale of 0.
Best flat(const Grid& grid, float value) {
  return {0, grid.offset ? as_stored(value, grid.scale_type) : grid.levels[grid.count / 2], 0};
}

Best both(Group& group, const Levels& levels, const Grid& grid, std::size_t cols) {
  float low = group.values[0], high = low;
  for (std::size_t j = 1; j < cols; ++j) {
    low = std::min(low, group.values[j]);
    high = std::max(high, group.values[j]);
  }
  if (!grid.offset) {  // a zero point is one of the levels
    low = std::min(low, 0.0f);
    high = std::max(high, 0.0f);
  }
  Best best = flat(grid, low);
  if (low == high) return best;
  best.error = std::numeric_limits<float>::infinity();
  consider_range(group, levels, grid, low, high, best);
  return best;
}

Best scale_alone(Group& group, const Levels& levels, const Grid& grid, float magnitude, float amax) {
  Best best;
  for (int k = 0; k < kFactors; ++k)
    for (const float sign : {1.0f, -1.0f})
      consider(group, levels, grid, sign * (magnitude / amax * (kFirstFactor + kFactorStep * static_cast<float>(k))),
               best);
  return best;
}

}  // namespace

std::size_t rounding_scales(const Grid& grid, const float* values, std::size_t stride, std::size_t rows, std::size_t cols,
                            const float* weights, float* scales, float* zeros, std::size_t scale_stride) {
  const Levels levels(grid);
  Group group;
  group.resize(cols);
  std::copy_n(weights, cols, group.weights.data());
  const float amax = std::max(std::fabs(grid.levels[0]), std::fabs(grid.levels[grid.count - 1]));
  for (std::size_t row = 0; row < rows; ++row) {
    std::copy_n(values + row * stride, cols, group.values.data());
    float magnitude = 0;
    for (std::size_t j = 0; j < cols; ++j) magnitude = std::max(magnitude, std::fabs(group.values[j]));
    const Best best =
        zeros == nullptr ? scale_alone(group, levels, grid, magnitude, amax) : both(group, levels, grid, cols);
    scales[row * scale_stride] = best.scale;
    if (zeros != nullptr) zeros[row * scale_stride] = best.zero;
    const bool none = best.scale == 0 && best.error > 0;
    if (magnitude > 0 && ((none && magnitude / amax > 1) || !is_finite(best.zero)))
      return row;  // exceeds the range of the type
  }
  return rows;
}

}  // namespace ingot::INGOT_ISA
