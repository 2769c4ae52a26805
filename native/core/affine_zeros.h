// Conversion between the three forms of the zero of affine codes (spec/affine.md, "Repacking").
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

// Numbers of f32, f16 or bf16, one for each scale.
struct Numbers {
  const void* data;
  Dtype type;
};

}  // namespace ingot
