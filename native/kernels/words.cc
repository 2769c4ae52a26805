// Words of 32 bits turned: what GPTQ and AWQ lay out input by input becomes rows of outputs, and back.
#include <cstring>

#include "core/words.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kTile = 16;  // words: a cache line of each row that is read or written
// Files do not align what they hold.
using Word = std::uint32_t __attribute__((aligned(1), may_alias));

// A matrix of 8 x 8 codes of 4 bits, a word for each row, becomes its transpose; of kTile such matrices at once.
void turn_codes(std::uint32_t (&x)[8][kTile]) {
  constexpr std::uint32_t kMasks[3] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
  for (int stage = 0; stage < 3; ++stage) {
    const int span = 4 >> stage, shift = 4 * span;
    for (int row = 0; row < 8; ++row) {
      if (row & span) continue;
      for (std::size_t i = 0; i < kTile; ++i) {
        const std::uint32_t other = ((x[row][i] >> shift) ^ x[row + span][i]) & kMasks[stage];
        x[row + span][i] ^= other;
        x[row][i] ^= other << shift;
      }
    }
  }
}

std::size_t least(std::size_t left) { return left < kTile ? left : kTile; }

const Word* row_at(const WordMatrix& in, std::size_t row) {
  return reinterpret_cast<const Word*>(in.data + row * in.stride);
}

}  // namespace

void words_turn(const WordMatrix& in, std::uint8_t* out) {
  auto* turned = reinterpret_cast<Word*>(out);
  alignas(64) std::uint32_t tile[kTile][kTile];
  for (std::size_t col = 0; col < in.cols; col += kTile) {
    const std::size_t width = least(in.cols - col);
    for (std::size_t row = 0; row < in.rows; row += kTile) {
      const std::size_t height = least(in.rows - row);
      for (std::size_t i = 0; i < height; ++i) {
        const Word* from = row_at(in, row + i) + col;
        for (std::size_t j = 0; j < width; ++j) tile[j][i] = from[j];
      }
      for (std::size_t j = 0; j < width; ++j) std::memcpy(turned + (col + j) * in.rows + row, tile[j], 4 * height);
    }
  }
}

void words_from_awq(const WordMatrix& in, std::uint8_t* out) {
  auto* turned = reinterpret_cast<Word*>(out);
  alignas(64) std::uint32_t codes[8][kTile] = {}, tile[8][kTile][kTile];
  const std::size_t blocks = in.rows / 8;
  for (std::size_t col = 0; col < in.cols; col += kTile) {
    const std::size_t width = least(in.cols - col);
    for (std::size_t block = 0; block < blocks; block += kTile) {
      const std::size_t height = least(blocks - block);
      for (std::size_t i = 0; i < height; ++i) {
        for (std::size_t k = 0; k < 8; ++k) std::memcpy(codes[k], row_at(in, 8 * (block + i) + k) + col, 4 * width);
        turn_codes(codes);
        for (std::size_t lane = 0; lane < 8; ++lane)
          for (std::size_t j = 0; j < width; ++j) tile[lane][j][i] = codes[lane][j];
      }
      for (std::size_t lane = 0; lane < 8; ++lane)
        for (std::size_t j = 0; j < width; ++j)
          std::memcpy(turned + (8 * (col + j) + kAwqOrder[lane]) * blocks + block, tile[lane][j], 4 * height);
    }
  }
}

void words_to_awq(const WordMatrix& in, std::uint8_t* out) {
  auto* turned = reinterpret_cast<Word*>(out);
  alignas(64) std::uint32_t codes[8][kTile] = {}, tile[8][kTile][kTile];
  const std::size_t blocks = in.rows / 8;
  for (std::size_t col = 0; col < in.cols; col += kTile) {
    const std::size_t width = least(in.cols - col);
    for (std::size_t block = 0; block < blocks; block += kTile) {
      const std::size_t height = least(blocks - block);
      for (std::size_t i = 0; i < height; ++i) {
        for (std::size_t lane = 0; lane < 8; ++lane)
          std::memcpy(codes[lane], row_at(in, 8 * (block + i) + kAwqOrder[lane]) + col, 4 * width);
        turn_codes(codes);
        for (std::size_t k = 0; k < 8; ++k)
          for (std::size_t j = 0; j < width; ++j) tile[k][j][i] = codes[k][j];
      }
      for (std::size_t k = 0; k < 8; ++k)
        for (std::size_t j = 0; j < width; ++j)
          std::memcpy(turned + (8 * (col + j) + k) * blocks + block, tile[k][j], 4 * height);
    }
  }
}

}  // namespace ingot::INGOT_ISA
