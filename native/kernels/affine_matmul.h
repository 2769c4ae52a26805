// Declarations of the kernels that multiply with packed weights, once per instruction set, as in kernels.h.
#pragma once
#include <cstddef>

#include "core/matmul.h"

#define INGOT_DECLARE_AFFINE_MATMUL(isa)                                                                           \
  namespace ingot::isa {                                                                                           \
  void matmul_prepare(const MatmulLayout& layout, const void* x, Dtype type, std::size_t count, float* prepared); \
  void matmul_rows(const MatmulLayout& layout, const MatmulWeights& weights, const float* prepared, std::size_t count, \
                   bool exact, std::size_t first, std::size_t last, const MatmulOutput& out);                      \
  }

INGOT_DECLARE_AFFINE_MATMUL(baseline)
INGOT_DECLARE_AFFINE_MATMUL(v3)
INGOT_DECLARE_AFFINE_MATMUL(v4)
