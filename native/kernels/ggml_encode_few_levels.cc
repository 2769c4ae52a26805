// Encodes weights to ggml's blocks of two to four levels and one scale: Q1_0, Q2_0, TQ1_0 and TQ2_0 (spec/gguf.md, "Few
// levels").
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/ggml_block_loop.h"
#include "kernels/ggml_pack.h"

namespace ingot::INGOT_ISA {
namespace {

template <std::size_t kCount>
float largest_magnitude(const float* x) {
  float result = 0;
  for (std::size_t i = 0; i < kCount; ++i) result = std::max(result, std::fabs(x[i]));
  return result;
}

// Returns the scale of the levels -1, 0 and 1 with the least weighted squared error. For a scale, magnitudes above half
// of it get the level 1 or -1; these are the largest magnitudes up to a certain rank. The best scale for a rank is
// their weighted mean. The best rank is that which reduces the sum of squares most.
template <std::size_t kCount>
float ternary_scale(const float* x, const float* weights) {
  std::uint16_t order[kCount];
  std::iota(order, order + kCount, std::uint16_t{0});
  std::sort(order, order + kCount, [x](std::uint16_t a, std::uint16_t b) {
    const float first = std::fabs(x[a]), second = std::fabs(x[b]);
    return first > second || (first == second && a < b);
  });
  const float near = largest_magnitude<kCount>(x);
  if (!(near > 0)) return 0;
  double sum = 0, weight = 0, best = -1, scale = 0;
  for (const std::uint16_t index : order) {
    const double size = std::fabs(x[index]) / near;
    sum += weights[index] * size;
    weight += weights[index];
    if (!(weight > 0)) continue;
    const double removed = sum * sum / weight;
    if (removed > best) {
      best = removed;
      scale = sum / weight;
    }
  }
  return static_cast<float>(scale) * near;
}

template <std::size_t kCount>
bool ternary(const float* x, const float* weights, std::uint16_t& d, Byte* codes) {
  d = f32_to_f16(ternary_scale<kCount>(x, weights));
  const float scale = f16_to_f32(d), half = scale * 0.5f;
  for (std::size_t i = 0; i < kCount; ++i) codes[i] = static_cast<Byte>(1 + (x[i] > half) - (x[i] < -half));
  return is_finite(scale);
}

// Returns the byte whose fraction byte / 256 begins with these five digits of base 3.
inline Byte fraction(int digits) { return static_cast<Byte>((digits * 256 + 242) / 243); }

// Bytes of a run hold their first digits one after the other, then their second digits, and so on.
inline void pack_thirds(const Byte* codes, int run, int count, Byte* out) {
  for (int j = 0; j < run; ++j) {
    int digits = 0;
    for (int n = 0; n < 5; ++n) digits = digits * 3 + (n < count ? codes[n * run + j] : 0);
    out[j] = fraction(digits);
  }
}

bool encode_tq1_0(const float* x, const float* weights, Byte* out) {
  Byte codes[256];
  std::uint16_t d;
  if (!ternary<256>(x, weights, d, codes)) return false;
  pack_thirds(codes, 32, 5, out);
  pack_thirds(codes + 160, 16, 5, out + 32);
  pack_thirds(codes + 240, 4, 4, out + 48);
  put(out + 52, d, 2);
  return true;
}

bool encode_tq2_0(const float* x, const float* weights, Byte* out) {
  Byte codes[256];
  std::uint16_t d;
  if (!ternary<256>(x, weights, d, codes)) return false;
  pack_twos<0>(codes, out);
  put(out + 64, d, 2);
  return true;
}

// Signs times the weighted mean of the magnitudes.
bool encode_q1_0(const float* x, const float* weights, Byte* out) {
  const float near = largest_magnitude<128>(x);
  double sum = 0, weight = 0;
  for (std::size_t i = 0; i < 128 && near > 0; ++i) {
    sum += weights[i] * (static_cast<double>(std::fabs(x[i])) / near);
    weight += weights[i];
  }
  const std::uint16_t d = f32_to_f16(weight > 0 ? static_cast<float>(sum / weight) * near : 0);
  put(out, d, 2);
  for (std::size_t k = 0; k < 16; ++k) {
    unsigned byte = 0;
    for (std::size_t i = 0; i < 8; ++i) byte |= static_cast<unsigned>(x[8 * k + i] >= 0) << i;
    out[2 + k] = static_cast<Byte>(byte);
  }
  return is_finite(f16_to_f32(d));
}

// Codes of levels -1 to 2 for a scale of either sign; returns the weighted error, and the best scale for these codes.
double try_q2_0(const float* x, const float* weights, float scale, Byte* codes, double& better) {
  const float inverse = scale != 0 ? 1 / scale : 0;
  double error = 0, xq = 0, qq = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    const float q = round_even(clipped(x[i] * inverse, -1, 2));
    const double residual = static_cast<double>(x[i]) - static_cast<double>(scale) * q;
    codes[i] = static_cast<Byte>(static_cast<int>(q) + 1);
    error += weights[i] * residual * residual;
    xq += static_cast<double>(weights[i]) * x[i] * q;
    qq += static_cast<double>(weights[i]) * q * q;
  }
  better = qq > 0 ? xq / qq : 0;
  return error;
}

bool encode_q2_0(const float* x, const float* weights, Byte* out) {
  const float near = largest_magnitude<64>(x);
  double best = __builtin_inf(), better = 0;
  std::uint16_t d = 0;
  Byte codes[64]{}, tried[64];
  if (!is_finite(f16_to_f32(f32_to_f16(near / 2.8f)))) return false;
  for (const float start : {2.8f, 2.5f, 2.25f, 2.0f, 1.75f, 1.5f, 1.25f, 1.0f})
    for (const float sign : {1.0f, -1.0f}) {
      double scale = sign * near / start;
      for (int round = 0; round < 3; ++round) {
        const std::uint16_t bits = f32_to_f16(static_cast<float>(scale));
        if (!is_finite(f16_to_f32(bits))) break;
        const double error = try_q2_0(x, weights, f16_to_f32(bits), tried, better);
        if (error < best) {
          best = error;
          d = bits;
          std::copy_n(tried, 64, codes);
        }
        scale = better;
      }
    }
  put(out, d, 2);
  for (std::size_t k = 0; k < 16; ++k)
    out[2 + k] = static_cast<Byte>(codes[4 * k] | codes[4 * k + 1] << 2 | codes[4 * k + 2] << 4 | codes[4 * k + 3] << 6);
  return true;
}

}  // namespace

GgmlStatus ggml_encode_few_levels(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  switch (type) {
    case Ggml::q1_0:
      return for_blocks<Ggml::q1_0>(from, out, encode_q1_0);
    case Ggml::q2_0:
      return for_blocks<Ggml::q2_0>(from, out, encode_q2_0);
    case Ggml::tq1_0:
      return for_blocks<Ggml::tq1_0>(from, out, encode_tq1_0);
    case Ggml::tq2_0:
      return for_blocks<Ggml::tq2_0>(from, out, encode_tq2_0);
    default:
      return {GgmlStatus::no_encoder, 0};
  }
}

}  // namespace ingot::INGOT_ISA
