// Words of 32 bits turned: what GPTQ and AWQ lay out input by input becomes rows of outputs, and back.
#include <cstring>
#include <utility>

#include "core/words.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;
using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));

constexpr std::size_t kLanes = kVectorBytes / 4;
// Rows and columns of words that are gone through together: so many pages are at hand, and lines are written whole.
constexpr std::size_t kSpan = 64;

// Files do not align what they hold.
inline Words load(const Byte* at) {
  Words words;
  std::memcpy(&words, at, sizeof words);
  return words;
}

inline Words load(const Byte* at, std::size_t count) {
  Words words = {};
  std::memcpy(&words, at, 4 * count);
  return words;
}

inline void store(const Words& words, Byte* at, std::size_t count = kLanes) {
  if (count == kLanes)
    std::memcpy(at, &words, sizeof words);
  else
    std::memcpy(at, &words, 4 * count);
}

// The words of `low` whose number has the bit kBit change places with those of `high` that have it not.
template <std::size_t kBit, std::size_t... kLane>
inline void swap_lanes(Words& low, Words& high, std::index_sequence<kLane...>) {
  const Words one = __builtin_shufflevector(low, high, static_cast<int>(kLane & kBit ? kLanes + kLane - kBit : kLane)...);
  high = __builtin_shufflevector(low, high, static_cast<int>(kLane & kBit ? kLanes + kLane : kLane + kBit)...);
  low = one;
}

// A square of words becomes its transpose.
template <std::size_t kBit = 1>
inline void turn_words(Words (&x)[kLanes]) {
  for (std::size_t row = 0; row < kLanes; ++row)
    if (!(row & kBit)) swap_lanes<kBit>(x[row], x[row + kBit], std::make_index_sequence<kLanes>());
  if constexpr (2 * kBit < kLanes) turn_words<2 * kBit>(x);
}

// In each lane a matrix of 8 x 8 codes of 4 bits, a word for each row, becomes its transpose.
inline void turn_codes(Words (&x)[8]) {
  constexpr std::uint32_t kMasks[3] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
  for (int stage = 0; stage < 3; ++stage) {
    const int span = 4 >> stage, shift = 4 * span;
    for (int row = 0; row < 8; ++row) {
      if (row & span) continue;
      const Words other = ((x[row] >> shift) ^ x[row + span]) & kMasks[stage];
      x[row + span] ^= other;
      x[row] ^= other << shift;
    }
  }
}

inline std::size_t least(std::size_t left, std::size_t most) { return left < most ? left : most; }

// Some words of some rows: out[column, row] = in[row, column], both of at most kLanes.
void turn_square(const Byte* in, std::size_t stride, std::size_t rows, std::size_t cols, Byte* out,
                 std::size_t out_stride) {
  if (rows == kLanes && cols == kLanes) {
    Words x[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) x[i] = load(in + i * stride);
    turn_words(x);
    for (std::size_t i = 0; i < kLanes; ++i) store(x[i], out + i * out_stride);
    return;
  }
  for (std::size_t j = 0; j < cols; ++j)
    for (std::size_t i = 0; i < rows; ++i) std::memcpy(out + j * out_stride + 4 * i, in + i * stride + 4 * j, 4);
}

// Calls `tile(row, rows, column, columns)` for tiles of at most kLanes x kLanes of `rows` x `cols`.
template <class Tile>
void tiles(std::size_t rows, std::size_t cols, Tile tile) {
  for (std::size_t col = 0; col < cols; col += kSpan)
    for (std::size_t row = 0; row < rows; row += kSpan)
      for (std::size_t i = row; i < least(rows, row + kSpan); i += kLanes)
        for (std::size_t j = col; j < least(cols, col + kSpan); j += kLanes)
          tile(i, least(rows - i, kLanes), j, least(cols - j, kLanes));
}

}  // namespace

void words_turn(const WordMatrix& in, const WordWindow& out) {
  tiles(in.rows, in.cols, [&](std::size_t row, std::size_t rows, std::size_t col, std::size_t cols) {
    turn_square(in.data + row * in.stride + 4 * col, in.stride, rows, cols, out.data + col * out.stride + 4 * row,
                out.stride);
  });
}

void words_from_awq(const WordMatrix& in, const WordWindow& out) {
  tiles(in.rows / 8, in.cols, [&](std::size_t block, std::size_t blocks, std::size_t col, std::size_t cols) {
    Words codes[8], tile[8][kLanes];
    for (std::size_t i = 0; i < blocks; ++i) {
      const Byte* at = in.data + 8 * (block + i) * in.stride + 4 * col;
      for (std::size_t k = 0; k < 8; ++k)
        codes[k] = cols == kLanes ? load(at + k * in.stride) : load(at + k * in.stride, cols);
      turn_codes(codes);
      for (std::size_t lane = 0; lane < 8; ++lane) tile[lane][i] = codes[lane];
    }
    for (std::size_t lane = 0; lane < 8; ++lane)
      turn_square(reinterpret_cast<const Byte*>(tile[lane]), sizeof(Words), blocks, cols,
                  out.data + (8 * col + kAwqOrder[lane]) * out.stride + 4 * block, 8 * out.stride);
  });
}

void words_to_awq(const WordMatrix& in, const WordWindow& out) {
  tiles(in.rows / 8, in.cols, [&](std::size_t block, std::size_t blocks, std::size_t col, std::size_t cols) {
    Words codes[8], tile[8][kLanes] = {};
    for (std::size_t lane = 0; lane < 8; ++lane)
      turn_square(in.data + (8 * block + kAwqOrder[lane]) * in.stride + 4 * col, 8 * in.stride, blocks, cols,
                  reinterpret_cast<Byte*>(tile[lane]), sizeof(Words));
    for (std::size_t j = 0; j < cols; ++j) {
      for (std::size_t lane = 0; lane < 8; ++lane) codes[lane] = tile[lane][j];
      turn_codes(codes);
      Byte* at = out.data + 8 * (col + j) * out.stride + 4 * block;
      for (std::size_t k = 0; k < 8; ++k) store(codes[k], at + k * out.stride, blocks);
    }
  });
}

}  // namespace ingot::INGOT_ISA
