// The encoders of the package gguf, operation by operation (spec/gguf.md, "Reference").
#pragma once
#include <cmath>

#include "kernels/ggml_pack.h"

namespace ingot::INGOT_ISA {
namespace {

inline float inverse_of(float d) {
  const float id = d != 0 ? 1.0f / d : 0.0f;
  return is_finite(id) ? id : 0.0f;  // reciprocal of scales so small that f16 rounds them to 0
}

inline Byte code(float t, int amax) {
  const int q = static_cast<int>(t);
  return static_cast<Byte>(q < amax ? q : amax);
}

// The value of largest magnitude becomes -kHalf.
template <Ggml kType, int kHalf>
bool exact_symmetric(const float* x, Byte* out) {
  float extreme = x[0], most = std::fabs(x[0]);  // if all values are zeros, the sign of the first
  for (int i = 1; i < 32; ++i)
    if (std::fabs(x[i]) > most) most = std::fabs(extreme = x[i]);
  const float d = extreme / -kHalf, id = inverse_of(d);
  Byte q[32];
  for (int i = 0; i < 32; ++i) q[i] = code(x[i] * id + (kHalf + 0.5f), 2 * kHalf - 1);
  pack<kType>(Head{f32_to_f16(d)}, q, out);
  return is_finite(f16_to_f32(f32_to_f16(d)));
}

template <Ggml kType, int kMost>
bool exact_affine(const float* x, Byte* out) {
  float low = x[0], high = x[0];
  for (int i = 1; i < 32; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  const float d = (high - low) / kMost;
  if (!is_finite(d)) return false;
  const float id = inverse_of(d);
  Byte q[32];
  for (int i = 0; i < 32; ++i) q[i] = code((x[i] - low) * id + 0.5f, kMost);
  const Head head{f32_to_f16(d), f32_to_f16(low)};
  pack<kType>(head, q, out);
  return is_finite(f16_to_f32(head.d)) && is_finite(f16_to_f32(head.dmin));
}

// Rounds half away from zero.
inline bool exact_q8_0(const float* x, Byte* out) {
  float amax = 0;
  for (int i = 0; i < 32; ++i) amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
  const float d = amax / 127, id = inverse_of(d);
  Byte q[32];
  for (int i = 0; i < 32; ++i) {
    const float t = x[i] * id, size = std::fabs(t), whole = std::floor(size);
    const int steps = static_cast<int>(whole + std::floor(2 * (size - whole)));
    q[i] = static_cast<Byte>((t < 0 ? -steps : steps) + 128);
  }
  pack<Ggml::q8_0>(Head{f32_to_f16(d)}, q, out);
  return is_finite(f16_to_f32(f32_to_f16(d)));
}

// The power of two of the largest value becomes 4, of E2M1's values.
inline bool exact_mxfp4(const float* x, Byte* out) {
  float amax = 0;
  for (int i = 0; i < 32; ++i) amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
  int power = 0;
  if (amax > 0) power = std::ilogb(amax) - 2 + 127;
  const auto e = static_cast<std::uint32_t>(power > 0 ? power : 0);
  const float d = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  Byte q[32];
  for (int i = 0; i < 32; ++i) {
    const float size = std::fabs(x[i]);
    int result = 0;
    for (int k = 0; k < 7; ++k) result += size > d * E2m1::middle(k);
    q[i] = static_cast<Byte>(result + (x[i] < 0 && result > 0 ? 8 : 0));
  }
  pack<Ggml::mxfp4>(Head{static_cast<std::uint16_t>(e)}, q, out);
  return true;
}

constexpr bool is_exact(Ggml type) {
  return type == Ggml::q4_0 || type == Ggml::q4_1 || type == Ggml::q5_0 || type == Ggml::q5_1 || type == Ggml::q8_0 ||
         type == Ggml::mxfp4;
}

// Returns false if f16 cannot represent a scale.
template <Ggml kType>
bool exact(const float* x, Byte* out) {
  if constexpr (kType == Ggml::q4_0) return exact_symmetric<kType, 8>(x, out);
  if constexpr (kType == Ggml::q5_0) return exact_symmetric<kType, 16>(x, out);
  if constexpr (kType == Ggml::q4_1) return exact_affine<kType, 15>(x, out);
  if constexpr (kType == Ggml::q5_1) return exact_affine<kType, 31>(x, out);
  if constexpr (kType == Ggml::q8_0) return exact_q8_0(x, out);
  if constexpr (kType == Ggml::mxfp4) return exact_mxfp4(x, out);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
