// Products of matrices. Every element is a sum in a fixed order for any width of vectors: groups of `kDepth` terms, one
// after the other. Results have the same bits on every machine.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kDepth = 256;
constexpr std::size_t kTileRows = 6;
constexpr std::size_t kTileVectors = kVectorBytes == 64 ? 4 : 2;  // 32 or 16 registers

template <class T>
struct Lanes {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  static constexpr std::size_t width = kVectorBytes / sizeof(T);
  static constexpr std::size_t tile = kTileVectors * width;  // columns of a panel
};

// out[rows x up to a tile of columns] += sign * a[rows x depth] * panel[depth x tile].
template <class T, std::size_t kRows>
void tile(const T* __restrict a, std::size_t a_stride, std::size_t depth, const T* __restrict panel, T* __restrict out,
          std::size_t out_stride, std::size_t cols, T sign) {
  using Vector = typename Lanes<T>::Type;
  Vector sums[kRows][kTileVectors] = {};
  for (std::size_t k = 0; k < depth; ++k) {
    Vector b[kTileVectors];
    std::memcpy(b, panel + k * Lanes<T>::tile, sizeof b);
    for (std::size_t row = 0; row < kRows; ++row) {
      const Vector factor = Vector{} + a[row * a_stride + k];
      for (std::size_t v = 0; v < kTileVectors; ++v) sums[row][v] += factor * b[v];
    }
  }
  if (cols == Lanes<T>::tile) {
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t v = 0; v < kTileVectors; ++v) {
        Vector now;
        T* to = out + row * out_stride + v * Lanes<T>::width;
        std::memcpy(&now, to, sizeof now);
        now += sign * sums[row][v];
        std::memcpy(to, &now, sizeof now);
      }
    return;
  }
  for (std::size_t row = 0; row < kRows; ++row) {
    T sum[Lanes<T>::tile];
    std::memcpy(sum, sums[row], sizeof sum);
    for (std::size_t col = 0; col < cols; ++col) out[row * out_stride + col] += sign * sum[col];
  }
}

constexpr std::size_t kTogetherRows = 384;  // rows of `a` that are copied contiguously

// out[rows x cols] += sign * a[rows x depth] * b[depth x cols], each with its stride. `out` overlaps neither.
template <class T>
void multiply_add(const T* a, std::size_t a_stride, const T* b, std::size_t b_stride, T* out, std::size_t out_stride,
                  std::size_t rows, std::size_t depth, std::size_t cols, T sign) {
  constexpr std::size_t wide = Lanes<T>::tile;
  alignas(64) T panel[kDepth * wide];
  // Rows at distances of a power of two would be mapped to the same cache sets.
  std::vector<T> dense(cols > 2 * wide ? std::min(rows, kTogetherRows) * kDepth : 0);
  for (std::size_t k = 0; k < depth; k += kDepth) {
    const std::size_t deep = std::min(kDepth, depth - k);
    for (std::size_t above = 0; above < rows; above += kTogetherRows) {
      const std::size_t count = std::min(kTogetherRows, rows - above);
      const T* from = a + above * a_stride + k;
      std::size_t stride = a_stride;
      if (!dense.empty()) {
        for (std::size_t row = 0; row < count; ++row) std::memcpy(dense.data() + row * deep, from + row * a_stride, deep * sizeof(T));
        from = dense.data();
        stride = deep;
      }
      for (std::size_t col = 0; col < cols; col += wide) {
        const std::size_t batch = std::min(wide, cols - col);
        for (std::size_t i = 0; i < deep; ++i) {
          std::memcpy(panel + i * wide, b + (k + i) * b_stride + col, batch * sizeof(T));
          std::fill(panel + i * wide + batch, panel + (i + 1) * wide, T{0});
        }
        T* to = out + above * out_stride + col;
        std::size_t row = 0;
        for (; row + kTileRows <= count; row += kTileRows)
          tile<T, kTileRows>(from + row * stride, stride, deep, panel, to + row * out_stride, out_stride, batch, sign);
        for (; row < count; ++row)
          tile<T, 1>(from + row * stride, stride, deep, panel, to + row * out_stride, out_stride, batch, sign);
      }
    }
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
