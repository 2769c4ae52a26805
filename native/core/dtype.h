// Element types that the kernels read and write, and the memory layout of a quantized matrix. Plain data only: these
// headers are compiled once per instruction set, and the linker could merge inline functions of different instruction
// sets.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// bf16 and f16 are represented by their 16 bits.
enum class Dtype { f32 = 0, f16 = 1, bf16 = 2, f64 = 3 };

// A matrix of the affine family: codes in rows of `row_bytes`, each row a separate bit stream (spec/affine.md).
struct AffineLayout {
  std::size_t rows;
  std::size_t cols;
  std::size_t group;      // columns per group, at least 1; the last group of a row may be shorter
  std::size_t row_bytes;  // distance between rows; at least ceil(cols * bits / 8)
  int bits;               // 1..8
  bool is_signed;         // codes are two's complement
  bool msb;               // first code in the high bits of the first byte
  bool per_tensor;        // one scale (and zero) for all rows
  bool offset = false;    // zeros are offsets: w = s * q + z
};

}  // namespace ingot
