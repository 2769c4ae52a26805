// Products of many rows of x with packed weights, divided into tasks: x is prepared tile by tile, then rows of the
// weights are multiplied. Plain data only, as in core/dtype.h; the caller has checked all inputs of the kernels.
#pragma once
#include "core/int8.h"

namespace ingot {

// The weights of a product: codes of the affine family, or a source of decoded tiles.
struct Weights {
  MatmulLayout layout;
  MatmulWeights codes;
  const TileSource* source;  // null: codes
  std::size_t bytes;         // size of all stored codes
};

// Memory that the calling thread keeps between calls: at most 4.5 bytes per element of 64 rows of x, or 4 bytes per
// element of 256 rows, and scratch memory of the threads. Throws std::bad_alloc.
float* hold_scratch(std::size_t floats);

// The product of bytes of codes and rows of x below which a second thread does not pay.
constexpr std::size_t kAlone = std::size_t{1} << 15;

// Multiplies `count` rows of x in `mode`; the result depends on neither `threads` nor `mode`.
void multiply_rows(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, GemmMode mode,
                   std::size_t threads);

// The same for x in 8 bits; `dots` as in Int8Job.
void multiply_int8(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, bool dots,
                   std::size_t threads);

// The fastest mode of this processor that gives the bits of `found`.
GemmMode mode_here(GemmMode result);

}  // namespace ingot
