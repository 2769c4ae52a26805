// Finds scales, and zeros, of a group by weighted search. Sums have a fixed order for any width of vectors.
#include <vector>

#include "kernels/float_vectors.h"
#include "kernels/kernels.h"
#include "kernels/rounding_levels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr int kTurns = 3;
// Relative to the scale at which the largest magnitude just fits; one for each lane.
constexpr float kFirstFactor = 0.40f, kFactorStep = 0.052f;
constexpr float kInfinite = std::numeric_limits<float>::infinity();

// Values of a group with the weights of their errors.
struct Group {
  std::vector<float> values, weights;
};

struct Best {
  float scale = 0, zero = 0, error = kInfinite;
};

using Sixteen = float[kSixteen];

// Weighted sums over the group: of the error, and of v, l, v l and l l, where l is the level minus the zero point (if
// there are zero points).
struct alignas(64) Sums {
  Sixteen error, value, level, product, square;
};

// Measures sixteen candidates in parallel, one per lane; each lane adds the values in order.
template <bool kZeros>
class Candidates {
 public:
  Candidates(const Group& group, const Levels& levels, const Grid& grid) : group_(group), levels_(levels), grid_(grid) {
    for (const float weight : group.weights) weight_ += weight;
  }

  // Measures the candidates, then repeatedly the best ones for the resulting levels, and updates `best`; among equal
  // ones the first.
  void consider(Sixteen& scales, Sixteen& zeros, Best& best) {
    Sixteen errors, best_scales = {}, best_zeros = {};
    std::fill_n(errors, kSixteen, kInfinite);
    bool alive[kSixteen];
    std::fill_n(alive, kSixteen, true);
    for (int turn = 0; turn < kTurns; ++turn) {
      stored(scales);
      if constexpr (kZeros) stored_zeros(zeros);
      bool any = false;
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        alive[lane] = alive[lane] && scales[lane] != 0 && is_finite(scales[lane]) &&
                      (scales[lane] > 0 || (!kZeros && grid_.turned)) && (!kZeros || is_finite(zeros[lane]));
        if (!alive[lane]) scales[lane] = 1, zeros[lane] = 0;
        any = any || alive[lane];
      }
      if (!any) break;
      measure(scales, zeros);
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        const bool better = alive[lane] && sums_.error[lane] < errors[lane];
        errors[lane] = better ? sums_.error[lane] : errors[lane];
        best_scales[lane] = better ? scales[lane] : best_scales[lane];
        best_zeros[lane] = better ? zeros[lane] : best_zeros[lane];
      }
      if (turn + 1 < kTurns) next(scales, zeros, alive);
    }
    for (std::size_t lane = 0; lane < kSixteen; ++lane)
      if (errors[lane] < best.error) best = {best_scales[lane], best_zeros[lane], errors[lane]};
  }

 private:
  void stored(Sixteen& numbers) const {
    std::uint16_t bits[kSixteen];
    if (grid_.scale_type == Dtype::f16) {
      store_block<Dtype::f16>(numbers, kSixteen, bits);
      load_block<Dtype::f16>(bits, kSixteen, numbers);
    } else if (grid_.scale_type == Dtype::bf16) {
      store_block<Dtype::bf16>(numbers, kSixteen, bits);
      load_block<Dtype::bf16>(bits, kSixteen, numbers);
    }
  }

  void stored_zeros(Sixteen& zeros) const {
    if (grid_.offset) return stored(zeros);
    const float first = grid_.levels[0], last = grid_.levels[grid_.count - 1];
    for (float& zero : zeros) zero = to_integer(std::min(std::max(zero, first), last));
  }

  void measure(const Sixteen& scales, const Sixteen& zeros) {
    for (std::size_t lane = 0; lane < kSixteen; lane += kWidth) {
      const Floats scale = load_floats(scales + lane), zero = load_floats(zeros + lane), inverse = all(1.0f) / scale;
      const Floats none = {}, base = kZeros && grid_.offset ? zero : none, point = kZeros && !grid_.offset ? zero : none;
      Floats error = {}, value = {}, level = {}, product = {}, square = {};
      for (std::size_t j = 0; j < group_.values.size(); ++j) {
        const Floats weight = all(group_.weights[j]), v = all(group_.values[j]);
        const Floats l = levels_.nearest_levels((v - base) * inverse + point) - point;
        const Floats away = (v - base) - scale * l, heavy = weight * l;
        error += weight * away * away;
        if constexpr (kZeros) {
          value += weight * v;
          level += heavy;
        }
        product += heavy * v;
        square += heavy * l;
      }
      store_floats(sums_.error + lane, error);
      store_floats(sums_.value + lane, value);
      store_floats(sums_.level + lane, level);
      store_floats(sums_.product + lane, product);
      store_floats(sums_.square + lane, square);
    }
  }

  // The best scales for the present levels; with zeros by linear regression.
  void next(Sixteen& scales, Sixteen& zeros, bool (&alive)[kSixteen]) const {
    if constexpr (!kZeros) {
      Sixteen better;
      for (std::size_t lane = 0; lane < kSixteen; ++lane) better[lane] = sums_.product[lane] / sums_.square[lane];
      stored(better);
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        alive[lane] = alive[lane] && sums_.square[lane] > 0 && better[lane] != scales[lane];
        scales[lane] = better[lane];
      }
    } else {
      for (std::size_t lane = 0; lane < kSixteen; ++lane) {
        const float square = sums_.square[lane], level = sums_.level[lane], value = sums_.value[lane];
        const float spread = weight_ * square - level * level;
        const float slope = (weight_ * sums_.product[lane] - value * level) / spread;
        const float base = (value - slope * level) / weight_;
        // Zero points: v = slope * (level - zero) + base, and the next zero absorbs the base.
        const float zero = grid_.offset ? base : zeros[lane] - base / slope;
        alive[lane] = alive[lane] && spread > 0x1p-18f * (weight_ * square) && slope > 0 &&
                      !(slope == scales[lane] && zero == zeros[lane]);
        scales[lane] = slope;
        zeros[lane] = zero;
      }
    }
  }

  const Group& group_;
  const Levels& levels_;
  const Grid& grid_;
  float weight_ = 0;
  Sums sums_;
};

