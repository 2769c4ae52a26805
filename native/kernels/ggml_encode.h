// Encodes weights to ggml's blocks (spec/gguf.md, "Encoding"), once per instruction set:
// INGOT_KERNEL(ggml_encode)(type, from, out). For quantizers that choose the scales of grid types themselves: nearest values, and blocks
// of given codes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/ggml.h"

namespace ingot {

// Rows of complete blocks; `importance` has weights for the squared errors of the `cols` columns, or is null. `grid` has the entries of a
// grid type.
struct GgmlSource {
  const void* values;
  Dtype dtype;
  std::size_t blocks, cols;
  const float* importance;
  bool search;  // false: encode like the package gguf
  const std::int8_t* grid = nullptr;
};

struct GgmlStatus {
  enum Code { ok, non_finite, scale_overflow, no_encoder } code;
  std::size_t index;  // index of the value, or of the first value of its block
};

// Eight columns of a matrix, and for each row a scale that is given: the nearest values of a grid type.
struct GridColumns {
  const float* values;  // [rows, 8]
  const float* scales;  // [rows]
  const float* weights;  // [8], of squared errors
  const std::int8_t* grid;
  std::size_t rows;
};

// The codes of these columns: one entry of eight values or two of four, signs, and shifts.
struct GridCodes {
  std::uint16_t* entries;  // [rows, 1 or 2]
  std::uint8_t *negative, *down;  // [rows]
  float* values;  // [rows, 8], decoded
};

// Codes of full blocks, and the numbers of their scales.
struct GridParts {
  const std::uint16_t* d;  // [blocks], bits of f16
  const std::uint8_t* steps;  // [blocks, 8 or 16]
  const std::uint16_t* entries;  // [blocks, 32 or 64]
  const std::uint8_t *negative, *down;  // [blocks, 32]
};

#define INGOT_GGML_ENCODERS                                                              \
  GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out);          \
  bool ggml_grid_nearest(Ggml type, const GridColumns& from, const GridCodes& out);      \
  bool ggml_grid_compose(Ggml type, const GridParts& from, std::size_t blocks, std::uint8_t* out);

namespace baseline {
INGOT_GGML_ENCODERS
}
namespace v3 {
INGOT_GGML_ENCODERS
}
namespace v4 {
INGOT_GGML_ENCODERS
}
#undef INGOT_GGML_ENCODERS

}  // namespace ingot
