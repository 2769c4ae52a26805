// Declarations of the kernels that decode tiles for products, once per instruction set, as in kernels.h. `matrix` points to
// the type in the function's name: a TrellisMatrix, a PaletteMatrix.
#pragma once
#include "core/tile.h"

#define INGOT_DECLARE_TILES(isa)                           \
  namespace ingot::isa {                                   \
  void trellis_tile(const void* matrix, const Tile& tile); \
  void palette_tile(const void* matrix, const Tile& tile); \
  }

INGOT_DECLARE_TILES(baseline)
INGOT_DECLARE_TILES(v3)
INGOT_DECLARE_TILES(v4)
