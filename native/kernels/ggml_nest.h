// Scales of groups as integers times the block's scale (spec/gguf.md, "Search"): neighbours of each integer are tried,
// then the block's scale, or scale and minimum, is fitted to the codes of all its groups.
#pragma once
#include "kernels/ggml_fit.h"

namespace ingot::INGOT_ISA {
namespace {

// Powers of two that scale a block's largest value to about 1, and back, so that squares stay in the range of f32.
struct Powers {
  Lanes near, back;
};

// A number rounded to f16, in the scale of the weights here; infinite if f16 cannot represent it.
inline float rounded(float value, const Powers& powers, std::size_t lane) {
  return f16_to_f32(f32_to_f16(value * powers.back[lane])) * powers.near[lane];
}
inline void half_bits(const Lanes& values, const Powers& powers, std::uint16_t* bits) {
  Lanes local;
  for (std::size_t lane = 0; lane < kLanes; ++lane) local[lane] = values[lane] * powers.back[lane];
  store_block<Dtype::f16>(local.values, kLanes, bits);
}
inline void round(Lanes& values, const Powers& powers) {
  std::uint16_t bits[kLanes];
  half_bits(values, powers, bits);
  load_block<Dtype::f16>(bits, kLanes, values.values);
  for (std::size_t lane = 0; lane < kLanes; ++lane) values[lane] *= powers.near[lane];
}

// The groups of a block: its scales d and least in each lane, the integers, and the errors.
struct Nested {
  Lanes d{}, dmin{}, steps{}, minimums{};
  Sums sums;

  void products(Lanes& scale, Lanes& offset) const {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      scale[lane] = d[lane] * steps[lane];
      offset[lane] = -(dmin[lane] * minimums[lane]);
    }
  }
  template <class Level, class Weights>
  void look(const Weights& tile) {
    Lanes scale, offset;
    products(scale, offset);
    measure<Level>(tile, scale, offset, sums);
  }
  void take(const Nested& other, std::size_t lane) {
    d[lane] = other.d[lane];
    dmin[lane] = other.dmin[lane];
    steps[lane] = other.steps[lane];
    minimums[lane] = other.minimums[lane];
    sums.error[lane] = other.sums.error[lane];
    sums.q[lane] = other.sums.q[lane];
    sums.qq[lane] = other.sums.qq[lane];
    sums.xq[lane] = other.sums.xq[lane];
  }
  void take_better(const Nested& other) {
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (other.sums.error[lane] < sums.error[lane]) take(other, lane);
  }
  // Processes block by block, of kGroups groups each.
  template <std::size_t kGroups>
  void take_better_blocks(const Nested& other) {
    for (std::size_t block = 0; block < kLanes; block += kGroups) {
      float ours = 0, theirs = 0;
      for (std::size_t lane = block; lane < block + kGroups; ++lane) {
        ours += sums.error[lane];
        theirs += other.sums.error[lane];
      }
      if (theirs < ours)
        for (std::size_t lane = block; lane < block + kGroups; ++lane) take(other, lane);
    }
  }
};

inline float nearest_step(float value, float unit, float low, float high) {
  return unit != 0 ? round_even(clipped(value / unit, low, high)) : 0.0f;
}

// The scale of each block: the value of the largest magnitude, divided by `limit`, rounded to f16.
template <std::size_t kGroups>
void block_scales(const Lanes& fitted, float amax, const Powers& powers, Lanes& d) {
  for (std::size_t block = 0; block < kLanes; block += kGroups) {
    float extreme = 0;
    for (std::size_t lane = block; lane < block + kGroups; ++lane) {
      const float size = fitted[lane] < 0 ? -fitted[lane] : fitted[lane];
      if (size > (extreme < 0 ? -extreme : extreme)) extreme = fitted[lane];
    }
    const float unit = rounded(extreme / amax, powers, block);
    for (std::size_t lane = block; lane < block + kGroups; ++lane) d[lane] = unit;
  }
}

// The best minimums for given codes and scales: weight * offset = total - scale * sum of codes.
template <class Type>
void fit_minimums(const Lanes& weight, const Lanes& total, Nested& now) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const float scale = now.d[lane] * now.steps[lane], unit = now.dmin[lane] * weight[lane];
    now.minimums[lane] = nearest_step(scale * now.sums.q[lane] - total[lane], unit, 0, Type::kHigh);
  }
}

