// Finds the nearest centroid to each lane's point, by squared distances in f32, which are sums of squares in the order
// of the coordinates.
#pragma once
#include <cmath>
#include <limits>

#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

inline Floats root(Floats a) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(0xffff, a);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(a);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(a);
#else
  for (std::size_t lane = 0; lane < kWidth; ++lane) a[lane] = std::sqrt(a[lane]);
  return a;
#endif
}

template <int kSize>
inline float squared(const float* point, const float* centroid) {
  float distance = 0;
  for (int v = 0; v < kSize; ++v) {
    const float away = point[v] - centroid[v];
    distance += away * away;
  }
  return distance;
}

// The two least squared distances of each lane's point, and the centroid with the least; ties go to the first.
template <int kSize>
struct NearestTwo {
  Floats point[kSize], smallest, second;
  Ints which;

  void begin() {
    smallest = second = all(std::numeric_limits<float>::infinity());
    which = Ints{};
  }
  Floats from(const float* centroid) const {
    Floats distance{};
    for (int v = 0; v < kSize; ++v) {
      const Floats away = point[v] - centroid[v];
      distance = v ? distance + away * away : away * away;
    }
    return distance;
  }
  void see(const float* centroid, std::int32_t number) {
    const Floats distance = from(centroid);
    second = smaller(larger(distance, smallest), second);
    which = distance < smallest ? Ints{} + number : which;
    smallest = smaller(distance, smallest);
  }
};

}  // namespace
}  // namespace ingot::INGOT_ISA
