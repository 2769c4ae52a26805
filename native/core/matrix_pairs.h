// A matrix in bf16 for products (kernels/matrix_pairs.cc): words of two rows' elements, in panels of columns.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kPanel = 64;  // columns

struct PairedMatrix {
  std::uint32_t* words;  // panels x ceil(depth / 2) x kPanel: row 2 k in the lower halves, row 2 k + 1 in the upper ones
  std::size_t depth, cols;
};

}  // namespace ingot
