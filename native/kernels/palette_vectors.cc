// Clusters of short vectors (spec/palette.md, "Vectors"): the nearest centroid of each point. All centroids are tried
// for two registers of points at a time. With stored bounds, only points whose code may have changed are tried: for the
// others, all other centroids are too far by the triangle inequality (Hamerly, "Making k-means even faster", 2010),
// with a margin for rounding, so that codes and sums equal those of trying all. If sums are exact, only points that
// change their centroid are added and subtracted. With many centroids of pairs, few can be nearest in a square of the
// plane: a grid of squares, built in each iteration, replaces the bounds.
#include "kernels/gcc_headers.h"
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/palette.h"
#include "kernels/float_vectors.h"
#include "kernels/kernels.h"
#include "kernels/palette_grid.h"
#include "kernels/palette_least.h"
#include "kernels/palette_tables.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kChunk = 1024;
constexpr std::size_t kSums = 16;

// A point in one register.
template <int kSize>
struct Vector;
template <>
struct Vector<2> {
  using Narrow = float __attribute__((vector_size(8)));
  using Wide = double __attribute__((vector_size(16)));
};
template <>
struct Vector<4> {
  using Narrow = float __attribute__((vector_size(16)));
  using Wide = double __attribute__((vector_size(32)));
};

// The state of each point of a chunk, in its order.
struct Chunk {
  alignas(64) float distance[kChunk], guard[kChunk];
  alignas(64) float moved_here[4 * kChunk];
  alignas(64) std::uint32_t open[kChunk + kSums];  // points to try; some elements after them are overwritten
  alignas(64) std::uint8_t shut[kChunk];
};

template <int kSize>
class Nearest {
 public:
  Nearest([[maybe_unused]] const PalettePoints& all_points, const float* centroids, std::size_t k,
          const PaletteFound& output)
      : centroids_(centroids), k_(k), output_(output) {
#if defined(__AVX512F__)
    gridded_ = kSize == 2 && k > kTabled && output.bounds && all_points.n >= Grid::kLeast;
    if (gridded_) {
      grid_.fill(all_points.points, all_points.n, centroids, k);
      return;
    }
#endif
    if (output.bounds) find_guards();
#if defined(__AVX512F__)
    if (output.bounds && k <= kTabled) tables_.fill(centroids, guards_, k);
#endif
  }

  // Points `from` to `from + n`, a chunk of them; adds to the squared errors.
  void run(const float* points, std::size_t from, std::size_t n, double* errors) {
    std::uint8_t* const codes = output_.codes + from;
    float* bounds = output_.bounds ? output_.bounds + from : nullptr;
    std::size_t open = n;
    if (gridded_) {
      open = assign(points, codes, n);
      forget(bounds, n);
      bounds = nullptr;
    } else if (bounds)
      open = pass(points, codes, bounds, n);
    else
      for (std::size_t i = 0; i < n; ++i) chunk_.open[i] = static_cast<std::uint32_t>(i);
    for (std::size_t i = 0; i < open; i += 2 * kWidth) attempt(points, codes, bounds, i, std::min(open, i + 2 * kWidth));
    if (!output_.moves)
      for (std::size_t i = 0; i < n; ++i) count<1>(points + i * kSize, codes[i]);
    add_errors(n, errors);
  }

 private:
  // Half of the distance to the nearest other centroid: a nearer point cannot have another centroid.
  void find_guards() {
    for (std::size_t a = 0; a < k_; ++a) {
      float smallest = std::numeric_limits<float>::infinity();
      for (std::size_t c = 0; c < k_; ++c)
        if (c != a) smallest = std::min(smallest, squared<kSize>(centroids_ + a * kSize, centroids_ + c * kSize));
      guards_[a] = std::sqrt(smallest) * 0.5F * (1 / kRoom);
    }
  }

  // Decreases the bounds by the moves of centroids, and lists the points for which they no longer suffice.
  std::size_t pass(const float* points, const std::uint8_t* codes, float* bounds, std::size_t n) {
    std::size_t done = 0, open = 0;
#if defined(__AVX512F__)
    if (k_ <= kTabled)
      for (; done + kWidth <= n; done += kWidth) {
        const auto passed =
            tables_.pass(points + done * kSize, codes + done, output_.moved, bounds + done, chunk_.distance + done);
        open += list_sixteen(open, done, static_cast<std::uint16_t>(~passed));
      }
#endif
    return done == n ? open : pass_rest(points, codes, bounds, done, n, open);
  }

