// Sorts points into cells of about equal size (spec/palette.md, "Vectors"): every coordinate is divided at its
// quantiles, and cells are in Morton order, so that 64 consecutive cells are close together.
#include "kernels/palette_cells.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/float_vectors.h"
#include "kernels/palette_squares.h"

namespace ingot::INGOT_ISA {
namespace {

// Keys of coordinates: equal steps near 0, then 9 bits of the mantissa.
constexpr float kFloor = 0x1p-10F;
constexpr int kDrop = 14;
// For magnitudes up to 1; larger ones have the last key.
constexpr std::int32_t kHalfKeys = 5184, kKeys = 2 * kHalfKeys;
constexpr std::size_t kSample = std::size_t{1} << 15, kChunk = 512, kSoon = 24;

inline std::int32_t key_of(float value) {
  const auto bits = std::bit_cast<std::int32_t>(value);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffff) + kFloor;
  const std::int32_t step = std::min((std::bit_cast<std::int32_t>(magnitude) - std::bit_cast<std::int32_t>(kFloor)) >> kDrop,
                                     kHalfKeys - 1);
  return kHalfKeys + (bits < 0 ? ~step : step);
}

// Returns the smallest value of a key.
float begin_of(std::int32_t key) {
  const std::int32_t step = key < kHalfKeys ? kHalfKeys - key : key - kHalfKeys;
  const float magnitude = std::bit_cast<float>(std::bit_cast<std::int32_t>(kFloor) + (step << kDrop)) - kFloor;
  return key < kHalfKeys ? -magnitude : magnitude;
}

// The division of a coordinate: the bits of the cell for each key, and the position of each cut.
struct Axis {
  std::vector<std::uint16_t> bits = std::vector<std::uint16_t>(kKeys);
  std::vector<float> middle, half;

  void lay(const std::vector<std::uint32_t>& counts, std::size_t total, std::size_t cuts, std::size_t axis,
           std::size_t size, float smallest, float amax) {
    std::vector<std::int32_t> begins(cuts + 1, kKeys);
    std::size_t before = 0, next = 0;
    for (std::int32_t key = 0; key < kKeys; ++key) {
      const std::size_t cut = std::min(before * cuts / total, cuts - 1);
      while (next <= cut) begins[next++] = key;
      std::uint16_t spread = 0;
      for (std::size_t bit = 0; cut >> bit; ++bit) spread |= static_cast<std::uint16_t>((cut >> bit & 1) << (bit * size + axis));
      bits[static_cast<std::size_t>(key)] = spread;
      before += counts[static_cast<std::size_t>(key)];
    }
    middle.resize(cuts);
    half.resize(cuts);
    for (std::size_t cut = 0; cut < cuts; ++cut) {
      const float from = begins[cut] ? std::max(begin_of(begins[cut]), smallest) : smallest;
      const float to = begins[cut + 1] < kKeys ? std::min(begin_of(begins[cut + 1]), amax) : amax;
      middle[cut] = from * 0.5F + to * 0.5F;
      // Keys are computed from rounded magnitudes.
      half[cut] = std::max(to - from, 0.0F) * 0.5F + 1e-6F * (std::abs(from) + std::abs(to) + kFloor);
    }
  }
};

template <int kSize>
class Cells {
 public:
  Cells(const float* points, const PaletteCellsToFill& to, std::uint16_t* order)
      : points_(points), to_(to), order_(order) {}

  // Returns the approximate sum of all squares.
  double fill() {
    lay_axes();
    const double squares = find_cells();
    sort_points();
    lay_boxes();
    return squares;
  }

 private:
  static constexpr auto kNumbers = static_cast<std::size_t>(kSize);

  void lay_axes() {
    const std::size_t all_of_them = to_.n * kNumbers;
    float smallest[kWidth], most[kWidth];  // lane i has coordinate i % size of all points with that lane
    for (std::size_t i = 0; i < kWidth; ++i) smallest[i] = most[i] = points_[i % kNumbers];
    Floats low = load_floats(smallest), high = load_floats(most);
    std::size_t done = 0;
    for (; done + kWidth <= all_of_them; done += kWidth) {
      low = smaller(low, load_floats(points_ + done));
      high = larger(high, load_floats(points_ + done));
    }
    store_floats(smallest, low);
    store_floats(most, high);
    for (std::size_t i = 0; done + i < all_of_them; ++i) {
      smallest[i] = std::min(smallest[i], points_[done + i]);
      most[i] = std::max(most[i], points_[done + i]);
    }
    for (std::size_t i = kNumbers; i < kWidth; ++i) {
      smallest[i % kNumbers] = std::min(smallest[i % kNumbers], smallest[i]);
      most[i % kNumbers] = std::max(most[i % kNumbers], most[i]);
    }
    const std::size_t step = std::max<std::size_t>(1, to_.n / kSample);
    const auto all_bits = static_cast<std::size_t>(std::countr_zero(to_.cells));
    for (std::size_t v = 0; v < kNumbers; ++v) {
      std::vector<std::uint32_t> counts(kKeys);
      std::size_t total = 0;
      for (std::size_t i = 0; i < to_.n; i += step, ++total)
        ++counts[static_cast<std::size_t>(key_of(points_[i * kNumbers + v]))];
      axes_[v].lay(counts, total, std::size_t{1} << ((all_bits + kNumbers - 1 - v) / kNumbers), v, kNumbers,
                   smallest[v], most[v]);
    }
  }

