// The start of Lloyd's iterations with slacks (spec/palette.md, "Vectors"): a near centroid for each point, and the
// reach of each centroid.
#include "kernels/gcc_headers.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/palette_least.h"
#include "kernels/palette_near.h"
#include "kernels/palette_squares.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr float kLess = 0.99999F;
constexpr std::size_t kSquares = 4096, kNeighbours = 32, kMost = 256;

// A grid of kSquares over three standard deviations in each direction, with the centroid nearest to the middle of each
// square.
template <int kSize>
class Guess {
 public:
  Guess(float deviation, const float* centroids, std::size_t k) : width_(6 * deviation / kEach), per_(width_ > 0 ? 1 / width_ : 0) {
    alignas(kVectorBytes) std::int32_t which[kWidth];
    for (std::size_t first = 0; first < kSquares; first += kWidth) {
      alignas(kVectorBytes) float middle[kSize][kWidth];
      for (std::size_t lane = 0; lane < kWidth; ++lane)
        for (std::size_t v = 0, rest = first + lane; v < kSize; ++v, rest /= kEach)
          middle[v][lane] = (static_cast<float>(rest % kEach) - kEach / 2 + 0.5F) * width_;
      NearestTwo<kSize> result;
      result.begin();
      for (std::size_t v = 0; v < kSize; ++v) result.point[v] = load_floats(middle[v]);
      for (std::size_t c = 0; c < k; ++c) result.see(centroids + c * kSize, static_cast<std::int32_t>(c));
      std::memcpy(which, &result.which, sizeof which);
      for (std::size_t lane = 0; lane < kWidth; ++lane) nearest_[first + lane] = static_cast<std::uint8_t>(which[lane]);
    }
  }

  std::uint8_t nearest_to(const float* point) const {
    std::size_t square = 0;
    for (std::size_t v = kSize; v-- > 0;) {
      const float coordinate = point[v] * per_ + kEach / 2, last = kEach - 1;
      square = square * kEach + static_cast<std::size_t>(coordinate > 0 ? (coordinate < last ? coordinate : last) : 0);
    }
    return nearest_[square];
  }

 private:
  static constexpr std::size_t kEach = kSize == 2 ? 64 : 8;
  float width_, per_;
  std::uint8_t nearest_[kSquares];
};

template <int kSize>
double guess(const PalettePoints& all_points, const float* centroids, std::size_t k, const PaletteSlacks& slack) {
  Squares all_squares;
  all_squares.add(all_points.points, all_points.n * kSize);
  const double squares = all_squares.sum();
  const double mean = all_points.n ? squares / static_cast<double>(all_points.n * kSize) : 0;
  const auto near = std::make_unique<Guess<kSize>>(static_cast<float>(std::sqrt(mean)), centroids, k);
  for (std::size_t i = 0; i < all_points.n; ++i) {
    const float* const point = all_points.points + i * kSize;
    const std::size_t code = near->nearest_to(point);
    slack.codes[i] = static_cast<std::uint8_t>(code);
    for (std::size_t v = 0; v < kSize; ++v) slack.sums[code * kSize + v] += static_cast<double>(point[v]);
    ++slack.counts[code];
  }
  std::fill_n(slack.slacks, all_points.n, 0.0F);
  return squares;
}

template <int kSize>
void reach(const float* before, const float* after, std::size_t k, float* reach, float* shrink) {
  alignas(kVectorBytes) float columns[kSize][kMost], moved[kMost] = {}, away[kMost];
  for (std::size_t c = 0; c < kMost; ++c)
    for (std::size_t v = 0; v < kSize; ++v) columns[v][c] = c < k ? after[c * kSize + v] : 1e18F;
  for (std::size_t c = 0; before && c < k; ++c)
    moved[c] = std::sqrt(squared<kSize>(before + c * kSize, after + c * kSize)) * 1.0001F + 1e-15F;
  for (std::size_t a = 0; a < k; ++a) {
    Floats amax{};
    for (std::size_t c = 0; c < k; c += kWidth) {
      Floats square{};
      for (std::size_t v = 0; v < kSize; ++v) {
        const Floats part = load_floats(columns[v] + c) - after[a * kSize + v];
        square += part * part;
      }
      store_floats(away + c, smaller(square, all(std::numeric_limits<float>::max())));  // NaNs have no order
      const Ints within = square * kLess < reach[a] * reach[a];
      amax = larger(within ? load_floats(moved + c) : Floats{}, amax);
    }
    if (!before) {
      // The nearest one is the centroid itself.
      float* const last = away + std::min(kNeighbours, k - 1);
      std::nth_element(away, last, away + k);
      reach[a] = std::sqrt(*last);
      continue;
    }
    float all_of_them = moved[a];
    for (std::size_t lane = 0; lane < kWidth; ++lane) all_of_them = std::max(all_of_them, amax[lane]);
    shrink[a] = moved[a] + all_of_them;
  }
}

}  // namespace

double palette_guess(const PalettePoints& points, const float* centroids, std::size_t k, const PaletteSlacks& slack) {
  return points.size == 2 ? guess<2>(points, centroids, k, slack) : guess<4>(points, centroids, k, slack);
}

void palette_reach(const float* before, const float* after, std::size_t k, int size, float* to, float* shrink) {
  size == 2 ? reach<2>(before, after, k, to, shrink) : reach<4>(before, after, k, to, shrink);
}

}  // namespace ingot::INGOT_ISA
