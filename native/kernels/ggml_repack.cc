// The integers of ggml's types Q4_0 to Q8_0 as rows of codes, lowest bits first, and back (spec/gguf.md, "Repacking").
// A block's low fields are its elements 0 to 15, its high ones 16 to 31; in a row neighbours lie side by side.
#include <cstring>

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

inline void fours_to_row(const Byte* __restrict q, Byte* __restrict row) {
  for (int k = 0; k < 8; ++k) row[k] = static_cast<Byte>((q[2 * k] & 15) | q[2 * k + 1] << 4);
  for (int k = 0; k < 8; ++k) row[8 + k] = static_cast<Byte>(q[2 * k] >> 4 | (q[2 * k + 1] & 0xF0));
}

inline void fours_from_row(const Byte* __restrict row, Byte* __restrict q) {
  for (int k = 0; k < 8; ++k) {
    q[2 * k] = static_cast<Byte>((row[k] & 15) | row[8 + k] << 4);
    q[2 * k + 1] = static_cast<Byte>(row[k] >> 4 | (row[8 + k] & 0xF0));
  }
}

// Eight codes of 5 bits are 5 bytes of a row.
inline void fives_to_row(const Byte* __restrict high, const Byte* __restrict q, Byte* __restrict row) {
  Byte codes[32];
  for (int j = 0; j < 16; ++j) {
    codes[j] = static_cast<Byte>((q[j] & 15) | (high[j / 8] >> j % 8 & 1) << 4);
    codes[16 + j] = static_cast<Byte>(q[j] >> 4 | (high[2 + j / 8] >> j % 8 & 1) << 4);
  }
  for (int run = 0; run < 4; ++run) {
    std::uint64_t word = 0;
    for (int j = 0; j < 8; ++j) word |= static_cast<std::uint64_t>(codes[8 * run + j]) << 5 * j;
    for (int j = 0; j < 5; ++j) row[5 * run + j] = static_cast<Byte>(word >> 8 * j);
  }
}

inline void fives_from_row(const Byte* __restrict row, Byte* __restrict high, Byte* __restrict q) {
  Byte codes[32];
  for (int run = 0; run < 4; ++run) {
    std::uint64_t word = 0;
    for (int j = 0; j < 5; ++j) word |= static_cast<std::uint64_t>(row[5 * run + j]) << 8 * j;
    unsigned top = 0;
    for (int j = 0; j < 8; ++j) {
      codes[8 * run + j] = static_cast<Byte>(word >> 5 * j & 31);
      top |= static_cast<unsigned>(word >> (5 * j + 4) & 1) << j;
    }
    high[run] = static_cast<Byte>(top);
  }
  for (int j = 0; j < 16; ++j) q[j] = static_cast<Byte>((codes[j] & 15) | codes[16 + j] << 4);
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
