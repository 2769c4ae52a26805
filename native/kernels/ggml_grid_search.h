// Finds the nearest entries of a grid for the vectors of a block by exhaustive search (spec/gguf.md, "Grid types"). The
// error of an entry is the sum of the errors of its two halves, and there are far fewer different halves than entries.
// Each register has the same element of several vectors.
#pragma once
#include <algorithm>

#include "kernels/float_vectors.h"
#include "kernels/ggml_grid_kinds.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlockValues = 256;

// Each entry as the indices of its two halves among all combinations of levels.
template <class Type>
struct GridEntries {
  static constexpr std::size_t kHalf = Type::kDims / 2;
  static constexpr std::size_t kPair = Type::kLevels * Type::kLevels;
  static constexpr std::size_t kCells = kHalf == 4 ? kPair * kPair : kPair;

  std::uint8_t cells[2][Type::kEntries];
  float values[Type::kEntries][Type::kDims];

  explicit GridEntries(const std::int8_t* grid) {
    for (std::size_t entry = 0; entry < Type::kEntries; ++entry)
      for (std::size_t half = 0; half < 2; ++half) {
        std::size_t cell = 0;
        for (std::size_t i = 0; i < kHalf; ++i) {
          const auto value = static_cast<float>(grid[entry * Type::kDims + half * kHalf + i]);
          std::size_t level = 0;
          while (level + 1 < Type::kLevels && Type::kMagnitudes[level] != value) ++level;
          cell = cell * Type::kLevels + level;
          values[entry][half * kHalf + i] = value;
        }
        cells[half][entry] = static_cast<std::uint8_t>(cell);
      }
  }
};

// The values of a block and the weights of their errors, element by element of several vectors. `product` is x times
// its weight. If the type stores signs separately, x is a magnitude.
template <class Type>
struct GridBlock {
  static constexpr std::size_t kVectors = kBlockValues / Type::kDims;
  float x[kBlockValues], w[kBlockValues];
  alignas(64) float weight[Type::kDims][kVectors], product[Type::kDims][kVectors];
  std::uint8_t negative[32];  // bits of eight values each
  alignas(64) std::int32_t is_odd[kVectors];  // -1 if the number of negative values among the eight is odd

  void fill() {
    for (std::size_t group = 0; group < 32; ++group) {
      std::uint32_t bits = 0;
      for (std::size_t i = 0; i < 8; ++i) bits |= static_cast<std::uint32_t>(x[8 * group + i] < 0) << i;
      negative[group] = static_cast<std::uint8_t>(bits);
      for (std::size_t vector = group * kVectors / 32; vector < (group + 1) * kVectors / 32; ++vector)
        is_odd[vector] = -__builtin_parity(bits);
    }
    for (std::size_t vector = 0; vector < kVectors; ++vector)
      for (std::size_t i = 0; i < Type::kDims; ++i) {
        const std::size_t index = vector * Type::kDims + i;
        const float value = Type::kSigns == Signs::inside ? x[index] : std::max(x[index], -x[index]);
        weight[i][vector] = w[index];
        product[i][vector] = w[index] * value;
      }
  }
};

// An entry for each vector, and a number that rises with its error: (error - sum of w x x) / scale.
template <class Type>
struct GridChoice {
  static constexpr std::size_t kVectors = kBlockValues / Type::kDims;
  alignas(64) float cost[kVectors];
  alignas(64) std::int32_t entry[kVectors];
};

// The values whose sign may change: none, exactly one of each vector, or exactly one of each odd vector.
enum class Flips { none, one, odd };

// Costs of all combinations of levels in half an entry.
template <class Type>
struct HalfCosts {
  static constexpr std::size_t kHalf = Type::kDims / 2, kPair = Type::kLevels * Type::kLevels;
  Floats plain[GridEntries<Type>::kCells], flipped[GridEntries<Type>::kCells];

