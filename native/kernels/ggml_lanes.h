// Groups of weights side by side, for the encoders of ggml's blocks (spec/gguf.md, "Search"): element j of sixteen groups
// lies together, so that a search does the same to all of them and every sum runs over a group in order. How many of the
// sixteen a machine takes at a time changes no bit.
#pragma once
#include <cstring>

#include "kernels/floats.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;
using Floats = float __attribute__((vector_size(kVectorBytes)));

constexpr std::size_t kWidth = kVectorBytes / sizeof(float);
constexpr std::size_t kLanes = 16;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds |x| <= 2^22 to an integer
constexpr float kInfinite = __builtin_inff();

inline Floats load(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof found);
  return found;
}
inline void store(float* to, Floats what) { std::memcpy(to, &what, sizeof what); }
inline Floats all(float what) { return Floats{} + what; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats magnitude(Floats a) { return larger(a, -a); }
inline Floats inverse(Floats a) { return a != 0.0f ? 1.0f / a : Floats{}; }
inline float round_even(float x) { return (x + kRound) - kRound; }
inline float clipped(float x, float low, float high) { return x > low ? x < high ? x : high : low; }

// A number for each group.
struct Lanes {
  alignas(64) float of[kLanes];
  float& operator[](std::size_t lane) { return of[lane]; }
  float operator[](std::size_t lane) const { return of[lane]; }
};

// The integers from kLow to kHigh.
template <int kLow, int kHigh>
struct Integers {
  static Floats nearest(Floats t) {
    t = smaller(larger(t, all(kLow)), all(kHigh));
    return (t + kRound) - kRound;
  }
  static Ints code(Floats t) { return __builtin_convertvector(nearest(t) - static_cast<float>(kLow), Ints); }
};

// Values of IQ4: a rising table, and the middles between its entries.
struct Iq4 {
  static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr float middle(int k) { return (kValues[k] + kValues[k + 1]) * 0.5f; }
  static Floats nearest(Floats t) {
    Floats found = all(kValues[0]);
#pragma GCC unroll 15
    for (int k = 0; k < 15; ++k) found = t > middle(k) ? all(kValues[k + 1]) : found;
    return found;
  }
  static Ints code(Floats t) {
    Ints found{};
#pragma GCC unroll 15
    for (int k = 0; k < 15; ++k) found -= t > middle(k);
    return found;
  }
};

// Twice the values of E2M1. Of two that are equally near the smaller magnitude is taken; zero has no sign.
struct E2m1 {
  static constexpr float kValues[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  static constexpr float middle(int k) { return (kValues[k] + kValues[k + 1]) * 0.5f; }
  static Floats nearest(Floats t) {
    const Floats size = magnitude(t);
    Floats found{};
#pragma GCC unroll 7
    for (int k = 0; k < 7; ++k) found = size > middle(k) ? all(kValues[k + 1]) : found;
    return t < 0.0f ? -found : found;
  }
  static Ints code(Floats t) {
    const Floats size = magnitude(t);
    Ints found{};
#pragma GCC unroll 7
    for (int k = 0; k < 7; ++k) found -= size > middle(k);
    return t < -0.5f ? found + 8 : found;
  }
};

// Sixteen groups of kN weights, and what their errors weigh (1 where nothing was said).
template <std::size_t kN, bool kWeighted>
struct Tile {
  static constexpr std::size_t kCount = kN;
  alignas(64) float x[kN][kLanes];
  alignas(64) float w[kWeighted ? kN : 1][kLanes];

  Floats value(std::size_t j, std::size_t c) const { return load(x[j] + c); }
  Floats weighed(Floats what, std::size_t j, std::size_t c) const {
    if constexpr (kWeighted) return load(w[j] + c) * what;
    return what;
  }
};

// What a scale and an offset leave of each group, and the sums that a better scale and offset are found from. q are the
// values of the levels; error, q, qq and xq are weighted sums.
struct Sums {
  Lanes error, q, qq, xq;
};

template <class Level, class Weights>
void measure(const Weights& tile, const Lanes& scale, const Lanes& offset, Sums& out) {
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    const Floats s = load(scale.of + c), off = load(offset.of + c), id = inverse(s);
    Floats error{}, sum{}, squares{}, products{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c), q = Level::nearest((x - off) * id), wq = tile.weighed(q, j, c);
      const Floats left = (x - off) - s * q;
      error += left * tile.weighed(left, j, c);
      sum += wq;
      squares += q * wq;
      products += x * wq;
    }
    store(out.error.of + c, error);
    store(out.q.of + c, sum);
    store(out.qq.of + c, squares);
    store(out.xq.of + c, products);
  }
}

// Codes, one group after the other.
template <class Level, class Weights>
void codes_of(const Weights& tile, const Lanes& scale, const Lanes& offset, Byte* __restrict out) {
  constexpr std::size_t count = Weights::kCount;
  alignas(64) std::int32_t codes[count][kLanes];
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    const Floats off = load(offset.of + c), id = inverse(load(scale.of + c));
    for (std::size_t j = 0; j < count; ++j) {
      const Ints found = Level::code((tile.value(j, c) - off) * id);
      std::memcpy(codes[j] + c, &found, sizeof found);
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    for (std::size_t j = 0; j < count; ++j) out[lane * count + j] = static_cast<Byte>(codes[j][lane]);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
