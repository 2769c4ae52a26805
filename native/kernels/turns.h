// Declarations of the kernels that transpose scales and lines of words, as in kernels.h; in a separate file, because a
// change of kernels.h recompiles every kernel.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/words.h"

#define INGOT_DECLARE_TURNS(isa)                                     \
  namespace ingot::isa {                                             \
  void halves_turn(const WordMatrix& in, const WordWindow& out);     \
  void bytes_turn(const WordMatrix& in, const WordWindow& out);      \
  void lines_to_awq(const WordMatrix& in, std::uint8_t* out);        \
  void lines_from_awq(const WordMatrix& in, std::uint8_t* out);      \
  }

INGOT_DECLARE_TURNS(baseline)
INGOT_DECLARE_TURNS(v3)
INGOT_DECLARE_TURNS(v4)
#undef INGOT_DECLARE_TURNS