  template <Flips kFlips>
  void fill(const GridBlock<Type>& block, std::size_t half, std::size_t c, Floats scale, float shift) {
    Floats costs[kHalf][Type::kLevels], flips[kHalf][Type::kLevels];
    for (std::size_t i = 0; i < kHalf; ++i) {
      const Floats w = load_floats(block.weight[half * kHalf + i] + c) * scale;
      const Floats xw = load_floats(block.product[half * kHalf + i] + c) * 2.0f;
      for (std::size_t level = 0; level < Type::kLevels; ++level) {
        const float value = Type::kMagnitudes[level] + shift;
        costs[i][level] = w * (value * value) - xw * value;
        if constexpr (kFlips != Flips::none) flips[i][level] = xw * (2.0f * value);
      }
    }
    if constexpr (kHalf == 2) {
      pair<kFlips>(costs[0], costs[1], flips[0], flips[1], plain, flipped);
    } else {
      Floats first[kPair], second[kPair], first_flip[kPair], second_flip[kPair];
      pair<kFlips>(costs[0], costs[1], flips[0], flips[1], first, first_flip);
      pair<kFlips>(costs[2], costs[3], flips[2], flips[3], second, second_flip);
      for (std::size_t a = 0; a < kPair; ++a)
        for (std::size_t b = 0; b < kPair; ++b) {
          plain[a * kPair + b] = first[a] + second[b];
          if constexpr (kFlips != Flips::none) flipped[a * kPair + b] = smaller(first_flip[a], second_flip[b]);
        }
    }
    if constexpr (kFlips != Flips::none) {
      Ints is_odd;
      std::memcpy(&is_odd, block.is_odd + c, sizeof is_odd);
      for (std::size_t cell = 0; cell < GridEntries<Type>::kCells; ++cell) {
        Floats flip = flipped[cell];
        if constexpr (kFlips == Flips::odd) flip = is_odd ? flip : Floats{};
        flipped[cell] = plain[cell] + flip;
      }
    }
  }

 private:
  template <Flips kFlips>
  static void pair(const Floats* a, const Floats* b, const Floats* a_flip, const Floats* b_flip, Floats* sums,
                   Floats* flips) {
    for (std::size_t i = 0; i < Type::kLevels; ++i)
      for (std::size_t j = 0; j < Type::kLevels; ++j) {
        sums[i * Type::kLevels + j] = a[i] + b[j];
        if constexpr (kFlips != Flips::none) flips[i * Type::kLevels + j] = smaller(a_flip[i], b_flip[j]);
      }
  }
};

template <Flips kFlips, class Type>
void nearest_entries(const GridEntries<Type>& entries, const GridBlock<Type>& block, const float* scales, float shift,
                     GridChoice<Type>& out) {
  for (std::size_t c = 0; c < GridBlock<Type>::kVectors; c += kWidth) {
    const Floats scale = load_floats(scales + c);
    HalfCosts<Type> low, high;
    low.template fill<kFlips>(block, 0, c, scale, shift);
    high.template fill<kFlips>(block, 1, c, scale, shift);
    const auto cost_of = [&](std::size_t entry) {
      const std::size_t a = entries.cells[0][entry], b = entries.cells[1][entry];
      if constexpr (kFlips == Flips::none)
        return low.plain[a] + high.plain[b];
      else
        return smaller(low.plain[a] + high.flipped[b], low.flipped[a] + high.plain[b]);
    };
    // Even and odd entries separately, so that a comparison does not wait for the previous one.
    Floats best[2] = {all(__builtin_inff()), all(__builtin_inff())};
    Ints index[2]{};
    for (std::size_t entry = 0; entry < Type::kEntries; entry += 2)
#pragma GCC unroll 2
      for (std::size_t k = 0; k < 2; ++k) {
        const Floats cost = cost_of(entry + k);
        const auto better = cost < best[k];
        best[k] = smaller(cost, best[k]);
        index[k] = better ? Ints{} + static_cast<std::int32_t>(entry + k) : index[k];
      }
    const auto second = best[1] < best[0];
    best[0] = second ? best[1] : best[0];
    index[0] = second ? index[1] : index[0];
    store_floats(out.cost + c, best[0]);
    std::memcpy(out.entry + c, &index[0], sizeof index[0]);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
