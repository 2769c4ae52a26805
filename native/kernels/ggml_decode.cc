// ggml's blocks to f32 (spec/gguf.md). Products of scales and integers are exact, whatever their order; a minimum that is
// added or subtracted is the one rounding. Equal to the NumPy reference, which is equal to llama.cpp's own decoders.
#include <bit>
#include <cstring>

#include "kernels/floats.h"
#include "kernels/ggml_types.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice the values of E2M1; code 8 is 0.
constexpr float kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline std::uint32_t u32_at(const Byte* at) { return u16_at(at) | u16_at(at + 2) << 16; }

// `run` bytes: their low nibbles, less `zero`, then their high ones; times a scale.
template <int kRun>
inline void nibbles(const Byte* __restrict q, float low, float high, int zero, float* __restrict out) {
  for (int j = 0; j < kRun; ++j) out[j] = low * static_cast<float>((q[j] & 15) - zero);
  for (int j = 0; j < kRun; ++j) out[kRun + j] = high * static_cast<float>((q[j] >> 4) - zero);
}

template <int kRun>
inline void looked_up(const Byte* __restrict q, float scale, const float* __restrict table, float* __restrict out) {
  for (int j = 0; j < kRun; ++j) out[j] = scale * table[q[j] & 15];
  for (int j = 0; j < kRun; ++j) out[kRun + j] = scale * table[q[j] >> 4];
}

inline void add(float* out, int count, float what) {
  for (int j = 0; j < count; ++j) out[j] += what;
}

// Nibbles with a fifth bit each.
inline void fives(const Byte* __restrict high, const Byte* __restrict q, float d, int zero, float* __restrict out) {
  const std::uint32_t bits = u32_at(high);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * static_cast<float>(static_cast<int>((q[j] & 15) | (bits >> j & 1) << 4) - zero);
    out[j + 16] = d * static_cast<float>(static_cast<int>((q[j] >> 4) | (bits >> (j + 16) & 1) << 4) - zero);
  }
}

template <Ggml kType>
void block(const Byte* __restrict b, const float* __restrict grid, float* __restrict out);

template <>
void block<Ggml::q1_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 128; ++i) out[i] = (b[2 + i / 8] >> i % 8 & 1) != 0 ? d : -d;
}

template <>
void block<Ggml::q2_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 64; ++i) out[i] = d * static_cast<float>((b[2 + i / 4] >> 2 * (i % 4) & 3) - 1);
}

template <>
void block<Ggml::q4_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  nibbles<16>(b + 2, d, d, 8, out);
}

template <>
void block<Ggml::q4_1>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  nibbles<16>(b + 4, d, d, 0, out);
  add(out, 32, f16_at(b + 2));
}

template <>
void block<Ggml::q5_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  fives(b + 2, b + 6, f16_at(b), 16, out);
}

template <>
void block<Ggml::q5_1>(const Byte* __restrict b, const float*, float* __restrict out) {
  fives(b + 4, b + 8, f16_at(b), 0, out);
  add(out, 32, f16_at(b + 2));
}

template <>
void block<Ggml::q8_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<std::int8_t>(b[2 + i]));
}

template <>
void block<Ggml::q2_k>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b + 80), least = f16_at(b + 82);
  for (int k = 0; k < 16; ++k) {
    const Byte* q = b + 16 + k / 8 * 32 + k % 2 * 16;
    const int shift = k % 8 / 2 * 2;
    const float scale = d * static_cast<float>(b[k] & 15), minimum = least * static_cast<float>(b[k] >> 4);
    for (int j = 0; j < 16; ++j) out[16 * k + j] = scale * static_cast<float>(q[j] >> shift & 3) - minimum;
  }
}

template <>
void block<Ggml::q3_k>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b + 108);
  for (int k = 0; k < 16; ++k) {
    const float scale = d * static_cast<float>(q3_k_scale(b, k));
    const Byte *q = b + 32 + k / 8 * 32 + k % 2 * 16, *top = b + k % 2 * 16;
    const int shift = k % 8 / 2 * 2, bit = k / 2;
    for (int j = 0; j < 16; ++j)
      out[16 * k + j] = scale * static_cast<float>((q[j] >> shift & 3) + (top[j] >> bit & 1) * 4 - 4);
  }
}

