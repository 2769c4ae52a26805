// Definitions that the encoder and the decoder of float_entropy share, once per instruction set: constants of the layout,
// little-endian access and byte planes. spec/float_entropy.md defines the layout.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/entropy.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;

constexpr Byte kRaw = 0, kConstant = 1, kHuffman = 2, kAns = 3, kJoint = 4, kRans = 5, kJointRans = 6;

constexpr std::size_t kStreams = 4;  // bit streams of a coded plane
constexpr int kLimit = 12;           // longest Huffman code in bits
constexpr int kScaleBits = 13;       // ANS frequencies add up to 2^13
constexpr int kHeadBits = 13;        // of a stream's head: the first state; the bits skipped are above
constexpr std::size_t kSymbols = 1024;    // joint symbols: 8 bits of exponent, 2 of mantissa
constexpr std::size_t kDistinct = 256;    // limit on the joint symbols that occur in a chunk
constexpr std::size_t kMostDistinct = 512;  // limit on the symbols of a table
constexpr std::size_t kSixBlock = 1024;   // elements whose six low bits are packed together

template <class Word>
inline Word load_le(const Byte* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  if constexpr (std::endian::native == std::endian::big && sizeof(Word) > 1) {
    Word swapped = 0;
    for (std::size_t i = 0; i < sizeof word; ++i) swapped = static_cast<Word>(swapped << 8 | p[sizeof word - 1 - i]);
    word = swapped;
  }
  return word;
}

template <class Word>
inline void store_le(Byte* p, Word word) {
  if constexpr (std::endian::native == std::endian::little)
    std::memcpy(p, &word, sizeof word);
  else
    for (std::size_t i = 0; i < sizeof word; ++i) p[i] = static_cast<Byte>(word >> (8 * i));
}

// The number of elements of each stream except the last: stream s has elements [s * quarter, (s + 1) * quarter) of n.
inline std::size_t quarter_of(std::size_t n) { return (n + kStreams - 1) / kStreams; }

inline std::size_t min_of(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Sorts ascending; for short lists.
inline void sort_keys(std::uint64_t* keys, std::size_t n) {
  for (std::size_t i = 1; i < n; ++i) {
    const std::uint64_t key = keys[i];
    std::size_t index = i;
    for (; index > 0 && keys[index - 1] > key; --index) keys[index] = keys[index - 1];
    keys[index] = key;
  }
}

// The number of bytes for the six low bits of n elements: four elements in three bytes, in blocks of kSixBlock.
inline std::size_t six_bytes(std::size_t n) {
  const std::size_t remainder = n % kSixBlock;
  return n / kSixBlock * (kSixBlock / 4 * 3) + (remainder + 3) / 4 * 3;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
