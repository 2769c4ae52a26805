// What Lloyd's steps by slacks begin with (spec/palette.md, "Vectors"): a centroid for each point that is near it as a rule, and how far
// each centroid reaches.
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

// A grid of kSquares over three standard deviations each way, and what lies nearest to the middle of each square of it.
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
      Least<kSize> found;
      found.begin();
      for (std::size_t v = 0; v < kSize; ++v) found.point[v] = load_floats(middle[v]);
      for (std::size_t c = 0; c < k; ++c) found.see(centroids + c * kSize, static_cast<std::int32_t>(c));
      std::memcpy(which, &found.which, sizeof which);
      for (std::size_t lane = 0; lane < kWidth; ++lane) nearest_[first + lane] = static_cast<std::uint8_t>(which[lane]);
    }
  }

  std::uint8_t of(const float* point) const {
    std::size_t square = 0;
    for (std::size_t v = kSize; v-- > 0;) {
      const float place = point[v] * per_ + kEach / 2, last = kEach - 1;
      square = square * kEach + static_cast<std::size_t>(place > 0 ? (place < last ? place : last) : 0);
    }
    return nearest_[square];
  }

 private:
  static constexpr std::size_t kEach = kSize == 2 ? 64 : 8;
  float width_, per_;
  std::uint8_t nearest_[kSquares];
};

template <int kSize>
double guess(const PalettePoints& at, const float* centroids, std::size_t k, const PaletteSlacks& found) {
  Squares all_squares;
  all_squares.add(at.points, at.n * kSize);
  const double squares = all_squares.sum();
  const double mean = at.n ? squares / static_cast<double>(at.n * kSize) : 0;
  const auto near = std::make_unique<Guess<kSize>>(static_cast<float>(std::sqrt(mean)), centroids, k);
  for (std::size_t i = 0; i < at.n; ++i) {
    const float* const point = at.points + i * kSize;
    const std::size_t code = near->of(point);
    found.codes[i] = static_cast<std::uint8_t>(code);
    for (std::size_t v = 0; v < kSize; ++v) found.sums[code * kSize + v] += static_cast<double>(point[v]);
    ++found.counts[code];
  }
  std::fill_n(found.slacks, at.n, 0.0F);
  return squares;
}

template <int kSize>
void reach(const float* before, const float* after, std::size_t k, float* reach, float* lost) {
  alignas(kVectorBytes) float columns[kSize][kMost], moved[kMost] = {}, away[kMost];
  for (std::size_t c = 0; c < kMost; ++c)
    for (std::size_t v = 0; v < kSize; ++v) columns[v][c] = c < k ? after[c * kSize + v] : 1e18F;
  for (std::size_t c = 0; before && c < k; ++c)
    moved[c] = std::sqrt(squared<kSize>(before + c * kSize, after + c * kSize)) * 1.0001F + 1e-15F;
  for (std::size_t a = 0; a < k; ++a) {
    Floats most{};
    for (std::size_t c = 0; c < k; c += kWidth) {
      Floats square{};
      for (std::size_t v = 0; v < kSize; ++v) {
        const Floats part = load_floats(columns[v] + c) - after[a * kSize + v];
        square += part * part;
      }
      store_floats(away + c, smaller(square, all(std::numeric_limits<float>::max())));  // NaNs have no order
      const Ints within = square * kLess < reach[a] * reach[a];
      most = larger(within ? load_floats(moved + c) : Floats{}, most);
    }
    if (!before) {
      // The centroid itself is the nearest.
      float* const last = away + std::min(kNeighbours, k - 1);
      std::nth_element(away, last, away + k);
      reach[a] = std::sqrt(*last);
      continue;
    }
    float all_of_them = moved[a];
    for (std::size_t lane = 0; lane < kWidth; ++lane) all_of_them = std::max(all_of_them, most[lane]);
    lost[a] = moved[a] + all_of_them;
  }
}

}  // namespace

double palette_guess(const PalettePoints& at, const float* centroids, std::size_t k, const PaletteSlacks& found) {
  return at.size == 2 ? guess<2>(at, centroids, k, found) : guess<4>(at, centroids, k, found);
}

void palette_reach(const float* before, const float* after, std::size_t k, int size, float* to, float* lost) {
  size == 2 ? reach<2>(before, after, k, to, lost) : reach<4>(before, after, k, to, lost);
}

}  // namespace ingot::INGOT_ISA
