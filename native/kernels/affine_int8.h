// Declarations of the kernels that multiply x in 8 bits with packed weights, once per instruction set, as in kernels.h.
#pragma once
#include <cstddef>

#include "core/int8.h"

#define INGOT_DECLARE_AFFINE_INT8(isa)                                                           \
  namespace ingot::isa {                                                                         \
  std::size_t int8_tile();                                                                       \
  void int8_prepare(const Int8Job& job, std::size_t tile);                                       \
  void int8_rows(const Int8Job& job, std::size_t first, std::size_t last, Int8Scratch& scratch); \
  }

INGOT_DECLARE_AFFINE_INT8(baseline)
INGOT_DECLARE_AFFINE_INT8(v3)
INGOT_DECLARE_AFFINE_INT8(v4)