  std::size_t pass_rest(const float* points, const std::uint8_t* codes, float* bounds, std::size_t from, std::size_t n,
                        std::size_t open) {
    float* const own = chunk_.moved_here;
    for (std::size_t i = from; i < n; ++i) {
      std::memcpy(own + i * kSize, centroids_ + std::size_t{codes[i]} * kSize, kSize * sizeof(float));
      chunk_.guard[i] = guards_[codes[i]];
    }
    for (std::size_t i = from; i < n; ++i) chunk_.distance[i] = squared<kSize>(points + i * kSize, own + i * kSize);
    const float moved = output_.moved;
    for (std::size_t i = from; i < n; ++i) {
      const float low = (bounds[i] - moved) * kLess;
      bounds[i] = low > 0 ? low : 0;
      const float room = low > chunk_.guard[i] ? low : chunk_.guard[i];
      chunk_.shut[i] = room * room > chunk_.distance[i] * kRoom + kTiny;
    }
    std::size_t i = from;
    for (; i + 8 <= n; i += 8) {
      std::uint64_t eight;
      std::memcpy(&eight, chunk_.shut + i, 8);
      if (eight == 0x0101010101010101) continue;
      for (std::size_t j = i; j < i + 8; ++j) open += list(open, j);
    }
    for (; i < n; ++i) open += list(open, i);
    return open;
  }

  std::size_t list(std::size_t position, std::size_t i) {
    chunk_.open[position] = static_cast<std::uint32_t>(i);
    return chunk_.shut[i] ? 0 : 1;
  }

  // Sets bounds to 0. Most are 0 already, and pages that are not written need no memory.
  static void forget(float* bounds, std::size_t n) {
    std::uint32_t any = 0;
    for (std::size_t i = 0; i < n; ++i) any |= std::bit_cast<std::uint32_t>(bounds[i]);
    if (any) std::fill(bounds, bounds + n, 0.0F);
  }

  // Finds the codes of points by the grid, and lists those that are left.
  std::size_t assign(const float* points, std::uint8_t* codes, std::size_t n) {
    std::size_t open = 0;
#if defined(__AVX512F__)
    std::size_t done = 0;
    if constexpr (kSize == 2)
      for (; done + kWidth <= n; done += kWidth) {
        __m512i which;
        Floats distance;
        const __mmask16 left = grid_.pass(points + done * kSize, &which, &distance);
        store_floats(chunk_.distance + done, distance);
        auto* const at = reinterpret_cast<__m128i*>(codes + done);
        const __m512i before = _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
        const __mmask16 other = _mm512_mask_cmpneq_epi32_mask(static_cast<__mmask16>(~left), which, before);
        if (left) open += list_sixteen(open, done, left);
        if (!other) continue;
        if (output_.moves) move(points + done * kSize, before, which, other);
        _mm_storeu_si128(at, _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(before, other, which)));
      }
    for (; done < n; ++done) chunk_.open[open++] = static_cast<std::uint32_t>(done);
#else
    static_cast<void>(points), static_cast<void>(codes), static_cast<void>(n);
#endif
    return open;
  }

#if defined(__AVX512F__)
  // Moves those of sixteen points that have a new code from one sum to another.
  void move(const float* points, __m512i before, __m512i after, __mmask16 other) {
    alignas(64) std::uint32_t from[kWidth], to[kWidth];
    _mm512_store_si512(from, before);
    _mm512_store_si512(to, after);
    for (unsigned pending = other; pending; pending &= pending - 1) {
      const auto lane = static_cast<std::size_t>(std::countr_zero(pending));
      count<-1>(points + lane * kSize, from[lane]);
      count<1>(points + lane * kSize, to[lane]);
    }
  }

  std::size_t list_sixteen(std::size_t position, std::size_t from, std::uint16_t open) {
    const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(from)), numbers_of_lanes());
    _mm512_storeu_si512(chunk_.open + position, _mm512_maskz_compress_epi32(open, numbers));
    return static_cast<std::size_t>(std::popcount(open));
  }
