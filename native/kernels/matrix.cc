// Products and triangular factors of matrices, with the same bits on every machine (kernels/matrix.h).
#include "kernels/matrix.h"

#include <cmath>
#include <vector>

#include "core/pool.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 64;  // columns that are factored together
constexpr std::size_t kTogether = 16;  // rows that are solved together
constexpr std::size_t kAtOnce = 384;   // rows of a thread's task: multiples of kTogether, and of kTileRows

// The remaining part of columns of A, in f64: columns first to last, all rows before `last`, in blocks of kBlock rows.
class Columns {
 public:
  Columns(float* a, double* diagonal, std::size_t n, std::size_t first, std::size_t last, std::size_t threads)
      : a_(a), diagonal_(diagonal), n_(n), first_(first), last_(last), count_(last - first), threads_(threads),
        lower_(last * kBlock), panels_((n - last) * kBlock) {}

  void take_off() {
    in_ranges(n_ - last_, kDepth, threads_, [this](std::size_t start, std::size_t stop) { weigh(start, stop); });
    in_ranges(last_, kAtOnce, threads_, [this](std::size_t above, std::size_t below) { take_off(above, below); });
  }

  void solve() {
    links_.assign(kBlock * kBlock, 0.0);
    for (std::size_t j = 0; j < count_; ++j)
      for (std::size_t other = 0; other < j; ++other) links_[j * kBlock + other] = weighed(first_ + other, first_ + j);
    in_ranges(first_, kAtOnce, threads_, [this](std::size_t above, std::size_t below) { solve(above, below); });
  }

  // Factors the triangle of these columns; returns false if it is not positive definite.
  bool factor() {
    for (std::size_t j = count_; j-- > 0;) {
      const double diagonal = lower(first_ + j, j);
      if (!(diagonal > 0) || !std::isfinite(diagonal)) return false;
      diagonal_[first_ + j] = diagonal;
      for (std::size_t i = 0; i < j; ++i)
        a_[(first_ + i) * n_ + first_ + j] = static_cast<float>(lower(first_ + i, j) / diagonal);
      for (std::size_t i = 0; i < j; ++i)
        for (std::size_t other = i; other < j; ++other)
          lower(first_ + i, other) -=
              static_cast<double>(a_[(first_ + i) * n_ + first_ + j]) * weighed(first_ + other, first_ + j);
    }
    return true;
  }

 private:
  static constexpr std::size_t kWide = Lanes<float>::tile;
  static_assert(kBlock % kWide == 0);

  // Stores kDepth, or fewer, of the later columns of these rows, weighed, in panels of these rows.
  void weigh(std::size_t start, std::size_t stop) {
    float* to = panels_.data() + start * kBlock;
    const std::size_t deep = stop - start;
    for (std::size_t j = 0; j < count_; ++j)
      for (std::size_t t = 0; t < deep; ++t)
        to[j / kWide * deep * kWide + t * kWide + j % kWide] = static_cast<float>(weighed(first_ + j, last_ + start + t));
  }

  // Subtracts from some rows the contributions of the later columns, which are already factored, in one fixed order:
  // sums of kDepth products in f32, and sums of these in f64.
  void take_off(std::size_t above, std::size_t below) {
    for (std::size_t i = above; i < below; ++i)
      for (std::size_t j = 0; j < count_; ++j) lower_[i * kBlock + j] = static_cast<double>(a_[i * n_ + first_ + j]);
    for (std::size_t k = last_; k < n_; k += kDepth) {
      const std::size_t deep = std::min(kDepth, n_ - k);
      for (std::size_t i = above; i < below; i += kTileRows) {
        const std::size_t batch = std::min(kTileRows, below - i);
        for (std::size_t panel = 0; panel < kBlock / kWide; ++panel) {
          const float* later = panels_.data() + (k - last_) * kBlock + panel * deep * kWide;
          float sums[kTileRows * kWide] = {};
          const float* rows = a_ + i * n_ + k;
          if (batch == kTileRows) {
            tile<float, kTileRows>(rows, n_, deep, later, sums, kWide, kWide, 1.0f);
          } else {
            for (std::size_t row = 0; row < batch; ++row)
              tile<float, 1>(rows + row * n_, n_, deep, later, sums + row * kWide, kWide, kWide, 1.0f);
          }
          for (std::size_t row = 0; row < batch; ++row)
            for (std::size_t j = 0; j < kWide; ++j)
              lower_[(i + row) * kBlock + panel * kWide + j] -= static_cast<double>(sums[row * kWide + j]);
        }
      }
    }
  }

  // Solves for some of the rows above the triangle.
  void solve(std::size_t above, std::size_t below) {
    alignas(64) double turned[kBlock][kTogether] = {};
    for (std::size_t i = above; i < below; i += kTogether) {
      const std::size_t batch = std::min(kTogether, below - i);
      for (std::size_t row = 0; row < batch; ++row)
        for (std::size_t j = 0; j < count_; ++j) turned[j][row] = lower(i + row, j);
      for (std::size_t j = count_; j-- > 0;) {
        const double diagonal = diagonal_[first_ + j];
        double sums[kTogether];
        for (std::size_t row = 0; row < kTogether; ++row)
          sums[row] = static_cast<double>(static_cast<float>(turned[j][row] / diagonal));
        for (std::size_t other = 0; other < j; ++other) {
          const double link = links_[j * kBlock + other];
          for (std::size_t row = 0; row < kTogether; ++row) turned[other][row] -= sums[row] * link;
        }
        for (std::size_t row = 0; row < batch; ++row) a_[(i + row) * n_ + first_ + j] = static_cast<float>(sums[row]);
      }
    }
  }

  double& lower(std::size_t row, std::size_t j) { return lower_[row * kBlock + j]; }
  double weighed(std::size_t row, std::size_t col) const {
    return diagonal_[col] * static_cast<double>(a_[row * n_ + col]);
  }

  float* a_;
  double* diagonal_;
  std::size_t n_, first_, last_, count_, threads_;
  std::vector<double> lower_, links_;
  std::vector<float> panels_;
};

}  // namespace

void matrix_multiply_add(const float* a, std::size_t a_stride, const float* b, std::size_t b_stride, float* out,
                         std::size_t out_stride, std::size_t rows, std::size_t depth, std::size_t cols) {
  multiply_add<float>(a, a_stride, b, b_stride, out, out_stride, rows, depth, cols, 1.0f);
}

bool matrix_factor(float* a, double* diagonal, std::size_t n, std::size_t threads) {
  for (std::size_t last = n; last > 0;) {
    const std::size_t first = (last - 1) / kBlock * kBlock;
    Columns columns(a, diagonal, n, first, last, threads);
    columns.take_off();
    if (!columns.factor()) return false;
    columns.solve();
    last = first;
  }
  for (std::size_t i = 0; i < n; ++i) std::fill(a + i * n, a + i * n + i + 1, 0.0f);
  return true;
}

}  // namespace ingot::INGOT_ISA
