// Transposes 32-bit words, and their scales and zero points: GPTQ and AWQ store them by inputs, rows store them by
// outputs. Also converts lines of one packing to the other.
#include <cstring>
#include <utility>

#include "core/words.h"
#include "kernels/kernels.h"
#include "kernels/turns.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;
using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));

constexpr std::size_t kLanes = kVectorBytes / 4;
// Rows and columns of words that are processed together, so that their pages stay in the TLB and complete cache lines
// are written.
constexpr std::size_t kSpan = 64;

// Data in files are not aligned.
inline Words load(const Byte* bytes) {
  Words words;
  std::memcpy(&words, bytes, sizeof words);
  return words;
}

inline Words load(const Byte* bytes, std::size_t count) {
  Words words = {};
  std::memcpy(&words, bytes, 4 * count);
  return words;
}

inline void store(const Words& words, Byte* bytes, std::size_t count = kLanes) {
  if (count == kLanes)
    std::memcpy(bytes, &words, sizeof words);
  else
    std::memcpy(bytes, &words, 4 * count);
}

// Exchanges the elements of `low` whose index has bit kBit with those of `high` whose index does not.
template <std::size_t kBit, class Vector, std::size_t... kLane>
inline void swap_lanes(Vector& low, Vector& high, std::index_sequence<kLane...>) {
  constexpr std::size_t kCount = sizeof...(kLane);
  const Vector first =
      __builtin_shufflevector(low, high, static_cast<int>(kLane & kBit ? kCount + kLane - kBit : kLane)...);
  high = __builtin_shufflevector(low, high, static_cast<int>(kLane & kBit ? kCount + kLane : kLane + kBit)...);
  low = first;
}

// Transposes a square.
template <std::size_t kBit = 1, class Vector, std::size_t kCount>
inline void turn_rows(Vector (&x)[kCount]) {
  for (std::size_t row = 0; row < kCount; ++row)
    if (!(row & kBit)) swap_lanes<kBit>(x[row], x[row + kBit], std::make_index_sequence<kCount>());
  if constexpr (2 * kBit < kCount) turn_rows<2 * kBit>(x);
}

// Transposes in each lane a matrix of 8 x 8 codes of 4 bits, with a word for each row.
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

inline std::size_t min_of(std::size_t remaining, std::size_t limit) { return remaining < limit ? remaining : limit; }

// Types of elements that are transposed together: words in vectors of the machine's width, shorter ones in 16 bytes.
template <class T>
constexpr std::size_t kSquare = sizeof(T) == 4 ? kLanes : 16 / sizeof(T);

// Transposes a part: out[column, row] = in[row, column], both of at most kSquare.
template <class T>
void turn_square(const Byte* in, std::size_t stride, std::size_t rows, std::size_t cols, Byte* out,
                 std::size_t out_stride) {
  constexpr std::size_t kCount = kSquare<T>;
  if (rows == kCount && cols == kCount) {
    typedef T Vector __attribute__((vector_size(kCount * sizeof(T))));
    Vector x[kCount];
    for (std::size_t i = 0; i < kCount; ++i) std::memcpy(&x[i], in + i * stride, sizeof x[i]);
    turn_rows(x);
    for (std::size_t i = 0; i < kCount; ++i) std::memcpy(out + i * out_stride, &x[i], sizeof x[i]);
    return;
  }
  for (std::size_t j = 0; j < cols; ++j)
    for (std::size_t i = 0; i < rows; ++i)
      std::memcpy(out + j * out_stride + sizeof(T) * i, in + i * stride + sizeof(T) * j, sizeof(T));
}

// Calls `tile(row, rows, column, columns)` for tiles of at most kLanes x kLanes of `rows` x `cols`.
template <class Tile>
void tiles(std::size_t rows, std::size_t cols, Tile tile) {
  for (std::size_t col = 0; col < cols; col += kSpan)
    for (std::size_t row = 0; row < rows; row += kSpan)
      for (std::size_t i = row; i < min_of(rows, row + kSpan); i += kLanes)
        for (std::size_t j = col; j < min_of(cols, col + kSpan); j += kLanes)
          tile(i, min_of(rows - i, kLanes), j, min_of(cols - j, kLanes));
}

// Tiles are copied before they are transposed: rows at distances of a power of two share few cache sets, and an
// unaligned square would fetch two lines per row each time.
template <class T>
void turn(const WordMatrix& in, const WordWindow& out) {
  constexpr std::size_t kStride = kSpan * sizeof(T) + 64, kCount = kSquare<T>;
  alignas(64) Byte tile[kSpan * kStride];
  for (std::size_t col = 0; col < in.cols; col += kSpan)
    for (std::size_t row = 0; row < in.rows; row += kSpan) {
      const std::size_t rows = min_of(in.rows - row, kSpan), cols = min_of(in.cols - col, kSpan);
      for (std::size_t i = 0; i < rows; ++i)
        std::memcpy(tile + i * kStride, in.data + (row + i) * in.stride + sizeof(T) * col, sizeof(T) * cols);
      for (std::size_t j = 0; j < cols; j += kCount)
        for (std::size_t i = 0; i < rows; i += kCount)
          turn_square<T>(tile + i * kStride + sizeof(T) * j, kStride, min_of(rows - i, kCount),
                         min_of(cols - j, kCount), out.data + (col + j) * out.stride + sizeof(T) * (row + i),
                         out.stride);
    }
}

