// Scales, entries and signs of a block of a grid type (spec/gguf.md, "Grid types"). All groups of the block are searched at
// once, each with its own scale.
#pragma once
#include "kernels/floats.h"
#include "kernels/ggml_grid_pack.h"
#include "kernels/ggml_grid_search.h"

namespace ingot::INGOT_ISA {
namespace {

// The codes of a block for given scales, its values in units of the scales, and weighted sums for each group.
template <class Type>
struct GridTrial {
  static constexpr std::size_t kVectors = GridBlock<Type>::kVectors, kGroups = kBlockValues / Type::kScaled;
  std::uint16_t entry[kVectors];
  std::uint8_t negative[32], down[kVectors];
  float q[kBlockValues];
  float error[kGroups], xq[kGroups], qq[kGroups];

  void take_group(const GridTrial& other, std::size_t group) {
    constexpr std::size_t vectors = Type::kScaled / Type::kDims, bytes = Type::kScaled / 8;
    std::copy_n(other.entry + group * vectors, vectors, entry + group * vectors);
    std::copy_n(other.down + group * vectors, vectors, down + group * vectors);
    std::copy_n(other.negative + group * bytes, bytes, negative + group * bytes);
    std::copy_n(other.q + group * Type::kScaled, Type::kScaled, q + group * Type::kScaled);
    error[group] = other.error[group];
    xq[group] = other.xq[group];
    qq[group] = other.qq[group];
  }
};

// The value of each vector whose change of sign increases the error least.
template <class Type>
std::size_t cheapest_flip(const GridEntries<Type>& entries, const GridBlock<Type>& block, std::size_t vector,
                          std::size_t entry, float& cost) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < Type::kDims; ++i) {
    const float flip = block.product[i][vector] * 2 * (2 * entries.values[entry][i]);
    if (i == 0 || flip < cost) {
      cost = flip;
      result = i;
    }
  }
  return result;
}

template <class Type>
struct GridSearch {
  using Trial = GridTrial<Type>;
  static constexpr std::size_t kVectors = Trial::kVectors, kGroups = Trial::kGroups;
  static constexpr std::size_t kVectorsPerGroup = kVectors / kGroups;

  const GridEntries<Type>& entries;
  const GridBlock<Type>& block;

  void search(const float* scales, Trial& trial) const {
    alignas(64) float by_vector[kVectors];
    for (std::size_t vector = 0; vector < kVectors; ++vector) by_vector[vector] = scales[vector / kVectorsPerGroup];
    std::fill_n(trial.down, kVectors, std::uint8_t{0});
    std::copy_n(block.negative, 32, trial.negative);
    if constexpr (Type::kSigns == Signs::inside)
      search_shifts(by_vector, trial);
    else if constexpr (Type::kSigns == Signs::free)
      search_free(by_vector, trial);
    else if constexpr (Type::kDims == 8)
      search_even(by_vector, trial);
    else
      search_even_pairs(by_vector, trial);
    measure(scales, trial);
  }

 private:
  void search_free(const float* by_vector, Trial& trial) const {
    GridChoice<Type> choice;
    nearest_entries<Flips::none>(entries, block, by_vector, 0, choice);
    std::copy_n(choice.entry, kVectors, trial.entry);
  }

  void search_even(const float* by_vector, Trial& trial) const {
    GridChoice<Type> choice;
    nearest_entries<Flips::odd>(entries, block, by_vector, 0, choice);
    for (std::size_t vector = 0; vector < kVectors; ++vector) {
      const auto entry = static_cast<std::size_t>(choice.entry[vector]);
      trial.entry[vector] = static_cast<std::uint16_t>(entry);
      float cost = 0;
      if (block.is_odd[vector]) flip(trial, vector, cheapest_flip(entries, block, vector, entry, cost));
    }
  }

