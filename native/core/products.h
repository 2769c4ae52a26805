// Products of many rows of x with weights that stay packed, cut into tasks: x is prepared tile by tile, then rows of the
// weights are multiplied. Plain data only, as in core/dtype.h; what kernels read was checked by the caller.
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

// Memory of the calling thread, kept between calls: at most 4.5 bytes per element of 64 rows of x, or 4 of 256, and what
// threads work in. Throws std::bad_alloc.
float* hold_scratch(std::size_t floats);

// Bytes of codes, times rows of x, that are not worth a second thread.
constexpr std::size_t kAlone = std::size_t{1} << 15;

// `count` rows of x in `mode`; the bits depend on neither `threads` nor `mode`.
void multiply_rows(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, GemmMode mode,
                   std::size_t threads);

// The same of x in 8 bits; `dots` as in Int8Job.
void multiply_int8(const Weights& weights, const void* x, std::size_t count, const MatmulOutput& out, bool dots,
                   std::size_t threads);

// The fastest way that this processor has among those that give the bits of `found`.
GemmMode mode_here(GemmMode result);

}  // namespace ingot