  double find_cells() {
    std::fill_n(to_.starts, to_.cells + 1, 0);
    Squares squares;
    for (std::size_t first = 0; first < to_.n; first += kChunk) {
      const std::size_t n = std::min(kChunk, to_.n - first);
      std::int32_t keys[kChunk * kNumbers];
      const float* const at = points_ + first * kNumbers;
      for (std::size_t i = 0; i < n * kNumbers; ++i) keys[i] = key_of(at[i]);
      squares.add(at, n * kNumbers);
      for (std::size_t i = 0; i < n; ++i) {
        unsigned cell = 0;
        for (std::size_t v = 0; v < kNumbers; ++v) cell |= axes_[v].bits[static_cast<std::size_t>(keys[i * kNumbers + v])];
        order_[first + i] = static_cast<std::uint16_t>(cell);
        ++to_.starts[cell + 1];
      }
    }
    return squares.sum();
  }

  void sort_points() {
    for (std::size_t cell = 0; cell < to_.cells; ++cell) to_.starts[cell + 1] += to_.starts[cell];
    std::vector<std::uint32_t> next(to_.starts, to_.starts + to_.cells);
    for (std::size_t i = 0; i < to_.n; ++i) {
      // Approximate: points between may be in this cell too.
      const std::size_t soon = next[order_[std::min(i + kSoon, to_.n - 1)]];
      for (std::size_t v = 0; v < kNumbers; ++v) __builtin_prefetch(to_.columns + v * to_.stride() + soon, 1);
      const std::size_t there = next[order_[i]]++;
      for (std::size_t v = 0; v < kNumbers; ++v) to_.columns[v * to_.stride() + there] = points_[i * kNumbers + v];
    }
    for (std::size_t v = 0; v < kNumbers; ++v) std::fill_n(to_.columns + v * to_.stride() + to_.n, kBehind, 0.0F);
  }

  void lay_boxes() {
    const std::size_t row = to_.boxes_of_a_row();
    for (std::size_t v = 0; v < kNumbers; ++v) {
      float* const middle = to_.boxes + 2 * v * row;
      float* const half = middle + row;
      for (std::size_t cell = 0; cell < to_.cells; ++cell) {
        std::size_t cut = 0;
        for (std::size_t bit = 0; cell >> (bit * kNumbers + v); ++bit) cut |= (cell >> (bit * kNumbers + v) & 1) << bit;
        middle[cell] = axes_[v].middle[cut];
        half[cell] = axes_[v].half[cut];
      }
      for (std::size_t part = 0; part < row - to_.cells; ++part) {
        const std::size_t first = std::min(part, to_.parts() - 1) * kCellsOfPart;
        float from = std::numeric_limits<float>::infinity(), to = -from;
        for (std::size_t cell = first; cell < first + kCellsOfPart; ++cell) {
          from = std::min(from, middle[cell] - half[cell]);
          to = std::max(to, middle[cell] + half[cell]);
        }
        middle[to_.cells + part] = from * 0.5F + to * 0.5F;
        half[to_.cells + part] = (to - from) * 0.5F + 1e-6F * (std::abs(from) + std::abs(to));
      }
    }
  }

  const float* points_;
  const PaletteCellsToFill& to_;
  std::uint16_t* order_;
  Axis axes_[kNumbers];
};

}  // namespace

double palette_cells(const float* points, const PaletteCellsToFill& cells, std::uint16_t* order) {
  return cells.size == 2 ? Cells<2>(points, cells, order).fill() : Cells<4>(points, cells, order).fill();
}

bool palette_codes(const std::uint16_t* order, std::size_t n, const std::uint32_t* starts, std::size_t cells,
                   const std::uint8_t* codes, std::uint8_t* out) {
  std::vector<std::uint32_t> next(std::size_t{1} << 16, 0xffffffffU);  // cells that do not exist: past all points
  std::copy(starts, starts + cells, next.begin());
  bool within = true;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t there = next[order[i]]++;
    within &= there < n;
    out[i] = codes[there < n ? there : 0];
  }
  return within;
}

}  // namespace ingot::INGOT_ISA