inline std::uint32_t word_at(const Byte* bytes) {
  std::uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

}  // namespace

void words_turn(const WordMatrix& in, const WordWindow& out) { turn<std::uint32_t>(in, out); }

void halves_turn(const WordMatrix& in, const WordWindow& out) { turn<std::uint16_t>(in, out); }

void bytes_turn(const WordMatrix& in, const WordWindow& out) { turn<Byte>(in, out); }

// Eight words of a line are an 8 x 8 matrix of codes; the other packing has one word of it in each of eight lines.
void lines_to_awq(const WordMatrix& in, std::uint8_t* out) {
  const std::size_t blocks = in.cols / 8;
  for (std::size_t line = 0; line < in.rows; ++line)
    for (std::size_t first = 0; first < blocks; first += kLanes) {
      const std::size_t count = min_of(blocks - first, kLanes);
      std::uint32_t tile[8][kLanes] = {};
      const Byte* bytes = in.data + line * in.stride + 32 * first;
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t k = 0; k < 8; ++k) tile[k][i] = word_at(bytes + 32 * i + 4 * kAwqOrder[k]);
      Words codes[8];
      std::memcpy(codes, tile, sizeof codes);
      turn_codes(codes);
      for (std::size_t k = 0; k < 8; ++k) store(codes[k], out + 4 * ((8 * line + k) * blocks + first), count);
    }
}

void lines_from_awq(const WordMatrix& in, std::uint8_t* out) {
  for (std::size_t line = 0; line < in.rows / 8; ++line)
    for (std::size_t first = 0; first < in.cols; first += kLanes) {
      const std::size_t count = min_of(in.cols - first, kLanes);
      Words codes[8];
      for (std::size_t k = 0; k < 8; ++k) {
        const Byte* bytes = in.data + (8 * line + k) * in.stride + 4 * first;
        codes[k] = count == kLanes ? load(bytes) : load(bytes, count);
      }
      turn_codes(codes);
      std::uint32_t tile[8][kLanes];
      std::memcpy(tile, codes, sizeof tile);
      Byte* bytes = out + 32 * (line * in.cols + first);
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t k = 0; k < 8; ++k) std::memcpy(bytes + 32 * i + 4 * kAwqOrder[k], &tile[k][i], 4);
    }
}

void words_from_awq(const WordMatrix& in, const WordWindow& out) {
  tiles(in.rows / 8, in.cols, [&](std::size_t block, std::size_t blocks, std::size_t col, std::size_t cols) {
    Words codes[8], tile[8][kLanes];
    for (std::size_t i = 0; i < blocks; ++i) {
      const Byte* bytes = in.data + 8 * (block + i) * in.stride + 4 * col;
      for (std::size_t k = 0; k < 8; ++k)
        codes[k] = cols == kLanes ? load(bytes + k * in.stride) : load(bytes + k * in.stride, cols);
      turn_codes(codes);
      for (std::size_t lane = 0; lane < 8; ++lane) tile[lane][i] = codes[lane];
    }
    for (std::size_t lane = 0; lane < 8; ++lane)
      turn_square<std::uint32_t>(reinterpret_cast<const Byte*>(tile[lane]), sizeof(Words), blocks, cols,
                                 out.data + (8 * col + kAwqOrder[lane]) * out.stride + 4 * block, 8 * out.stride);
  });
}

void words_to_awq(const WordMatrix& in, const WordWindow& out) {
  tiles(in.rows / 8, in.cols, [&](std::size_t block, std::size_t blocks, std::size_t col, std::size_t cols) {
    Words codes[8], tile[8][kLanes] = {};
    for (std::size_t lane = 0; lane < 8; ++lane)
      turn_square<std::uint32_t>(in.data + (8 * block + kAwqOrder[lane]) * in.stride + 4 * col, 8 * in.stride, blocks,
                                 cols, reinterpret_cast<Byte*>(tile[lane]), sizeof(Words));
    for (std::size_t j = 0; j < cols; ++j) {
      for (std::size_t lane = 0; lane < 8; ++lane) codes[lane] = tile[lane][j];
      turn_codes(codes);
      Byte* bytes = out.data + 8 * (col + j) * out.stride + 4 * block;
      for (std::size_t k = 0; k < 8; ++k) store(codes[k], bytes + k * out.stride, blocks);
    }
  });
}

}  // namespace ingot::INGOT_ISA
