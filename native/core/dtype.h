// Element types that the kernels read and write, and how a quantized matrix lies in memory. Plain data only: these
// headers are compiled once per instruction set, and an inline function here could be merged by the linker across them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// bf16 and f16 travel as their 16 bits.
enum class Dtype { f32 = 0, f16 = 1, bf16 = 2, f64 = 3 };

// One matrix of the affine family: codes in rows of `row_bytes`, each row a bit stream of its own (spec/affine.md).
struct AffineLayout {
  std::size_t rows;
  std::size_t cols;
  std::size_t group;      // columns per group, at least 1; the last group of a row may be shorter
  std::size_t row_bytes;  // distance of two rows; at least ceil(cols * bits / 8)
  int bits;               // 1..8
  bool is_signed;         // codes are two's complement
  bool msb;               // first code in the high bits of the first byte
  bool per_tensor;        // one scale (and zero) for all rows
  bool offset = false;    // zeros are offsets: w = s * q + z
};

}  // namespace ingot
