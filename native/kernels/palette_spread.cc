// Initial centroids by k-means++, each drawn with a probability proportional to its squared distance from those before
// (spec/palette.md, "Vectors"). By definition, the draw uses a sequential sum of rounded distances from the first point
// on. Sums in any other order differ from it by less than a known bound, which usually determines the same point;
// otherwise the sequential sum is computed. Distances in f32 first show which points are nearer to the new centroid,
// fewer in every draw; the sums of other points stay.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/palette.h"
#include "kernels/float_vectors.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kLanes = kVectorBytes / sizeof(double), kBlock = 64;
using Narrow = float __attribute__((vector_size(kVectorBytes / 2)));

// The state of each point.
struct Scratch {
  double* distance;  // the least squared distance
  double* upto;      // sequential sums
  double* blocks;    // sums of kBlock distances each
  float* columns;    // the points' coordinates, [size, n]
  float* limits;     // if a point's squared distance in f32 is above it, it is not nearer
};

template <int kSize>
class Draw {
 public:
  Draw(const PalettePoints& all_points, const Scratch& to) : points_(all_points), to_(to) {
    std::fill(to_.distance, to_.distance + all_points.n, std::numeric_limits<double>::infinity());
    std::fill(to_.limits, to_.limits + all_points.n, std::numeric_limits<float>::infinity());
    std::fill(to_.blocks, to_.blocks + all_points.n / kBlock + 1,
              std::numeric_limits<double>::infinity());  // NaN is never nearer
    for (std::size_t i = 0; i < all_points.n; ++i)
      for (std::size_t v = 0; v < kNumbers; ++v)
        to_.columns[v * all_points.n + i] = all_points.points[i * kNumbers + v];
  }

  std::size_t next(std::size_t last, double draw) {
    for (std::size_t v = 0; v < kNumbers; ++v) centre_[v] = static_cast<double>(points_.points[last * kNumbers + v]);
    for (std::size_t v = 0; v < kNumbers; ++v) narrow_[v] = all(points_.points[last * kNumbers + v]);
    double total = 0;
    for (std::size_t i = 0; i < points_.n; i += kBlock) {
      come_nearer(i, std::min(points_.n, i + kBlock));
      total += to_.blocks[i / kBlock];
    }
    const std::size_t result = look(total, draw);
    return result < points_.n ? result : look_one_by_one(draw);
  }

 private:
  static constexpr auto kNumbers = static_cast<std::size_t>(kSize);

  // Decreases the distances of some points, and adds all of these up if any changed.
  void come_nearer(std::size_t first, std::size_t end) {
    bool any = false;
    std::size_t i = first;
    for (; i + kWidth <= end; i += kWidth) {
      Floats squares{};
      for (std::size_t v = 0; v < kNumbers; ++v) {
        const Floats away = load_floats(to_.columns + v * points_.n + i) - narrow_[v];
        squares = v ? squares + away * away : away * away;
      }
      if (!none_above(squares, load_floats(to_.limits + i))) continue;
      any = true;
      lower(i);
      lower(i + kLanes);
    }
    if (!any && i == end) return;
    for (; i < end; ++i) {
      double squares = 0;
      for (std::size_t v = 0; v < kNumbers; ++v) {
        const double away = static_cast<double>(to_.columns[v * points_.n + i]) - centre_[v];
        squares += away * away;
      }
      to_.distance[i] = squares < to_.distance[i] ? squares : to_.distance[i];
    }
    Doubles partial{};
    double sum = 0;
    for (i = first; i + kLanes <= end; i += kLanes) {
      Doubles is_few;
      std::memcpy(&is_few, to_.distance + i, sizeof is_few);
      partial += is_few;
    }
    for (; i < end; ++i) sum += to_.distance[i];
    for (std::size_t lane = 0; lane < kLanes; ++lane) sum += partial[lane];
    to_.blocks[first / kBlock] = sum;
  }

  void lower(std::size_t i) {
    Doubles squares{}, least;
    for (std::size_t v = 0; v < kNumbers; ++v) {
      const Doubles away = load_doubles(to_.columns + v * points_.n + i) - centre_[v];
      squares = v ? squares + away * away : away * away;
    }
    std::memcpy(&least, to_.distance + i, sizeof least);
    least = squares < least ? squares : least;
    std::memcpy(to_.distance + i, &least, sizeof least);
    // Relative error of squared distances in f32: less than 5e-7, except for tiny ones.
    const Narrow limit = __builtin_convertvector(least * 1.00001, Narrow) + 1e-30F;
    std::memcpy(to_.limits + i, &limit, sizeof limit);
  }

  // Returns the first point past the draw, or n if it is uncertain. Sums of n non-negative numbers in any order have a
  // relative error below n 2^-53; this applies twice to the total and twice to the sum up to a point.
  std::size_t look(double total, double draw) const {
    const double room = total * (static_cast<double>(points_.n) + 64) * 8e-16, place = draw * total;
    double sum = 0;
    std::size_t block = 0;
    const std::size_t blocks = (points_.n + kBlock - 1) / kBlock;
    while (block < blocks && !(sum + to_.blocks[block] > place - 2 * room)) sum += to_.blocks[block++];
    for (std::size_t i = block * kBlock; i < points_.n; ++i) {
      sum += to_.distance[i];
      if (sum > place - room) return sum > place + room ? i : points_.n;
    }
    return points_.n;
  }

  std::size_t look_one_by_one(double draw) {
    double total = 0;
    for (std::size_t i = 0; i < points_.n; ++i) to_.upto[i] = total += to_.distance[i];
    const auto position =
        static_cast<std::size_t>(std::upper_bound(to_.upto, to_.upto + points_.n, draw * total) - to_.upto);
    return std::min(position, points_.n - 1);
  }

  const PalettePoints& points_;
  const Scratch to_;
  double centre_[kNumbers];
  Floats narrow_[kNumbers];
};

template <int kSize>
void draw(const PalettePoints& all_points, const double* draws, std::size_t k, std::uint64_t* chosen,
          const Scratch& scratch) {
  Draw<kSize> points(all_points, scratch);
  for (std::size_t c = 1; c < k; ++c) chosen[c] = points.next(chosen[c - 1], draws[c - 1]);
}

}  // namespace

void palette_spread(const PalettePoints& points, const double* draws, std::size_t k, std::uint64_t* chosen,
                    double* scratch) {
  double* const blocks = scratch + 2 * points.n;
  float* const columns = reinterpret_cast<float*>(blocks + points.n / kBlock + 1);
  const Scratch to{scratch, scratch + points.n, blocks, columns,
                   columns + static_cast<std::size_t>(points.size) * points.n};
  points.size == 2 ? draw<2>(points, draws, k, chosen, to) : draw<4>(points, draws, k, chosen, to);
}

}  // namespace ingot::INGOT_ISA