// Tries steps changed by `away`, each with its present minimum and with the best minimum for its codes.
template <class Type, class Weights>
void try_steps(const Weights& tile, const Lanes& weight, const Lanes& total, const Nested& from, float away,
               Nested& now) {
  Nested other = from;
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    other.steps[lane] = other.d[lane] != 0 ? clipped(from.steps[lane] + away, Type::kLow, Type::kHigh) : 0.0f;
  other.template look<typename Type::Level>(tile);
  now.take_better(other);
  if constexpr (Type::kAffine) {
    fit_minimums<Type>(weight, total, other);
    other.template look<typename Type::Level>(tile);
    now.take_better(other);
  }
}

// Fits the block's scale, and minimum, with least squared error for all its codes; a value that f16 cannot represent is
// skipped.
template <class Type>
void fit_block(const Lanes& weight, const Lanes& total, const Powers& powers, std::size_t block, Nested& now) {
  float ss = 0, sx = 0, sm = 0, mm = 0, mx = 0;
  for (std::size_t lane = block; lane < block + Type::kGroups; ++lane) {
    const float step = now.steps[lane], minimum = now.minimums[lane];
    ss += (step * step) * now.sums.qq[lane];
    sx += step * now.sums.xq[lane];
    if constexpr (Type::kAffine) {
      sm += (step * minimum) * now.sums.q[lane];
      mm += (minimum * minimum) * weight[lane];
      mx += minimum * total[lane];
    }
  }
  float d = ss > 0 ? sx / ss : now.d[block], dmin = now.dmin[block];
  if constexpr (Type::kAffine) {  // x = d (step q) - least (minimum)
    const float spread = ss * mm - sm * sm;
    if (spread > 0x1p-20f * (ss * mm)) {
      d = (sx * mm - sm * mx) / spread;
      dmin = (sm * sx - ss * mx) / spread;
    } else {
      d = now.d[block];
    }
  }
  d = rounded(d, powers, block);
  dmin = rounded(dmin, powers, block);
  for (std::size_t lane = block; lane < block + Type::kGroups; ++lane) {
    if (is_finite(d)) now.d[lane] = d;
    if (is_finite(dmin)) now.dmin[lane] = dmin;
  }
}

// Computes scales, and offsets, of blocks from those of groups; returns false if f16 cannot represent one.
template <class Type, class Weights>
Nested nest(const Weights& tile, const Lanes& weight, const Lanes& total, const Powers& powers, const Lanes& scale,
            const Lanes& offset) {
  Nested now;
  block_scales<Type::kGroups>(scale, Type::kExtreme, powers, now.d);
  if constexpr (Type::kAffine) block_scales<Type::kGroups>(offset, -Type::kHigh, powers, now.dmin);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    now.steps[lane] = nearest_step(scale[lane], now.d[lane], Type::kLow, Type::kHigh);
    if constexpr (Type::kAffine) now.minimums[lane] = nearest_step(-offset[lane], now.dmin[lane], 0, Type::kHigh);
  }
  now.template look<typename Type::Level>(tile);
  for (int round = 0; round < 2; ++round) {
    const Nested from = now;
    for (const float away : {0.0f, -1.0f, 1.0f})
      if (away != 0 || Type::kAffine) try_steps<Type>(tile, weight, total, from, away, now);
    Nested other = now;
    for (std::size_t block = 0; block < kLanes; block += Type::kGroups) fit_block<Type>(weight, total, powers, block, other);
    other.template look<typename Type::Level>(tile);
    now.template take_better_blocks<Type::kGroups>(other);
  }
  return now;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
