// Matrices of packed 32-bit words, as other programs store codes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Rows of words, `stride` bytes from one to the next, at any address.
struct WordMatrix {
  const std::uint8_t* data;
  std::size_t stride, rows, cols;
};

// The output window of a matrix of words.
struct WordWindow {
  std::uint8_t* data;
  std::size_t stride;
};

// The order of the eight outputs in a word, bits 4 i .. 4 i + 3, in AutoAWQ's packing.
inline constexpr std::size_t kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

}  // namespace ingot
