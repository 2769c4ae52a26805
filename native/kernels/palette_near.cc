// An iteration of Lloyd's algorithm with slacks (spec/palette.md, "Vectors"). The slack of a point is a lower bound of
// the distance to any other centroid minus the distance to its own. Moves of centroids reduce it. When it reaches 0,
// centroids near the point's own are tried, nearest first, until the triangle inequality excludes all others, with a
// margin for rounding. The codes equal those of trying all centroids.
#include "kernels/gcc_headers.h"
#include "kernels/palette_near.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/palette_least.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kMost = 256, kFour = 4, kRings = 64, kChunk = std::size_t{1} << 15;
// Orders extend a little past reaches; centroids are tried until a point has slack for some iterations.
constexpr float kCut = 1.4F, kSteps = 4, kLeastReach = 1e-15F;
// Relative errors: squared distances in f32 are wrong by less than 5e-7; slacks lose less than 1e-5 to rounding in a
// hundred iterations.
constexpr float kMore = 1.00001F, kLess = 0.99999F, kTiny = 1e-14F;

template <int kSize>
class Near {
 public:
  Near(const PaletteReach& from, const PaletteSlacks& slack) : from_(from), slack_(slack) {
    for (std::size_t c = 0; c < kMost + kFour; ++c) {
      for (std::size_t v = 0; v < kNumbers; ++v) {
        const float coordinate = c < from.k ? from.centroids[c * kNumbers + v] : kNowhere;
        positions_[c * kNumbers + v] = coordinate;
        columns_[v][c] = coordinate;
      }
    }
  }

  // Points `first` to `first + n`, a chunk of them.
  void run(const float* points, std::size_t first, std::size_t n) {
    points_ = points + first * kNumbers;
    codes_ = slack_.codes + first;
    slacks_ = slack_.slacks + first;
    const std::size_t open = pass(n);
    if (!open) return;
    std::uint32_t ends[kMost + 1] = {};
    for (std::size_t i = 0; i < open; ++i) ++ends[codes_[open_[i]] + 1];
    for (std::size_t c = 0; c < kMost; ++c) ends[c + 1] += ends[c];
    for (std::size_t i = 0; i < open; ++i) {
      const std::size_t index = open_[i], to = ends[codes_[index]]++;
      sorted_[to] = open_[i];
      std::memcpy(rows_ + to * kNumbers, points_ + index * kNumbers, kNumbers * sizeof(float));
    }
    for (std::size_t c = 0, begin = 0; c < from_.k; begin = ends[c++])
      if (begin < ends[c]) attempt_all(c, begin, ends[c]);
  }

 private:
  static constexpr auto kNumbers = static_cast<std::size_t>(kSize);
  static constexpr float kNowhere = 1e18F;

  // The centroids near a centroid, nearest first, padded with a sentinel to a multiple of four. For each four: a lower
  // bound of the distance to these four, to all later ones, and to all that are not in the list.
  struct Order {
    float far[kMost / kFour + 1];
    std::uint16_t batch[kMost];
    std::size_t count;
  };

  // Decreases slacks, and lists the points that have none left.
  std::size_t pass(std::size_t n) {
    std::size_t open = 0, i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const Floats slack = load_floats(slacks_ + i) - lost_of(codes_ + i);
      store_floats(slacks_ + i, slack);
      if (const std::uint32_t none = none_above(slack, all(kTiny))) open += list(open_ + open, i, none);
    }
    for (; i < n; ++i) {
      slacks_[i] -= from_.shrink[codes_[i]];
      open_[open] = static_cast<std::uint32_t>(i);
      open += !(slacks_[i] > kTiny);
    }
    return open;
  }

  Floats lost_of(const std::uint8_t* codes) const {
#if defined(__AVX512F__)
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, code, from_.shrink, 4);
#elif defined(__AVX2__)
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return _mm256_i32gather_ps(from_.shrink, code, 4);
#else
    Floats result;
    for (std::size_t lane = 0; lane < kWidth; ++lane) result[lane] = from_.shrink[codes[lane]];
    return result;
#endif
  }

  // Writes the coordinates of some points, and arbitrary values after them; returns their number.
  static std::size_t list(std::uint32_t* to, std::size_t first, std::uint32_t batch) {
    const auto count = static_cast<std::size_t>(std::popcount(batch));
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lanes);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(batch), numbers));
#elif defined(__AVX2__) && defined(__BMI2__)
    const std::uint64_t bytes = _pdep_u64(batch, 0x0101010101010101) * 0xff,
                        lanes = _pext_u64(0x0706050403020100, bytes);
    const __m256i numbers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(lanes)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), numbers));