#endif

  // Tries all centroids for up to two vectors of listed points.
  void attempt(const float* points, std::uint8_t* codes, float* bounds, std::size_t first, std::size_t end) {
    alignas(64) float columns[kSize][2 * kWidth];
    for (std::size_t lane = 0; lane < 2 * kWidth; ++lane) {
      const float* const point = points + std::size_t{chunk_.open[std::min(first + lane, end - 1)]} * kSize;
      for (int v = 0; v < kSize; ++v) columns[v][lane] = point[v];
    }
    NearestTwo<kSize> a, b;
    a.begin();
    b.begin();
    for (int v = 0; v < kSize; ++v) {
      std::memcpy(&a.point[v], columns[v], sizeof(Floats));
      std::memcpy(&b.point[v], columns[v] + kWidth, sizeof(Floats));
    }
    for (std::size_t c = 0; c < k_; ++c) {
      a.see(centroids_ + c * kSize, static_cast<std::int32_t>(c));
      b.see(centroids_ + c * kSize, static_cast<std::int32_t>(c));
    }
    keep(a, points, codes, bounds, first, std::min(end, first + kWidth));
    if (end > first + kWidth) keep(b, points, codes, bounds, first + kWidth, end);
  }

  void keep(const NearestTwo<kSize>& result, const float* points, std::uint8_t* codes, float* bounds, std::size_t first,
            std::size_t end) {
    alignas(64) float lower[kWidth], bound[kWidth];
    alignas(64) std::int32_t which[kWidth];
    std::memcpy(lower, &result.smallest, sizeof lower);
    std::memcpy(bound, &result.second, sizeof bound);
    std::memcpy(which, &result.which, sizeof which);
    for (std::size_t lane = 0; lane < kWidth; ++lane) bound[lane] = std::sqrt(bound[lane]) * kLess;
    for (std::size_t i = first; i < end; ++i) {
      const std::size_t index = chunk_.open[i];
      const auto code = static_cast<std::uint8_t>(which[i - first]);
      if (output_.moves && code != codes[index]) {
        count<-1>(points + index * kSize, codes[index]);
        count<1>(points + index * kSize, code);
      }
      codes[index] = code;
      chunk_.distance[index] = lower[i - first];
      if (bounds) bounds[index] = bound[i - first];
    }
  }

  // Adds a point to its centroid's sum, or subtracts it.
  template <int kSign>
  void count(const float* values_in, std::size_t code) {
    using Narrow = typename Vector<kSize>::Narrow;
    using Wide = typename Vector<kSize>::Wide;
    Narrow point;
    Wide sum;
    std::memcpy(&point, values_in, sizeof point);
    std::memcpy(&sum, output_.sums + code * kSize, sizeof sum);
    sum += kSign * __builtin_convertvector(point, Wide);
    std::memcpy(output_.sums + code * kSize, &sum, sizeof sum);
    output_.counts[code] += kSign;
  }

  // Adds the squared errors to kSums sums, in turn.
  void add_errors(std::size_t n, double* errors) {
    for (std::size_t i = n; i % kSums; ++i) chunk_.distance[i] = 0;
    for (std::size_t i = 0; i < n; i += kSums)
      for (std::size_t lane = 0; lane < kSums; ++lane) errors[lane] += static_cast<double>(chunk_.distance[i + lane]);
  }

  const float* centroids_;
  std::size_t k_;
  const PaletteFound& output_;
  float guards_[256];
#if defined(__AVX512F__)
  Tables<kSize> tables_;
  Grid grid_;  // instead of bounds
#endif
  bool gridded_ = false;
  Chunk chunk_;
};

template <int kSize>
double nearest(const PalettePoints& all_points, const float* centroids, std::size_t k, const PaletteFound& output) {
  Nearest<kSize> all(all_points, centroids, k, output);
  double errors[kSums] = {};
  for (std::size_t i = 0; i < all_points.n; i += kChunk)
    all.run(all_points.points + i * kSize, i, std::min(kChunk, all_points.n - i), errors);
  for (std::size_t width = kSums / 2; width; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane) errors[lane] += errors[lane + width];
  return errors[0];
}

}  // namespace

double palette_nearest(const PalettePoints& points, const float* centroids, std::size_t k, const PaletteFound& output) {
  return points.size == 2 ? nearest<2>(points, centroids, k, output) : nearest<4>(points, centroids, k, output);
}

}  // namespace ingot::INGOT_ISA
