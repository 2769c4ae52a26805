// Declaration of the kernel that adds decoded rows to a base, once per instruction set, as in kernels.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

#define INGOT_DECLARE_AFFINE_ADD(isa)                                                                             \
  namespace ingot::isa {                                                                                          \
  void affine_add(const AffineLayout& layout, const std::uint8_t* packed, const void* scales, const void* zeros, \
                  Dtype scale_type, const void* base, void* out, Dtype type);                                     \
  }

INGOT_DECLARE_AFFINE_ADD(baseline)
INGOT_DECLARE_AFFINE_ADD(v3)
INGOT_DECLARE_AFFINE_ADD(v4)