#else
    for (; batch; batch &= batch - 1)
      *to++ = static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(std::countr_zero(batch));
#endif
    return count;
  }

  const Order& order_of(std::size_t a) {
    Order& to = orders_[a];
    if (is_known_[a]) return to;
    is_known_[a] = true;
    alignas(kVectorBytes) std::int32_t rings[kMost];
    std::uint32_t batch[kMost + kWidth];
    // The reach is the distance of a neighbour of fixed rank, if there are enough neighbours.
    const float amax = std::max(from_.reach[a] * kCut, kLeastReach), per = kRings / amax;
    std::size_t count = 0;
    for (std::size_t c = 0; c < from_.k; c += kWidth) {
      Floats square{};
      for (std::size_t v = 0; v < kNumbers; ++v) {
        const Floats part = load_floats(columns_[v] + c) - positions_[a * kNumbers + v];
        square += part * part;
      }
      const Floats ring = root(square) * per;
      const Ints integer = __builtin_convertvector(smaller(ring, all(kRings)), Ints);
      std::memcpy(rings + c, &integer, sizeof integer);
      count += list(batch + count, c, none_above(ring, all(kRings - 0.001F)));
    }
    std::uint16_t begins[kRings + 2] = {};
    for (std::size_t i = 0; i < count; ++i) ++begins[rings[batch[i]] + 1];
    for (std::size_t ring = 0; ring < kRings; ++ring) begins[ring + 1] = static_cast<std::uint16_t>(begins[ring + 1] + begins[ring]);
    for (std::size_t i = 0; i < count; ++i) to.batch[begins[rings[batch[i]]]++] = static_cast<std::uint16_t>(batch[i]);
    to.count = (count + kFour - 1) / kFour * kFour;
    for (std::size_t i = 0; i < count; i += kFour)
      to.far[i / kFour] = static_cast<float>(rings[to.batch[i]]) / per * kLess;
    for (std::size_t i = count; i < to.count; ++i) to.batch[i] = static_cast<std::uint16_t>(from_.k);
    to.far[to.count / kFour] = count < from_.k ? (kRings - 1) / per * kLess : std::numeric_limits<float>::infinity();
    return to;
  }

  void attempt_all(std::size_t a, std::size_t first, std::size_t end) {
    const Order& order = order_of(a);
    for (; first < end; first += kWidth) attempt(a, order, first, std::min(kWidth, end - first));
  }

  // Tries centroids for some of the sorted points, all of which have centroid `a`.
  void attempt(std::size_t a, const Order& order, std::size_t first, std::size_t count) {
    const auto lanes = static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1);
    NearestTwo<kSize> result;
    result.begin();
    gather(rows_ + first * kNumbers, result.point);
    const Floats local = root(result.from(positions_ + a * kNumbers)) * kMore,
                 gain = all(kSteps * from_.shrink[a] + kTiny);
    Floats away{};  // lower bound for the centroids that are not tried
    if (!order.count) return try_all(a, result, first, count);  // a centroid that is NaN or infinite
    for (std::size_t c = 0;;) {
      for (std::size_t item = 0; item < kFour; ++item) {
        const std::size_t number = order.batch[c + item];
        result.see(positions_ + number * kNumbers, static_cast<std::int32_t>(number));
      }
      c += kFour;
      away = order.far[c / kFour] - local;
      if (!(within_reach(result, away, gain) & lanes)) break;
      if (c == order.count) return try_all(a, result, first, count);
    }
    keep(a, result, away, first, count);
  }

  // Returns whether a centroid at this distance may be the nearest, or would leave too little slack.
  static std::uint32_t within_reach(const NearestTwo<kSize>& result, Floats away, Floats gain) {
    const Floats lower = result.smallest * (kMore * kMore), zero{};
    const Floats more = larger(away - gain, zero), far = larger(away - kTiny, zero);
    return none_above(more * more, lower) & none_above(far * far, larger(result.second, lower));
  }

  void try_all(std::size_t a, NearestTwo<kSize>& result, std::size_t first, std::size_t count) {
    result.begin();
    for (std::size_t c = 0; c < from_.k; ++c) result.see(positions_ + c * kNumbers, static_cast<std::int32_t>(c));
    keep(a, result, all(std::numeric_limits<float>::infinity()), first, count);
  }

  void keep(std::size_t a, const NearestTwo<kSize>& result, Floats away, std::size_t first, std::size_t count) {
    const std::uint32_t* const batch = sorted_ + first;
    const float* const rows = rows_ + first * kNumbers;
    alignas(kVectorBytes) std::int32_t which[kWidth];
    alignas(kVectorBytes) float slacks[kWidth], reach[kWidth];
    std::memcpy(which, &result.which, sizeof which);
    const auto lanes = static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1);
    for (std::uint32_t same = none_above(result.second, result.smallest) & lanes; same; same &= same - 1) {
      const auto lane = static_cast<std::size_t>(std::countr_zero(same));
      which[lane] = first_of_nearest(rows + lane * kNumbers);
    }
    for (std::size_t lane = 0; lane < kWidth; ++lane) {
      // A lane without a point, or with a point as far away as the padding after the last centroid, may get the
      // padding's index.
      if (static_cast<std::size_t>(which[lane]) >= from_.k) which[lane] = lane < count ? first_of_nearest(rows + lane * kNumbers) : 0;
      reach[lane] = from_.reach[which[lane]];
    }
    const Floats lower = root(result.smallest) * kMore;
    const Floats slack = smaller(smaller(root(result.second) * kLess, away) - lower, load_floats(reach) - 2 * lower);
    store_floats(slacks, slack * kLess - lower * 1e-5F);
    for (std::size_t lane = 0; lane < count; ++lane) {
      const std::size_t index = batch[lane];
      slacks_[index] = slacks[lane];
      const auto code = static_cast<std::size_t>(which[lane]);
      if (code == a) continue;
      codes_[index] = static_cast<std::uint8_t>(code);
      this->count<-1>(rows + lane * kNumbers, a);
      this->count<1>(rows + lane * kNumbers, code);
    }
  }

  std::int32_t first_of_nearest(const float* point) const {
    float smallest = std::numeric_limits<float>::infinity();
    std::size_t result = 0;
    for (std::size_t c = 0; c < from_.k; ++c) {
      const float distance = squared<kSize>(point, positions_ + c * kNumbers);
      if (distance < smallest) smallest = distance, result = c;
    }
    return static_cast<std::int32_t>(result);
  }

  // The coordinates of a register of points.
  static void gather(const float* rows, Floats* columns) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (kSize == 4) {
      __m256 row[4];
      for (int i = 0; i < 4; ++i)
        row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows + 4 * i)), _mm_loadu_ps(rows + 4 * i + 16), 1);
      const __m256 a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
      const __m256 c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
      columns[0] = _mm256_shuffle_ps(a, c, 0x44);
      columns[1] = _mm256_shuffle_ps(a, c, 0xee);
      columns[2] = _mm256_shuffle_ps(b, d, 0x44);
      columns[3] = _mm256_shuffle_ps(b, d, 0xee);
      return;
    }
