// The sum of the squares of floats, in f64.
#pragma once
#include <cstddef>

#include "kernels/float_vectors.h"

namespace ingot::INGOT_ISA {
namespace {

class Squares {
 public:
  void add(const float* at, std::size_t n) {
    std::size_t i = 0;
    for (; i + kEach <= n; i += kEach) {
      const Doubles wide = load_doubles(at + i);
      some_ += wide * wide;
    }
    for (; i < n; ++i) rest_ += static_cast<double>(at[i]) * static_cast<double>(at[i]);
  }
  double sum() const {
    double found = rest_;
    for (std::size_t lane = 0; lane < kEach; ++lane) found += some_[lane];
    return found;
  }

 private:
  static constexpr std::size_t kEach = sizeof(Doubles) / sizeof(double);
  Doubles some_{};
  double rest_ = 0;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