  // Eight signs for two entries of four values: of odd groups, one of the two entries has a value of the other sign.
  void search_even_pairs(const float* by_vector, Trial& trial) const {
    GridChoice<Type> plain, flipped;
    nearest_entries<Flips::none>(entries, block, by_vector, 0, plain);
    nearest_entries<Flips::one>(entries, block, by_vector, 0, flipped);
    for (std::size_t vector = 0; vector < kVectors; vector += 2) {
      std::int32_t chosen[2] = {plain.entry[vector], plain.entry[vector + 1]};
      if (block.is_odd[vector]) {
        const std::size_t other =
            flipped.cost[vector] + plain.cost[vector + 1] <= plain.cost[vector] + flipped.cost[vector + 1] ? 0 : 1;
        chosen[other] = flipped.entry[vector + other];
        float cost = 0;
        const auto entry = static_cast<std::size_t>(chosen[other]);
        flip(trial, vector + other, cheapest_flip(entries, block, vector + other, entry, cost));
      }
      for (std::size_t i = 0; i < 2; ++i) trial.entry[vector + i] = static_cast<std::uint16_t>(chosen[i]);
    }
  }

  void search_shifts(const float* by_vector, Trial& trial) const {
    GridChoice<Type> up, down;
    nearest_entries<Flips::none>(entries, block, by_vector, Type::kShift, up);
    nearest_entries<Flips::none>(entries, block, by_vector, -Type::kShift, down);
    constexpr std::size_t vectors = Type::kShifted / Type::kDims;
    for (std::size_t first = 0; first < kVectors; first += vectors) {
      float above = 0, below = 0;
      for (std::size_t vector = first; vector < first + vectors; ++vector) {
        above += up.cost[vector];
        below += down.cost[vector];
      }
      const bool is_down = below < above;
      for (std::size_t vector = first; vector < first + vectors; ++vector) {
        trial.down[vector] = is_down;
        trial.entry[vector] = static_cast<std::uint16_t>(is_down ? down.entry[vector] : up.entry[vector]);
      }
    }
  }

  static void flip(Trial& trial, std::size_t vector, std::size_t value) {
    const std::size_t index = vector * Type::kDims + value;
    trial.negative[index / 8] = static_cast<std::uint8_t>(trial.negative[index / 8] ^ 1u << index % 8);
  }

  void measure(const float* scales, Trial& trial) const {
    for (std::size_t vector = 0; vector < kVectors; ++vector)
      for (std::size_t i = 0; i < Type::kDims; ++i) {
        const std::size_t index = vector * Type::kDims + i;
        const float value = entries.values[trial.entry[vector]][i];
        if constexpr (Type::kSigns == Signs::inside)
          trial.q[index] = value + (trial.down[vector] ? -Type::kShift : Type::kShift);
        else
          trial.q[index] = trial.negative[index / 8] >> index % 8 & 1 ? -value : value;
      }
    for (std::size_t group = 0; group < kGroups; ++group) {
      float error = 0, xq = 0, qq = 0;
      for (std::size_t index = group * Type::kScaled; index < (group + 1) * Type::kScaled; ++index) {
        const float q = trial.q[index], wq = block.w[index] * q, residual = block.x[index] - scales[group] * q;
        error += block.w[index] * residual * residual;
        xq += wq * block.x[index];
        qq += wq * q;
      }
      trial.error[group] = error;
      trial.xq[group] = xq;
      trial.qq[group] = qq;
    }
  }
};

// A power of two near the largest magnitude of a block, so that no square leaves the range of f32.
inline void normalize(float* x, float& back) {
  float largest = 0;
  for (std::size_t i = 0; i < kBlockValues; ++i) largest = std::max(largest, std::max(x[i], -x[i]));
  std::uint32_t exponent = std::bit_cast<std::uint32_t>(largest) >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  const float by = std::bit_cast<float>((254 - exponent) << 23);
  back = std::bit_cast<float>(exponent << 23);
  for (std::size_t i = 0; i < kBlockValues; ++i) x[i] *= by;
}

// A block during the search: its scale d, which f16 represents, in normalized units, and a step for each group.
template <class Type>
struct GridFit {
  using Trial = GridTrial<Type>;
  static constexpr std::size_t kGroups = Trial::kGroups;
  static constexpr float kLargest = static_cast<float>(2 * Type::kSteps - 1) * Type::kUnit;

  GridSearch<Type> groups;
  float back;
  float d = 0;
  int step[kGroups]{};
  Trial trial;