#endif
    alignas(kVectorBytes) float to[kNumbers][kWidth];
    for (std::size_t lane = 0; lane < kWidth; ++lane)
      for (std::size_t v = 0; v < kNumbers; ++v) to[v][lane] = rows[lane * kNumbers + v];
    for (std::size_t v = 0; v < kNumbers; ++v) columns[v] = load_floats(to[v]);
  }

  // Adds a point to its centroid's sum, or subtracts it.
  template <int kSign>
  void count(const float* point, std::size_t code) {
    for (std::size_t v = 0; v < kNumbers; ++v)
      slack_.sums[code * kNumbers + v] += kSign * static_cast<double>(point[v]);
    slack_.counts[code] += kSign;
  }

  const PaletteReach& from_;
  const PaletteSlacks& slack_;
  const float* points_ = nullptr;
  std::uint8_t* codes_ = nullptr;
  float* slacks_ = nullptr;
  alignas(kVectorBytes) float positions_[(kMost + kFour) * kNumbers];
  alignas(kVectorBytes) float columns_[kNumbers][kMost + kFour];
  std::uint32_t open_[kChunk + kWidth], sorted_[kChunk];
  float rows_[(kChunk + kWidth) * kNumbers];  // the coordinates of points, sorted
  Order orders_[kMost];
  bool is_known_[kMost] = {};
};

template <int kSize>
void near(const PalettePoints& all_points, const PaletteReach& from, const PaletteSlacks& slack) {
  const auto step = std::make_unique<Near<kSize>>(from, slack);
  for (std::size_t i = 0; i < all_points.n; i += kChunk)
    step->run(all_points.points, i, std::min(kChunk, all_points.n - i));
}

}  // namespace

void palette_near(const PalettePoints& points, const PaletteReach& from, const PaletteSlacks& slack) {
  points.size == 2 ? near<2>(points, from, slack) : near<4>(points, from, slack);
}

}  // namespace ingot::INGOT_ISA
