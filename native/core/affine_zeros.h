// What stands for the zero of affine codes, from one kind into another (spec/affine.md, "Repacking").
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace ingot {

// Numbers of f32, f16 or bf16, as many as there are scales.
struct Numbers {
  const void* data;
  Dtype type;
};

}  // namespace ingot
