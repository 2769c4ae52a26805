// Finds the centroids of pairs that can be nearest to a point in a square of the plane (palette_vectors.cc), with
// AVX-512. A point is compared with the few centroids of its square, with the same operations in the same order as
// without a grid, so the same centroid is found.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/float_vectors.h"
#include "kernels/palette_tables.h"

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512F__)
class Grid {
 public:
  static constexpr std::size_t kLeast = 16384;  // number of points from which on a grid pays

  // For `n` points, at least a register of them, and `k` centroids.
  void fill(const float* points, std::size_t n, const float* centroids, std::size_t k) {
    centroids_ = centroids;
    lay_axes(points, n, k);
    for (std::size_t c = 0; c < k; ++c) every_[c] = static_cast<std::uint8_t>(c);
    for (std::size_t i = 0; i < kParts; i += 2) fill_parts(i, k);
  }

  // Processes sixteen points: finds codes and distances; returns a bit for each point whose square has too many
  // candidates.
  __mmask16 pass(const float* points, __m512i* codes, Floats* distances) const {
    const Floats x = Tables<2>::column(points, 0), y = Tables<2>::column(points, 1);
    const __m512i square = _mm512_add_epi32(_mm512_slli_epi32(axes_[1].cell_of(y), kSideBits), axes_[0].cell_of(x));
    const __m512i list = _mm512_i32gather_epi32(square, lists_, 4), byte = _mm512_set1_epi32(255);
    const __m512i first = _mm512_and_si512(list, byte), second = _mm512_and_si512(_mm512_srli_epi32(list, 8), byte);
    const __m512i last = _mm512_srli_epi32(list, 24);
    Floats smallest = all(std::numeric_limits<float>::infinity());
    __m512i which{};
    see(first, x, y, &smallest, &which);
    if (_mm512_cmpneq_epi32_mask(first, last)) see(second, x, y, &smallest, &which);
    if (_mm512_cmpneq_epi32_mask(second, last)) {
      see(_mm512_and_si512(_mm512_srli_epi32(list, 16), byte), x, y, &smallest, &which);
      see(last, x, y, &smallest, &which);
    }
    *codes = which;
    *distances = smallest;
    return _mm512_cmpgt_epi32_mask(first, second);
  }

 private:
  static constexpr int kSideBits = 6;
  static constexpr std::size_t kSide = std::size_t{1} << kSideBits, kPart = 8, kParts = kSide / kPart;

  // The division of a coordinate: the centroids' range in equal steps; the outermost steps extend to all points.
  struct Axis {
    float low, scale;
    alignas(64) float middle[kSide + kParts], half[kSide + kParts];  // of steps, then of eight steps at a time

    __m512i cell_of(Floats indices) const {
      const Floats step = smaller(larger((indices - low) * scale, Floats{}), all(kSide - 1));
      return _mm512_cvttps_epi32(step);
    }

    void lay(float first, float last, float from, float to) {
      const float width = (to - from) / kSide;
      low = from;
      scale = 1 / width;
      if (!(scale > 0 && scale < 1e30F)) scale = 0;  // one step contains all
      const auto element_at = [&](std::size_t i) { return from + static_cast<float>(i) * width; };
      const auto begin = [&](std::size_t i) { return scale && i ? element_at(i) : std::min(first, from); };
      const auto end = [&](std::size_t i) { return scale && i < kSide ? element_at(i) : std::max(last, to); };
      for (std::size_t i = 0; i < kSide; ++i) set(i, begin(i), end(i + 1));
      for (std::size_t i = 0; i < kParts; ++i) set(kSide + i, begin(i * kPart), end((i + 1) * kPart));
      // Rounding may put a point near an end of a step into the next step.
      const float room = std::abs(width) * 1e-3F + 1e-6F * (std::abs(from) + std::abs(to));
      for (float& item : half) item += room;
    }

   private:
    void set(std::size_t i, float from, float to) {
      middle[i] = from * 0.5F + to * 0.5F;
      half[i] = (to - from) * 0.5F + 1e-6F * (std::abs(from) + std::abs(to));
    }
  };

  // Sixteen rectangles.
  struct Boxes {
    Floats x, y, wide, high;
  };

  void lay_axes(const float* points, std::size_t n, std::size_t k) {
    Floats smallest = load_floats(points), most = smallest;
    for (std::size_t i = 0; i + kWidth <= 2 * n; i += kWidth) {
      smallest = smaller(smallest, load_floats(points + i));
      most = larger(most, load_floats(points + i));
    }
    smallest = smaller(smallest, load_floats(points + 2 * n - kWidth));
    most = larger(most, load_floats(points + 2 * n - kWidth));
    for (std::size_t v = 0; v < 2; ++v) {
      float first = smallest[v], last = most[v], from = centroids_[v], to = from;
      for (std::size_t i = v; i < kWidth; i += 2) {
        first = std::min(first, smallest[i]);
        last = std::max(last, most[i]);
      }
      for (std::size_t c = 1; c < k; ++c) {
        from = std::min(from, centroids_[2 * c + v]);
        to = std::max(to, centroids_[2 * c + v]);
      }
      axes_[v].lay(first, last, from, to);
    }
  }

