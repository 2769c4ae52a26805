// Packs codes and scales to ggml's blocks (spec/gguf.md, "Codec"), the inverse of kernels/ggml_decode.cc.
#pragma once
#include "core/ggml.h"
#include "kernels/ggml_lanes.h"
#include "kernels/sixteen.h"

namespace ingot::INGOT_ISA {
namespace {

// The numbers of a block except its codes; f16 as bits. Steps and minimums are integers: factors of d and of dmin.
struct Head {
  std::uint16_t d = 0, dmin = 0;
  const float* steps = nullptr;
  const float* minimums = nullptr;

  unsigned step(int k, int more = 0) const { return static_cast<unsigned>(static_cast<int>(steps[k]) + more); }
  unsigned minimum(int k) const { return static_cast<unsigned>(minimums[k]); }
};

inline void put(Byte* to, std::uint32_t value, int bytes) {
  for (int k = 0; k < bytes; ++k) to[k] = static_cast<Byte>(value >> 8 * k);
}

// Low halves of a run of bytes, then their high ones.
template <int kRun>
inline void pack_nibbles(const Byte* __restrict q, int count, Byte* __restrict out) {
  for (int index = 0; index < count; index += 2 * kRun)
    for (int j = index; j < index + kRun; j += 16) {
      const Bytes16 both = (sixteen(q + j) & 15) | sixteen(q + j + kRun) << 4;
      std::memcpy(out + j - index / 2, &both, sizeof both);
    }
}

// Two bits of 256 elements, from bit kFrom on, in runs of 32 bytes.
template <int kFrom>
inline void pack_twos(const Byte* __restrict q, Byte* __restrict out) {
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 32; ++j) {
      unsigned byte = 0;
      for (int k = 0; k < 4; ++k) byte |= (q[128 * half + 32 * k + j] >> kFrom & 3u) << 2 * k;
      out[32 * half + j] = static_cast<Byte>(byte);
    }
}

// Bit kFrom of 256 elements, bit k of byte j for element 32 k + j.
template <int kFrom>
inline void pack_ones(const Byte* __restrict q, Byte* __restrict out) {
  for (int j = 0; j < 32; ++j) {
    unsigned byte = 0;
    for (int k = 0; k < 8; ++k) byte |= (q[32 * k + j] >> kFrom & 1u) << k;
    out[j] = static_cast<Byte>(byte);
  }
}

inline void pack_fifths(const Byte* q, Byte* out) {
  for (int i = 0; i < 4; ++i) {
    std::uint64_t eight;
    std::memcpy(&eight, q + 8 * i, sizeof eight);
    out[i] = static_cast<Byte>((eight >> 4 & 0x0101010101010101) * 0x0102040810204080 >> 56);  // bit j of byte j
  }
  pack_nibbles<16>(q, 32, out + 4);
}

// Scales and minimums of Q4_K and Q5_K in 12 bytes.
inline void pack_six_bits(const Head& head, Byte* out) {
  for (int k = 0; k < 4; ++k) {
    const unsigned scale = head.step(k + 4), minimum = head.minimum(k + 4);
    out[k] = static_cast<Byte>(head.step(k) | scale >> 4 << 6);
    out[k + 4] = static_cast<Byte>(head.minimum(k) | minimum >> 4 << 6);
    out[k + 8] = static_cast<Byte>((scale & 15) | (minimum & 15) << 4);
  }
}

template <Ggml kType>
void pack(const Head& head, const Byte* q, Byte* out);

template <>
inline void pack<Ggml::q4_0>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  pack_nibbles<16>(q, 32, out + 2);
}

template <>
inline void pack<Ggml::q4_1>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  put(out + 2, head.dmin, 2);
  pack_nibbles<16>(q, 32, out + 4);
}

template <>
inline void pack<Ggml::q5_0>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  pack_fifths(q, out + 2);
}

template <>
inline void pack<Ggml::q5_1>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  put(out + 2, head.dmin, 2);
  pack_fifths(q, out + 4);
}

// Codes count from -128.
template <>
inline void pack<Ggml::q8_0>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<Byte>(q[i] - 128);
}

template <>
inline void pack<Ggml::iq4_nl>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  pack_nibbles<16>(q, 32, out + 2);
}

// `d` is the exponent.
template <>
inline void pack<Ggml::mxfp4>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 1);
  pack_nibbles<16>(q, 32, out + 1);
}

template <>
inline void pack<Ggml::q2_k>(const Head& head, const Byte* q, Byte* out) {
  for (int k = 0; k < 16; ++k) out[k] = static_cast<Byte>(head.step(k) | head.minimum(k) << 4);
  pack_twos<0>(q, out + 16);
  put(out + 80, head.d, 2);
  put(out + 82, head.dmin, 2);
}

template <>
inline void pack<Ggml::q3_k>(const Head& head, const Byte* q, Byte* out) {
  pack_ones<2>(q, out);
  pack_twos<0>(q, out + 32);
  for (int k = 0; k < 8; ++k)
    out[96 + k] = static_cast<Byte>((head.step(k, 32) & 15) | (head.step(k + 8, 32) & 15) << 4);
  for (int k = 0; k < 4; ++k) {
    unsigned byte = 0;
    for (int i = 0; i < 4; ++i) byte |= (head.step(k + 4 * i, 32) >> 4) << 2 * i;
    out[104 + k] = static_cast<Byte>(byte);
  }
  put(out + 108, head.d, 2);
}

template <>
inline void pack<Ggml::q4_k>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  put(out + 2, head.dmin, 2);
  pack_six_bits(head, out + 4);
  pack_nibbles<32>(q, 256, out + 16);
}

template <>
inline void pack<Ggml::q5_k>(const Head& head, const Byte* q, Byte* out) {
  put(out, head.d, 2);
  put(out + 2, head.dmin, 2);
  pack_six_bits(head, out + 4);
  pack_ones<4>(q, out + 16);
  pack_nibbles<32>(q, 256, out + 48);
}

template <>
inline void pack<Ggml::q6_k>(const Head& head, const Byte* q, Byte* out) {
  pack_nibbles<64>(q, 256, out);
  pack_twos<4>(q, out + 128);
  for (int k = 0; k < 16; ++k) out[192 + k] = static_cast<Byte>(head.step(k));
  put(out + 208, head.d, 2);
}

template <>
inline void pack<Ggml::iq4_xs>(const Head& head, const Byte* q, Byte* out) {
  std::uint32_t low = 0, high = 0;
  for (int k = 0; k < 8; ++k) {
    low |= (head.step(k, 32) & 15) << 4 * k;
    high |= (head.step(k, 32) >> 4) << 2 * k;
  }
  put(out, head.d, 2);
  put(out + 2, high, 2);
  put(out + 4, low, 4);
  pack_nibbles<16>(q, 256, out + 8);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
