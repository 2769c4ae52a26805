// Declarations of the kernels of palette_cells.cc and palette_steps.cc, as in kernels.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/palette_cells.h"

#define INGOT_DECLARE_CELLS(isa)                                                                             \
  namespace ingot::isa {                                                                                     \
  double palette_cells(const float* points, const PaletteCellsToFill& cells, std::uint16_t* order);         \
  bool palette_codes(const std::uint16_t* order, std::size_t n, const std::uint32_t* starts,                \
                     std::size_t cells, const std::uint8_t* codes, std::uint8_t* out);                       \
  void palette_step(const PaletteCells& cells, std::size_t first, std::size_t end, const float* centroids,   \
                    std::size_t k, const PaletteSteps& steps);                                               \
  }

INGOT_DECLARE_CELLS(baseline)
INGOT_DECLARE_CELLS(v3)
INGOT_DECLARE_CELLS(v4)
#undef INGOT_DECLARE_CELLS
