// Declarations of the kernels that multiply many rows with packed weights, once per instruction set, as in kernels.h.
#pragma once
#include <cstddef>

#include "core/matmul.h"

#define INGOT_DECLARE_AFFINE_GEMM(isa)                                                           \
  namespace ingot::isa {                                                                         \
  GemmMode gemm_mode(const void* x, Dtype type, std::size_t n, std::uint32_t reach);             \
  std::size_t gemm_tile(GemmMode mode, std::size_t count);                                       \
  void gemm_pack(const GemmJob& job, std::size_t tile);                                          \
  void gemm_rows(const GemmJob& job, std::size_t first, std::size_t last, GemmScratch& scratch); \
  }

INGOT_DECLARE_AFFINE_GEMM(baseline)
INGOT_DECLARE_AFFINE_GEMM(v3)
INGOT_DECLARE_AFFINE_GEMM(v4)
