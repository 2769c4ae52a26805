// The block types of ggml in GGUF files (spec/gguf.md), with the number of elements and bytes of a block.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace ingot {

enum class Ggml {
  q1_0, q2_0, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs,
  iq3_s, iq4_nl, iq4_xs, tq1_0, tq2_0, mxfp4, nvfp4
};

struct GgmlBlock {
  std::string_view name;
  std::size_t elements, bytes;
  std::size_t grid = 0;  // entries of the codebook grid that indices refer to
  // Layout of a block that consists of codes, scales and perhaps minima, after unpacking: bits of a code, bytes of its
  // scales and minima, and whether it can be packed again (spec/gguf.md, "Repacking").
  std::size_t bits = 0, scales = 0, minima = 0;
  bool packed = false;
};

// The output of decoded values: f32, f16 or bf16.
struct GgmlTarget {
  void* out;
  Dtype type;
};

// The values from which blocks are composed: d and dmin as bits of f16, the integers that multiply them for each group
// if a block has several, and a code for each element.
struct GgmlNumbers {
  const std::uint16_t *d, *dmin;
  const float *steps, *minimums;
  const std::uint8_t* codes;
};

// In the order of Ggml.
inline constexpr GgmlBlock kGgmlBlocks[] = {
    {"q1_0", 128, 18},
    {"q2_0", 64, 18, 0, 2, 2},
    {"q4_0", 32, 18, 0, 4, 2, 0, true},
    {"q4_1", 32, 20, 0, 4, 2, 2, true},
    {"q5_0", 32, 22, 0, 5, 2, 0, true},
    {"q5_1", 32, 24, 0, 5, 2, 2, true},
    {"q8_0", 32, 34, 0, 8, 2, 0, true},
    {"q2_k", 256, 84, 0, 2, 64, 64},
    {"q3_k", 256, 110, 0, 3, 64},
    {"q4_k", 256, 144, 0, 4, 32, 32},
    {"q5_k", 256, 176, 0, 5, 32, 32},
    {"q6_k", 256, 210, 0, 6, 64},
    {"iq1_s", 256, 50, 2048 * 8},
    {"iq1_m", 256, 56, 2048 * 8},
    {"iq2_xxs", 256, 66, 256 * 8},
    {"iq2_xs", 256, 74, 512 * 8},
    {"iq2_s", 256, 82, 1024 * 8},
    {"iq3_xxs", 256, 98, 256 * 4},
    {"iq3_s", 256, 110, 512 * 4},
    {"iq4_nl", 32, 18, 0, 4, 2, 0, true},
    {"iq4_xs", 256, 136, 0, 4, 32},
    {"tq1_0", 256, 54},
    {"tq2_0", 256, 66, 0, 2, 2},
    {"mxfp4", 32, 17, 0, 4, 1, 0, true},
    {"nvfp4", 64, 36, 0, 4, 4, 0, true},
};

}  // namespace ingot