template <>
void block<Ggml::q4_k>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b), least = f16_at(b + 2);
  for (int k = 0; k < 8; ++k) {
    int scale = 0, minimum = 0;
    six_bits(b, k, scale, minimum);
    const float times = d * static_cast<float>(scale), less = least * static_cast<float>(minimum);
    const Byte* q = b + 16 + k / 2 * 32;
    const int shift = k % 2 * 4;
    for (int j = 0; j < 32; ++j) out[32 * k + j] = times * static_cast<float>(q[j] >> shift & 15) - less;
  }
}

template <>
void block<Ggml::q5_k>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b), least = f16_at(b + 2);
  for (int k = 0; k < 8; ++k) {
    int scale = 0, minimum = 0;
    six_bits(b, k, scale, minimum);
    const float times = d * static_cast<float>(scale), less = least * static_cast<float>(minimum);
    const Byte *q = b + 48 + k / 2 * 32, *top = b + 16;
    const int shift = k % 2 * 4;
    for (int j = 0; j < 32; ++j)
      out[32 * k + j] = times * static_cast<float>((q[j] >> shift & 15) | (top[j] >> k & 1) << 4) - less;
  }
}

template <>
void block<Ggml::q6_k>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b + 208);
  for (int k = 0; k < 16; ++k) {
    const float scale = d * static_cast<float>(static_cast<std::int8_t>(b[192 + k]));
    const Byte *q = b + k / 8 * 64 + k % 4 * 16, *top = b + 128 + k / 8 * 32 + k % 2 * 16;
    const int low = k % 8 / 4 * 4, high = k % 8 / 2 * 2;
    for (int j = 0; j < 16; ++j)
      out[16 * k + j] = scale * static_cast<float>(((q[j] >> low & 15) | (top[j] >> high & 3) << 4) - 32);
  }
}

// Seven signs and the eighth, which makes their number even.
inline unsigned even(unsigned seven) { return seven | (static_cast<unsigned>(std::popcount(seven)) & 1u) << 7; }

template <int kValues>
inline void entry(const float* __restrict values, float scale, unsigned signs, float* __restrict out) {
  for (int j = 0; j < kValues; ++j) out[j] = scale * values[j] * ((signs >> j & 1) != 0 ? -1.0f : 1.0f);
}

template <>
void block<Ggml::iq1_s>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 32; ++i) {
    const unsigned word = u16_at(b + 34 + i / 4 * 2);
    const float scale = d * static_cast<float>(2 * (word >> 12 & 7) + 1), shift = word >= 0x8000 ? -0.125f : 0.125f;
    const float* values = grid + 8 * (b[2 + i] | (word >> 3 * (i % 4) & 7) << 8);
    for (int j = 0; j < 8; ++j) out[8 * i + j] = scale * (values[j] + shift);
  }
}

template <>
void block<Ggml::iq1_m>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  unsigned bits = 0;
  for (int k = 0; k < 4; ++k) bits |= u16_at(b + 48 + 2 * k) >> 12 << 4 * k;
  const float d = f16_to_f32(static_cast<std::uint16_t>(bits));
  for (int i = 0; i < 32; ++i) {
    const unsigned three = u16_at(b + 48 + i / 8 * 2) >> 3 * (i / 2 % 4) & 7;
    const unsigned more = static_cast<unsigned>(nibble(b + 32, i));
    const float scale = d * static_cast<float>(2 * three + 1), shift = more >= 8 ? -0.125f : 0.125f;
    const float* values = grid + 8 * (b[i] | (more & 7) << 8);
    for (int j = 0; j < 8; ++j) out[8 * i + j] = scale * (values[j] + shift);
  }
}

template <>
void block<Ggml::iq2_xxs>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t word = u32_at(b + 6 + 8 * k);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
    for (int i = 0; i < 4; ++i)
      entry<8>(grid + 8 * b[2 + 8 * k + i], scale, even(word >> 7 * i & 127), out + 32 * k + 8 * i);
  }
}

