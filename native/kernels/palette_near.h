// Declarations of the kernels of palette_near.cc and palette_guess.cc, as in kernels.h.
#pragma once
#include "core/palette.h"
#include "core/palette_near.h"

#define INGOT_DECLARE_NEAR(isa)                                                                                      \
  namespace ingot::isa {                                                                                             \
  double palette_guess(const PalettePoints& points, const float* centroids, std::size_t k,                           \
                       const PaletteSlacks& slack);                                                                  \
  void palette_reach(const float* before, const float* after, std::size_t k, int size, float* reach, float* shrink); \
  void palette_near(const PalettePoints& points, const PaletteReach& from, const PaletteSlacks& slack);              \
  }

INGOT_DECLARE_NEAR(baseline)
INGOT_DECLARE_NEAR(v3)
INGOT_DECLARE_NEAR(v4)
#undef INGOT_DECLARE_NEAR
