// The integers of ggml's types Q4_0 to Q8_0 as rows of codes, lowest bits first, and back (spec/gguf.md, "Repacking").
// A block's low fields are its elements 0 to 15, its high ones 16 to 31; in a row neighbours lie side by side.
#include <cstring>

#include "kernels/bits.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;

constexpr bool has_minimum(Ggml type) { return type == Ggml::q4_1 || type == Ggml::q5_1; }
constexpr bool has_fifth(Ggml type) { return type == Ggml::q5_0 || type == Ggml::q5_1; }

inline std::uint16_t u16_at(const Byte* at) { return static_cast<std::uint16_t>(at[0] | at[1] << 8); }
inline void put_u16(std::uint16_t value, Byte* at) {
  at[0] = static_cast<Byte>(value);
  at[1] = static_cast<Byte>(value >> 8);
}

// Eight codes are the bytes of a word, the first in the lowest.
template <std::size_t kBytes = 8>
inline std::uint64_t load(const Byte* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kBytes);
  return little(word);
}

template <std::size_t kBytes = 8>
inline void store(std::uint64_t word, Byte* at) {
  word = little(word);
  std::memcpy(at, &word, kBytes);
}

constexpr std::uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0f, kOnes = 0x0101010101010101;

// The bits of a byte as bytes that are 0 or 1, and back.
inline std::uint64_t spread1(Byte bits) {
  const std::uint64_t own = (bits * kOnes) & 0x8040201008040201;  // byte k keeps bit k
  return (own + 0x7f7f7f7f7f7f7f7f) >> 7 & kOnes;
}

inline Byte join1(std::uint64_t bytes) { return static_cast<Byte>((bytes & kOnes) * 0x0102040810204080 >> 56); }

inline void fours_to_row(const Byte* __restrict q, Byte* __restrict row) {
  for (int part = 0; part < 2; ++part) {
    const std::uint64_t word = load(q + 8 * part);
    const std::uint64_t low = gather<4>(word & kLowNibbles), high = gather<4>(word >> 4 & kLowNibbles);
    store<4>(low, row + 4 * part);
    store<4>(high, row + 8 + 4 * part);
  }
}

inline void fours_from_row(const Byte* __restrict row, Byte* __restrict q) {
  for (int part = 0; part < 2; ++part) {
    const std::uint64_t word = spread<4>(load<4>(row + 4 * part)) | spread<4>(load<4>(row + 8 + 4 * part)) << 4;
    store(word, q + 8 * part);
  }
}

// Eight codes of 5 bits are 5 bytes of a row.
inline void fives_to_row(const Byte* __restrict high, const Byte* __restrict q, Byte* __restrict row) {
  for (int run = 0; run < 4; ++run) {
    const std::uint64_t nibbles = load(q + run % 2 * 8) >> run / 2 * 4 & kLowNibbles;
    const std::uint64_t bits = gather<5>(nibbles | spread1(high[run]) << 4);
    store<5>(bits, row + 5 * run);
  }
}

inline void fives_from_row(const Byte* __restrict row, Byte* __restrict high, Byte* __restrict q) {
  std::uint64_t codes[4];
  for (int run = 0; run < 4; ++run) {
    codes[run] = spread<5>(load<5>(row + 5 * run));
    high[run] = join1(codes[run] >> 4);
  }
  for (int part = 0; part < 2; ++part) {
    const std::uint64_t word = (codes[part] & kLowNibbles) | (codes[2 + part] & kLowNibbles) << 4;
    store(word, q + 8 * part);
  }
}

template <Ggml kType>
constexpr std::size_t kRow = kType == Ggml::q8_0 ? 32 : has_fifth(kType) ? 20 : 16;  // bytes of 32 codes

template <Ggml kType>
void unpack(const Byte* __restrict in, std::size_t count, Byte* __restrict codes, std::uint16_t* __restrict scales,
            std::uint16_t* __restrict minima) {
  for (std::size_t i = 0; i < count; ++i) {
    const Byte* at = in + i * kGgmlBlocks[static_cast<int>(kType)].bytes;
    Byte* row = codes + i * kRow<kType>;
    scales[i] = u16_at(at);
    at += 2;
    if constexpr (has_minimum(kType)) {
      minima[i] = u16_at(at);
      at += 2;
    }
    if constexpr (kType == Ggml::q8_0)
      std::memcpy(row, at, 32);
    else if constexpr (has_fifth(kType))
      fives_to_row(at, at + 4, row);
    else
      fours_to_row(at, row);
  }
}

template <Ggml kType>
void pack(const Byte* __restrict codes, const std::uint16_t* __restrict scales, const std::uint16_t* __restrict minima,
          std::size_t count, Byte* __restrict out) {
  for (std::size_t i = 0; i < count; ++i) {
    Byte* at = out + i * kGgmlBlocks[static_cast<int>(kType)].bytes;
    const Byte* row = codes + i * kRow<kType>;
    put_u16(scales[i], at);
    at += 2;
    if constexpr (has_minimum(kType)) {
      put_u16(minima[i], at);
      at += 2;
    }
    if constexpr (kType == Ggml::q8_0)
      std::memcpy(at, row, 32);
    else if constexpr (has_fifth(kType))
      fives_from_row(row, at, at + 4);
    else
      fours_from_row(row, at);
  }
}

}  // namespace

void ggml_unpack(Ggml type, const std::uint8_t* in, std::size_t count, std::uint8_t* codes, std::uint16_t* scales,
                 std::uint16_t* minima) {
  if (type == Ggml::q4_0) unpack<Ggml::q4_0>(in, count, codes, scales, minima);
  if (type == Ggml::q4_1) unpack<Ggml::q4_1>(in, count, codes, scales, minima);
  if (type == Ggml::q5_0) unpack<Ggml::q5_0>(in, count, codes, scales, minima);
  if (type == Ggml::q5_1) unpack<Ggml::q5_1>(in, count, codes, scales, minima);
  if (type == Ggml::q8_0) unpack<Ggml::q8_0>(in, count, codes, scales, minima);
}

void ggml_pack(Ggml type, const std::uint8_t* codes, const std::uint16_t* scales, const std::uint16_t* minima,
               std::size_t count, std::uint8_t* out) {
  if (type == Ggml::q4_0) pack<Ggml::q4_0>(codes, scales, minima, count, out);
  if (type == Ggml::q4_1) pack<Ggml::q4_1>(codes, scales, minima, count, out);
  if (type == Ggml::q5_0) pack<Ggml::q5_0>(codes, scales, minima, count, out);
  if (type == Ggml::q5_1) pack<Ggml::q5_1>(codes, scales, minima, count, out);
  if (type == Ggml::q8_0) pack<Ggml::q8_0>(codes, scales, minima, count, out);
}

}  // namespace ingot::INGOT_ISA
