// Conversion between the three representations of zero points of affine codes (spec/affine.md, "Repacking").
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

// An array of f32, f16 or bf16 with an element per scale.
struct Numbers {
  const void* data;
  Dtype type;
};

}  // namespace ingot