  static Floats twice(const float* eight) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(eight)); }
  static Floats each_twice(const float* two) {
    return _mm512_insertf32x8(_mm512_set1_ps(two[0]), _mm256_set1_ps(two[1]), 1);
  }
  Boxes boxes(std::size_t column, std::size_t row) const {
    return {twice(axes_[0].middle + column), each_twice(axes_[1].middle + row), twice(axes_[0].half + column),
            each_twice(axes_[1].half + row)};
  }

  // Two rows of parts, of eight by eight squares each.
  void fill_parts(std::size_t row, std::size_t k) {
    std::size_t sums[2 * kParts] = {};
    among(every_, k, boxes(kSide, kSide + row), [&](std::uint8_t c, __mmask16 there) {
      for (unsigned pending = there; pending; pending &= pending - 1) {
        const auto i = static_cast<std::size_t>(std::countr_zero(pending));
        parts_[i][sums[i]++] = c;
      }
    });
    for (std::size_t i = 0; i < 2 * kParts; ++i)
      for (std::size_t j = 0; j < kPart; j += 2)
        fill_squares(parts_[i], sums[i], i % kParts * kPart, (row + i / kParts) * kPart + j);
  }

  // Two rows of eight squares: up to four centroids each, ascending, the last repeated; 1, 0 means more.
  void fill_squares(const std::uint8_t* listed, std::size_t n, std::size_t column, std::size_t row) {
    __m512i list{}, bits{};
    among(listed, n, boxes(column, row), [&](std::uint8_t c, __mmask16 there) {
      const __m512i after = _mm512_sllv_epi32(_mm512_set1_epi32(-1), bits);
      const __m512i bytes = _mm512_set1_epi32(static_cast<int>(c * 0x01010101U));
      list = _mm512_mask_mov_epi32(list, there, _mm512_ternarylogic_epi32(after, bytes, list, 0xca));
      bits = _mm512_mask_add_epi32(bits, there, bits, _mm512_set1_epi32(8));
    });
    list = _mm512_mask_mov_epi32(list, _mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(32)), _mm512_set1_epi32(1));
    std::int32_t* const at = lists_ + row * kSide + column;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(list));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + kSide), _mm512_extracti64x4_epi64(list, 1));
  }

  // Lists for each centroid the boxes in which it may be nearest. It is excluded if, at every corner, the centroid
  // nearest to the middle is nearer by more than the error of squared distances in f32. For both, the square at a point
  // is at most twice the square at the middle plus twice the square of half a diagonal.
  template <class Tell>
  void among(const std::uint8_t* listed, std::size_t n, const Boxes& box, const Tell& tell) const {
    Floats smallest = all(std::numeric_limits<float>::infinity()), x{}, y{};
    for (std::size_t i = 0; i < n; ++i) {
      const float* const c = centroids_ + std::size_t{listed[i]} * 2;
      const Floats square = squared(box, c);
      const __mmask16 nearer = _mm512_cmp_ps_mask(square, smallest, _CMP_LT_OQ);
      x = _mm512_mask_mov_ps(x, nearer, _mm512_set1_ps(c[0]));
      y = _mm512_mask_mov_ps(y, nearer, _mm512_set1_ps(c[1]));
      smallest = smaller(square, smallest);
    }
    const Floats room = (box.wide * box.wide + box.high * box.high) * (4 * (kRoom - 1)) + kTiny;
    for (std::size_t i = 0; i < n; ++i) {
      const float* const c = centroids_ + std::size_t{listed[i]} * 2;
      const Floats square = squared(box, c);
      const Floats corner = (box.wide * magnitude(c[0] - x) + box.high * magnitude(c[1] - y)) * (2 * kRoom);
      const Floats amax = smallest - square + corner + (room + (smallest + square) * (2 * (kRoom - 1)));
      tell(listed[i], _mm512_cmp_ps_mask(amax, Floats{}, _CMP_NLT_UQ));
    }
  }
  static Floats squared(const Boxes& box, const float* centroid) {
    const Floats x = box.x - centroid[0], y = box.y - centroid[1];
    return x * x + y * y;
  }

  // Compares each point with one centroid.
  void see(__m512i code, Floats x, Floats y, Floats* smallest, __m512i* which) const {
    const Floats low = _mm512_castpd_ps(_mm512_i32gather_pd(_mm512_castsi512_si256(code), centroids_, 8));
    const Floats high = _mm512_castpd_ps(_mm512_i32gather_pd(_mm512_extracti64x4_epi64(code, 1), centroids_, 8));
    const __m512i even = _mm512_slli_epi32(numbers_of_lanes(), 1);
    const Floats across = x - _mm512_permutex2var_ps(low, even, high);
    const Floats up = y - _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
    const Floats distance = across * across + up * up;
    const __mmask16 nearer = _mm512_cmp_ps_mask(distance, *smallest, _CMP_LT_OQ);
    *which = _mm512_mask_mov_epi32(*which, nearer, code);
    *smallest = smaller(distance, *smallest);
  }

  const float* centroids_ = nullptr;
  Axis axes_[2];
  alignas(64) std::int32_t lists_[kSide * kSide];
  std::uint8_t every_[256], parts_[2 * kParts][256];
};
#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
