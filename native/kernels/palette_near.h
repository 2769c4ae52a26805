// Declarations of the kernels of palette_near.cc and palette_guess.cc, as kernels.h has those of others.
#pragma once
#include "core/palette.h"
#include "core/palette_near.h"

#define INGOT_DECLARE_NEAR(isa)                                                                                                \
  namespace ingot::isa {                                                                                                       \
  double palette_guess(const PalettePoints& at, const float* centroids, std::size_t k, const PaletteSlacks& found);             \
  void palette_reach(const float* before, const float* after, std::size_t k, int size, float* reach, float* lost);              \
  void palette_near(const PalettePoints& at, const PaletteReach& from, const PaletteSlacks& found);                            \
  }

INGOT_DECLARE_NEAR(baseline)
INGOT_DECLARE_NEAR(v3)
INGOT_DECLARE_NEAR(v4)
#undef INGOT_DECLARE_NEAR
