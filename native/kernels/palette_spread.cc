// Points to begin with, each drawn by its squared distance from those before (k-means++; spec/palette.md, "Vectors"). Which one is
// drawn is said by sums of distances from the first point on, each rounded: a chain. Sums in any order differ from these by less
// than is known, and as a rule that leaves one point; the chain is gone through where it does not.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/palette.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kLanes = kVectorBytes / sizeof(double), kBlock = 512;
using Narrow = float __attribute__((vector_size(kVectorBytes / 2)));

// What is known of each point.
struct Scratch {
  double* distance;  // the least squared one
  double* upto;      // sums, one after the other
  float* columns;    // the points' numbers, [size, n]
};

template <int kSize>
class Draw {
 public:
  Draw(const PalettePoints& at, const Scratch& to) : at_(at), to_(to) {
    std::fill(to_.distance, to_.distance + at.n, std::numeric_limits<double>::infinity());
    for (std::size_t i = 0; i < at.n; ++i)
      for (std::size_t v = 0; v < kNumbers; ++v) to_.columns[v * at.n + i] = at.points[i * kNumbers + v];
  }

  std::size_t next(std::size_t last, double draw) {
    for (std::size_t v = 0; v < kNumbers; ++v) centre_[v] = static_cast<double>(at_.points[last * kNumbers + v]);
    double total = 0;
    for (std::size_t i = 0; i < at_.n; i += kBlock) {
      // Blocks' sums lie where sums will, if they are wanted.
      to_.upto[i / kBlock] = come_nearer(i, std::min(at_.n, i + kBlock));
      total += to_.upto[i / kBlock];
    }
    const std::size_t found = look(total, draw);
    return found < at_.n ? found : look_one_by_one(draw);
  }

 private:
  static constexpr auto kNumbers = static_cast<std::size_t>(kSize);

  // Lowers the distances of some points; returns the sum of all of these.
  double come_nearer(std::size_t first, std::size_t end) {
    Doubles some{};
    std::size_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      Doubles squares{}, least;
      for (std::size_t v = 0; v < kNumbers; ++v) {
        Narrow few;
        std::memcpy(&few, to_.columns + v * at_.n + i, sizeof few);
        const Doubles away = __builtin_convertvector(few, Doubles) - centre_[v];
        squares = v ? squares + away * away : away * away;
      }
      std::memcpy(&least, to_.distance + i, sizeof least);
      least = squares < least ? squares : least;
      std::memcpy(to_.distance + i, &least, sizeof least);
      some += least;
    }
    double sum = 0;
    for (; i < end; ++i) {
      double squares = 0;
      for (std::size_t v = 0; v < kNumbers; ++v) {
        const double away = static_cast<double>(to_.columns[v * at_.n + i]) - centre_[v];
        squares += away * away;
      }
      to_.distance[i] = squares < to_.distance[i] ? squares : to_.distance[i];
      sum += to_.distance[i];
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) sum += some[lane];
    return sum;
  }

  // The first point past the draw, n if it is not sure. Sums of n numbers that are not negative are wrong by less than n units of
  // 2^-53, whatever their order: that of all, twice, and that up to a point, twice.
  std::size_t look(double total, double draw) const {
    const double room = total * (static_cast<double>(at_.n) + 64) * 8e-16, place = draw * total;
    double sum = 0;
    std::size_t block = 0;
    const std::size_t blocks = (at_.n + kBlock - 1) / kBlock;
    while (block < blocks && !(sum + to_.upto[block] > place - 2 * room)) sum += to_.upto[block++];
    for (std::size_t i = block * kBlock; i < at_.n; ++i) {
      sum += to_.distance[i];
      if (sum > place - room) return sum > place + room ? i : at_.n;
    }
    return at_.n;
  }

  std::size_t look_one_by_one(double draw) {
    double total = 0;
    for (std::size_t i = 0; i < at_.n; ++i) to_.upto[i] = total += to_.distance[i];
    const auto place = static_cast<std::size_t>(std::upper_bound(to_.upto, to_.upto + at_.n, draw * total) - to_.upto);
    return std::min(place, at_.n - 1);
  }

  const PalettePoints& at_;
  const Scratch to_;
  double centre_[kNumbers];
};

template <int kSize>
void draw(const PalettePoints& at, const double* draws, std::size_t k, std::uint64_t* chosen, const Scratch& scratch) {
  Draw<kSize> points(at, scratch);
  for (std::size_t c = 1; c < k; ++c) chosen[c] = points.next(chosen[c - 1], draws[c - 1]);
}

}  // namespace

void palette_spread(const PalettePoints& at, const double* draws, std::size_t k, std::uint64_t* chosen, double* scratch) {
  const Scratch to{scratch, scratch + at.n, reinterpret_cast<float*>(scratch + 2 * at.n)};
  at.size == 2 ? draw<2>(at, draws, k, chosen, to) : draw<4>(at, draws, k, chosen, to);
}

}  // namespace ingot::INGOT_ISA
