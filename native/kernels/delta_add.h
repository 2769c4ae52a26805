// Declarations of the kernels that add differences to a base in one pass, once per instruction set, as in kernels.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/wdelta.h"

#define INGOT_DECLARE_DELTA_ADD(isa)                                                                              \
  namespace ingot::isa {                                                                                          \
  void int4_add(const std::uint8_t* packed, std::size_t first, const float* table, const Placed& outliers,       \
                bool gaps, const Addition& addition);                                                             \
  void sign_add(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols,              \
                const Addition& addition);                                                                        \
  void placed_add(const Placed& values, const Addition& addition);                                                \
  void differences(const Differences& differences, float* out);                                                  \
  std::size_t changed_words(const void* old, const void* fresh, std::size_t n, int width, std::int64_t* gaps,    \
                            void* steps, std::size_t room);                                                       \
  }

INGOT_DECLARE_DELTA_ADD(baseline)
INGOT_DECLARE_DELTA_ADD(v3)
INGOT_DECLARE_DELTA_ADD(v4)
