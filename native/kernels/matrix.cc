// Products and Cholesky's factor of matrices, equal to the last bit on every machine (kernels/matrix.h).
#include "kernels/matrix.h"

#include <cmath>
#include <vector>

#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 64;

// row[j] for j from `first` to `last`: what is left of it, over the diagonal.
inline void solve_row(const double* a, std::size_t n, std::size_t first, std::size_t last, double* row) {
  for (std::size_t j = first; j < last; ++j) {
    const double* above = a + j * n;
    double left = row[j];
    for (std::size_t t = first; t < j; ++t) left -= row[t] * above[t];
    row[j] = left / above[j];
  }
}

}  // namespace

void matrix_multiply(const float* a, const float* b, float* out, std::size_t rows, std::size_t depth, std::size_t cols) {
  std::fill(out, out + rows * cols, 0.0f);
  multiply_add<float>(a, depth, b, cols, out, cols, rows, depth, cols, 1.0f);
}

void matrix_multiply_add(const float* a, std::size_t a_stride, const float* b, std::size_t b_stride, float* out,
                         std::size_t out_stride, std::size_t rows, std::size_t depth, std::size_t cols) {
  multiply_add<float>(a, a_stride, b, b_stride, out, out_stride, rows, depth, cols, 1.0f);
}

bool matrix_cholesky(double* a, std::size_t n) {
  std::vector<double> turned;
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t last = std::min(n, first + kBlock);
    for (std::size_t j = first; j < last; ++j) {
      double* row = a + j * n;
      solve_row(a, n, first, j, row);
      double left = row[j];
      for (std::size_t t = first; t < j; ++t) left -= row[t] * row[t];
      if (!(left > 0) || !std::isfinite(left)) return false;
      row[j] = std::sqrt(left);
    }
    const std::size_t below = n - last, depth = last - first;
    turned.resize(depth * below);
    for (std::size_t i = 0; i < below; ++i) {
      double* row = a + (last + i) * n;
      solve_row(a, n, first, last, row);
      for (std::size_t t = 0; t < depth; ++t) turned[t * below + i] = row[first + t];
    }
    for (std::size_t i = 0; i < below; i += kBlock) {
      const std::size_t rows = std::min(kBlock, below - i);
      double* target = a + (last + i) * n;
      multiply_add<double>(target + first, n, turned.data(), below, target + last, n, rows, depth, i + rows, -1.0);
    }
  }
  for (std::size_t i = 0; i < n; ++i) std::fill(a + i * n + i + 1, a + (i + 1) * n, 0.0);
  return true;
}

}  // namespace ingot::INGOT_ISA
