// The sum of the squares of floats, in f64.
#pragma once
#include <cstddef>

#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

class Squares {
 public:
  void add(const float* point, std::size_t n) {
    std::size_t i = 0;
    for (; i + kEach <= n; i += kEach) {
      const Doubles wide = load_doubles(point + i);
      partial_ += wide * wide;
    }
    for (; i < n; ++i) remainder_ += static_cast<double>(point[i]) * static_cast<double>(point[i]);
  }
  double sum() const {
    double result = remainder_;
    for (std::size_t lane = 0; lane < kEach; ++lane) result += partial_[lane];
    return result;
  }

 private:
  static constexpr std::size_t kEach = sizeof(Doubles) / sizeof(double);
  Doubles partial_{};
  double remainder_ = 0;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
