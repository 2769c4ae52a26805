// Packs entries, signs and scales to blocks of the grid types: the inverse of kernels/ggml_grids.h.
#pragma once
#include "kernels/ggml_grid_kinds.h"
#include "kernels/ggml_types.h"

namespace ingot::INGOT_ISA {
namespace {

// The contents of a block. `negative` has a bit for each of eight values; `down` is 1 for vectors shifted down.
struct GridContents {
  std::uint16_t d;
  std::uint8_t step[16];
  std::uint16_t entry[64];
  std::uint8_t negative[32], down[32];
};

inline void put_bytes(Byte* to, std::uint64_t value, int bytes) {
  for (int k = 0; k < bytes; ++k) to[k] = static_cast<Byte>(value >> 8 * k);
}

inline void put_nibbles(const std::uint8_t* from, int count, Byte* to) {
  for (int k = 0; k < count; k += 2) to[k / 2] = static_cast<Byte>(from[k] | from[k + 1] << 4);
}

// Four times seven signs, and a scale above them.
inline void put_signs_and_step(const GridContents& in, int k, Byte* to) {
  std::uint32_t word = static_cast<std::uint32_t>(in.step[k]) << 28;
  for (int i = 0; i < 4; ++i) word |= (in.negative[4 * k + i] & 127u) << 7 * i;
  put_bytes(to, word, 4);
}

template <Ggml kType>
void pack_grid(const GridContents& in, Byte* out);

template <>
inline void pack_grid<Ggml::iq2_xxs>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 4; ++i) out[2 + 8 * k + i] = static_cast<Byte>(in.entry[4 * k + i]);
    put_signs_and_step(in, k, out + 6 + 8 * k);
  }
}

template <>
inline void pack_grid<Ggml::iq2_xs>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 32; ++k) put_bytes(out + 2 + 2 * k, in.entry[k] | (in.negative[k] & 127u) << 9, 2);
  put_nibbles(in.step, 16, out + 66);
}

template <>
inline void pack_grid<Ggml::iq2_s>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 32; ++k) {
    out[2 + k] = static_cast<Byte>(in.entry[k]);
    out[34 + k] = in.negative[k];
  }
  for (int k = 0; k < 8; ++k) {
    unsigned high = 0;
    for (int i = 0; i < 4; ++i) high |= (in.entry[4 * k + i] >> 8u) << 2 * i;
    out[66 + k] = static_cast<Byte>(high);
  }
  put_nibbles(in.step, 16, out + 74);
}

template <>
inline void pack_grid<Ggml::iq3_xxs>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 64; ++k) out[2 + k] = static_cast<Byte>(in.entry[k]);
  for (int k = 0; k < 8; ++k) put_signs_and_step(in, k, out + 66 + 4 * k);
}

template <>
inline void pack_grid<Ggml::iq3_s>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 64; ++k) out[2 + k] = static_cast<Byte>(in.entry[k]);
  for (int k = 0; k < 8; ++k) {
    unsigned high = 0;
    for (int i = 0; i < 8; ++i) high |= (in.entry[8 * k + i] >> 8u) << i;
    out[66 + k] = static_cast<Byte>(high);
  }
  for (int k = 0; k < 32; ++k) out[74 + k] = in.negative[k];
  put_nibbles(in.step, 8, out + 106);
}

template <>
inline void pack_grid<Ggml::iq1_s>(const GridContents& in, Byte* out) {
  put_bytes(out, in.d, 2);
  for (int k = 0; k < 32; ++k) out[2 + k] = static_cast<Byte>(in.entry[k]);
  for (int k = 0; k < 8; ++k) {
    unsigned word = static_cast<unsigned>(in.step[k]) << 12 | static_cast<unsigned>(in.down[4 * k]) << 15;
    for (int i = 0; i < 4; ++i) word |= (in.entry[4 * k + i] >> 8u) << 3 * i;
    put_bytes(out + 34 + 2 * k, word, 2);
  }
}

template <>
inline void pack_grid<Ggml::iq1_m>(const GridContents& in, Byte* out) {
  for (int k = 0; k < 32; ++k) out[k] = static_cast<Byte>(in.entry[k]);
  for (int k = 0; k < 16; ++k) {
    const auto high = [&](int i) { return (in.entry[i] >> 8u) | static_cast<unsigned>(in.down[i]) << 3; };
    out[32 + k] = static_cast<Byte>(high(2 * k) | high(2 * k + 1) << 4);
  }
  for (int k = 0; k < 4; ++k) {
    unsigned word = (in.d >> 4 * k & 15u) << 12;
    for (int i = 0; i < 4; ++i) word |= static_cast<unsigned>(in.step[4 * k + i]) << 3 * i;
    put_bytes(out + 48 + 2 * k, word, 2);
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