template <>
void block<Ggml::iq2_xs>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 32; ++i) {
    const unsigned word = u16_at(b + 2 + 2 * i);
    const float scale = d * (0.5f + static_cast<float>(nibble(b + 66, i / 2))) * 0.25f;
    entry<8>(grid + 8 * (word & 511), scale, even(word >> 9), out + 8 * i);
  }
}

template <>
void block<Ggml::iq2_s>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 32; ++i) {
    const unsigned index = b[2 + i] | (b[66 + i / 4] >> 2 * (i % 4) & 3u) << 8;
    const float scale = d * (0.5f + static_cast<float>(nibble(b + 74, i / 2))) * 0.25f;
    entry<8>(grid + 8 * index, scale, b[34 + i], out + 8 * i);
  }
}

template <>
void block<Ggml::iq3_xxs>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t word = u32_at(b + 66 + 4 * k);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
    for (int i = 0; i < 8; ++i)
      entry<4>(grid + 4 * b[2 + 8 * k + i], scale, even(word >> 7 * (i / 2) & 127) >> 4 * (i % 2), out + 32 * k + 4 * i);
  }
}

template <>
void block<Ggml::iq3_s>(const Byte* __restrict b, const float* __restrict grid, float* __restrict out) {
  const float d = f16_at(b);
  for (int i = 0; i < 64; ++i) {
    const unsigned index = b[2 + i] | (b[66 + i / 8] >> i % 8 & 1u) << 8;
    const float scale = d * static_cast<float>(1 + 2 * nibble(b + 106, i / 8));
    entry<4>(grid + 4 * index, scale, b[74 + i / 2] >> 4 * (i % 2), out + 4 * i);
  }
}

template <>
void block<Ggml::iq4_nl>(const Byte* __restrict b, const float*, float* __restrict out) {
  looked_up<16>(b + 2, f16_at(b), kIq4, out);
}

template <>
void block<Ggml::iq4_xs>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k)
    looked_up<16>(b + 8 + 16 * k, d * static_cast<float>(iq4_xs_scale(b, k)), kIq4, out + 32 * k);
}

// Elements of a run of bytes in base 3, the first digits of all of them first.
inline void thirds(const Byte* __restrict q, int run, int digits, float d, float* __restrict out) {
  unsigned power = 1;
  for (int n = 0; n < digits; ++n, power *= 3)
    for (int j = 0; j < run; ++j)
      out[n * run + j] = d * static_cast<float>(static_cast<int>((q[j] * power & 255u) * 3 >> 8) - 1);
}

template <>
void block<Ggml::tq1_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b + 52);
  thirds(b, 32, 5, d, out);
  thirds(b + 32, 16, 5, d, out + 160);
  thirds(b + 48, 4, 4, d, out + 240);
}

template <>
void block<Ggml::tq2_0>(const Byte* __restrict b, const float*, float* __restrict out) {
  const float d = f16_at(b + 64);
  for (int k = 0; k < 8; ++k)
    for (int j = 0; j < 32; ++j)
      out[32 * k + j] = d * static_cast<float>((b[k / 4 * 32 + j] >> 2 * (k % 4) & 3) - 1);
}

template <>
void block<Ggml::mxfp4>(const Byte* __restrict b, const float*, float* __restrict out) {
  const std::uint32_t e = b[0];
  looked_up<16>(b + 1, std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23), kE2m1, out);
}

template <>
void block<Ggml::nvfp4>(const Byte* __restrict b, const float*, float* __restrict out) {
  for (int k = 0; k < 4; ++k) {
    const int exponent = b[k] >> 3 & 15, mantissa = b[k] & 7;
    const float power = std::bit_cast<float>(static_cast<std::uint32_t>(exponent - 11 + 127) << 23);
    float scale = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-10f : static_cast<float>(mantissa + 8) * power;
    if (b[k] == 0x7f) scale = 0;
    looked_up<8>(b + 4 + 8 * k, scale, kE2m1, out + 16 * k);
  }
}

}  // namespace

void ggml_decode(Ggml type, const std::uint8_t* in, std::size_t count, const float* grid, float* out) {
  with_type(type, [=]<Ggml kType>() {
    for (std::size_t i = 0; i < count; ++i) block<kType>(in + i * kOf<kType>.bytes, grid, out + i * kOf<kType>.elements);
  });
}

}  // namespace ingot::INGOT_ISA