  static float multiple(int step) { return static_cast<float>(2 * step + 1) * Type::kUnit; }

  float rounded(float value) const {
    const float stored = f16_to_f32(f32_to_f16(value * back));
    return stored * (1 / back);
  }

  void scales_for(float unit, const int* steps, float* scales) const {
    for (std::size_t group = 0; group < kGroups; ++group) scales[group] = unit * multiple(steps[group]);
  }

  // Fits the scale of each group separately.
  void fit_groups(float* scales) const {
    float best[kGroups], fitted[kGroups], tried[kGroups], largest[kGroups];
    for (std::size_t group = 0; group < kGroups; ++group) {
      largest[group] = 0;
      for (std::size_t i = group * Type::kScaled; i < (group + 1) * Type::kScaled; ++i)
        largest[group] = std::max(largest[group], std::max(groups.block.x[i], -groups.block.x[i]));
      best[group] = __builtin_inff();
      fitted[group] = 0;
    }
    Trial local;
    constexpr std::size_t starts = std::size(Type::kStarts), rounds = 2;
    for (std::size_t start = 0; start < starts + rounds; ++start) {
      for (std::size_t group = 0; group < kGroups; ++group)
        tried[group] = start < starts ? largest[group] / Type::kStarts[start] : fitted[group];
      groups.search(tried, local);
      for (std::size_t group = 0; group < kGroups; ++group) {
        if (!(local.qq[group] > 0)) continue;
        // The error with the best scale for these codes.
        const float scale = local.xq[group] / local.qq[group], away = tried[group] - scale;
        const float error = local.error[group] - away * away * local.qq[group];
        if (error < best[group]) {
          best[group] = error;
          fitted[group] = scale;
        }
      }
    }
    std::copy_n(fitted, kGroups, scales);
  }

  float total(const Trial& candidate) const {
    float result = 0;
    for (std::size_t group = 0; group < kGroups; ++group) result += candidate.error[group];
    return result;
  }

  // Changes the step of each group to the neighbour with the least error.
  void try_neighbours() {
    for (const int away : {-1, 1}) {
      int steps[kGroups];
      float scales[kGroups];
      for (std::size_t group = 0; group < kGroups; ++group)
        steps[group] = std::clamp(step[group] + away, 0, Type::kSteps - 1);
      scales_for(d, steps, scales);
      Trial other;
      groups.search(scales, other);
      for (std::size_t group = 0; group < kGroups; ++group)
        if (other.error[group] < trial.error[group]) {
          trial.take_group(other, group);
          step[group] = steps[group];
        }
    }
  }

  // Fits the block's scale to the codes of all groups.
  bool refit() {
    float above = 0, below = 0;
    for (std::size_t group = 0; group < kGroups; ++group) {
      const float by = multiple(step[group]);
      above += by * trial.xq[group];
      below += by * by * trial.qq[group];
    }
    const float unit = below > 0 ? rounded(above / below) : d;
    if (!(unit > 0) || !(unit < __builtin_inff()) || unit == d) return false;
    float scales[kGroups];
    scales_for(unit, step, scales);
    Trial other;
    groups.search(scales, other);
    if (!(total(other) < total(trial))) return false;
    d = unit;
    trial = other;
    return true;
  }

  // Returns false if f16 cannot represent the block's scale.
  bool run() {
    float scales[kGroups];
    fit_groups(scales);
    const float largest = *std::max_element(scales, scales + kGroups);
    d = rounded(largest / kLargest);
    if (!(d < __builtin_inff())) return false;
    for (std::size_t group = 0; group < kGroups; ++group) {
      const float t = d > 0 ? (scales[group] / (d * Type::kUnit) - 1) * 0.5f : 0;
      step[group] = std::clamp(static_cast<int>(t + 0.5f), 0, Type::kSteps - 1);
    }
    float tried[kGroups];
    scales_for(d, step, tried);
    groups.search(tried, trial);
    if (!(d > 0)) return true;
    for (int round = 0; round < 2; ++round) {
      try_neighbours();
      refit();
    }
    return true;
  }
};

}  // namespace
}  // namespace ingot::INGOT_ISA
