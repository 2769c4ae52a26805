// Distances of points to the centroids of their codes, and whether other centroids may be nearer (palette_vectors.cc),
// with sixteen lanes of AVX-512 and the centroids in registers; element by element the results equal those of the other
// code.
#pragma once
#include <cstring>

#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

// Squared distances in f32 are wrong by less than 8 units in the last place, 5e-7; squares below kTiny may have larger
// errors.
constexpr float kRoom = 1.00001F, kTiny = 1e-30F, kLess = 1 - 2e-6F;

#if defined(__AVX512F__)
constexpr std::size_t kTabled = 64;  // centroids, at most

inline __m512i numbers_of_lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

template <int kSize>
class Tables {
 public:
  void fill(const float* centroids, const float* guards, std::size_t k) {
    for (int v = 0; v < kSize; ++v)
      for (std::size_t i = 0; i < kTabled; ++i)
        positions_[v][i] = i < k ? centroids[i * kSize + static_cast<std::size_t>(v)] : 0;
    for (std::size_t i = 0; i < kTabled; ++i) guards_[i] = i < k ? guards[i] : 0;
    is_few_ = k <= 2 * kWidth;
  }

  // Processes sixteen points: decreases their bounds and computes their distances; returns a bit for each whose code is
  // certain.
  __mmask16 pass(const float* points, const std::uint8_t* codes, float moved, float* bounds, float* distances) const {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    Floats distance{};
    for (int v = 0; v < kSize; ++v) {
      const Floats away = column(points, v) - look_up(positions_[v], code);
      distance = v ? distance + away * away : away * away;
    }
    const Floats low = (load_floats(bounds) - moved) * kLess, guard = look_up(guards_, code), zero{};
    store_floats(bounds, larger(low, zero));
    store_floats(distances, distance);
    const Floats room = larger(low, guard);
    return _mm512_cmp_ps_mask(room * room, distance * kRoom + kTiny, _CMP_GT_OQ);
  }

  // Coordinate `v` of each point.
  static Floats column(const float* points, int v) {
    const __m512i from = _mm512_add_epi32(_mm512_mullo_epi32(numbers_of_lanes(), _mm512_set1_epi32(kSize)), _mm512_set1_epi32(v));
    const Floats first = _mm512_permutex2var_ps(load_floats(points), from, load_floats(points + kWidth));
    if constexpr (kSize == 2) return first;
    const Floats second = _mm512_permutex2var_ps(load_floats(points + 2 * kWidth), from, load_floats(points + 3 * kWidth));
    return _mm512_mask_mov_ps(first, 0xff00, second);  // indices are modulo two registers
  }

 private:
  Floats look_up(const float* table, __m512i code) const {
    const Floats low = _mm512_permutex2var_ps(load_floats(table), code, load_floats(table + kWidth));
    if (is_few_) return low;
    const Floats high = _mm512_permutex2var_ps(load_floats(table + 2 * kWidth), code, load_floats(table + 3 * kWidth));
    return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(code, _mm512_set1_epi32(2 * kWidth)), high);
  }

  alignas(64) float positions_[kSize][kTabled], guards_[kTabled];
  bool is_few_ = false;
};
#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