float factor_of(std::size_t lane) { return kFirstFactor + kFactorStep * static_cast<float>(lane); }

// If all values are equal: an offset, or a zero point in the middle with a scale of 0.
Best flat(const Grid& grid, float value) {
  return {0, grid.offset ? as_stored(value, grid.scale_type) : grid.levels[grid.count / 2], 0};
}

// Tries scales for values between a lowest and a highest.
Best both(const Group& group, const Levels& levels, const Grid& grid) {
  float low = group.values[0], high = low;
  for (const float value : group.values) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (!grid.offset) {  // a zero point is one of the levels
    low = std::min(low, 0.0f);
    high = std::max(high, 0.0f);
  }
  Best best = flat(grid, low);
  if (low == high) return best;
  best.error = kInfinite;
  const float first = grid.levels[0], span = grid.levels[grid.count - 1] - first, reach = high - low;
  Sixteen scales, zeros;
  for (std::size_t lane = 0; lane < kSixteen; ++lane) {
    scales[lane] = reach * factor_of(lane) / span;
    const float from = low + reach * (1 - factor_of(lane)) / 2;
    zeros[lane] = grid.offset ? from - scales[lane] * first : first - from / scales[lane];
  }
  Candidates<true>(group, levels, grid).consider(scales, zeros, best);
  return best;
}

Best scale_alone(const Group& group, const Levels& levels, const Grid& grid, float magnitude, float amax) {
  Best best;
  Candidates<false> candidates(group, levels, grid);
  for (const float sign : {1.0f, -1.0f}) {
    if (sign < 0 && !grid.turned) continue;
    Sixteen scales, zeros = {};
    for (std::size_t lane = 0; lane < kSixteen; ++lane) scales[lane] = sign * (magnitude / amax * factor_of(lane));
    candidates.consider(scales, zeros, best);
  }
  return best;
}

}  // namespace

std::size_t rounding_scales(const Grid& grid, const float* values, std::size_t stride, std::size_t rows, std::size_t cols,
                            const float* weights, float* scales, float* zeros, std::size_t scale_stride) {
  const Levels levels(grid);
  Group group{std::vector<float>(cols), {weights, weights + cols}};
  const float amax = std::max(std::fabs(grid.levels[0]), std::fabs(grid.levels[grid.count - 1]));
  for (std::size_t row = 0; row < rows; ++row) {
    std::copy_n(values + row * stride, cols, group.values.data());
    float magnitude = 0;
    for (const float value : group.values) magnitude = std::max(magnitude, std::fabs(value));
    const Best best = zeros == nullptr ? scale_alone(group, levels, grid, magnitude, amax) : both(group, levels, grid);
    scales[row * scale_stride] = best.scale;
    if (zeros != nullptr) zeros[row * scale_stride] = best.zero;
    const bool none = best.scale == 0 && best.error > 0;
    if (magnitude > 0 && ((none && magnitude / amax > 1) || !is_finite(best.zero)))
      return row;  // exceeds the range of the type
  }
  return rows;
}

}  // namespace ingot::INGOT_ISA
