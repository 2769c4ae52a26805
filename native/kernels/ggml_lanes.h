// Groups of weights in parallel, for the encoders of ggml's blocks (spec/gguf.md, "Search"): element j of sixteen
// groups is contiguous, so that a search processes all of them alike, and every sum runs over a group in order. The
// number of groups that a machine processes at a time does not change the result.
#pragma once
#include "kernels/float_vectors.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;
constexpr std::size_t kLanes = 16;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds |x| <= 2^22 to an integer
constexpr float kInfinite = __builtin_inff();

inline Floats inverse(Floats a) { return a != 0.0f ? 1.0f / a : Floats{}; }
inline float round_even(float x) { return (x + kRound) - kRound; }
inline float clipped(float x, float low, float high) { return x > low ? x < high ? x : high : low; }

// A number for each group.
struct Lanes {
  alignas(64) float values[kLanes];
  float& operator[](std::size_t lane) { return values[lane]; }
  float operator[](std::size_t lane) const { return values[lane]; }
};

// The range of levels to which values are limited. A search that knows the range of the values omits limits that would
// change nothing.
enum class Ends { both, near, high, none };

// The integers from kLow to kHigh.
template <int kLow, int kHigh>
struct Integers {
  static constexpr float kPast = kHigh + 0.5f;  // values that round to more than kHigh

  template <Ends kEnds = Ends::both>
  static Floats nearest(Floats t) {
    if constexpr (kEnds == Ends::both || kEnds == Ends::near) t = larger(t, all(kLow));
    if constexpr (kEnds != Ends::none) t = smaller(t, all(kHigh));
    return (t + kRound) - kRound;
  }
  // The nearest level, and the residual.
  template <Ends kEnds>
  static Floats nearest(Floats t, Floats& remaining) {
#if defined(__AVX512DQ__)
    if constexpr (kEnds == Ends::none) {
      remaining = _mm512_maskz_reduce_ps(0xffff, t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      return t - remaining;
    }
#endif
    const Floats q = nearest<kEnds>(t);
    remaining = t - q;
    return q;
  }
  // For values of magnitudes up to `most`.
  static Ends ends(Floats amax) {
    static_assert(kLow == 0 || kLow == -kHigh - 1);
    return all_below(amax, kPast) ? Ends::none : all_below(amax, 0.5f - kLow) ? Ends::high : Ends::both;
  }
  // For values from `low` to `high`, levels from 0 on.
  static Ends ends(Floats low, Floats high) {
    static_assert(kLow == 0);
    if (!all_below(high, kHigh + 1)) return Ends::both;
    return all_below(-low, 0.5f) && all_below(high, kPast) ? Ends::none : Ends::near;
  }
  // Returns whether the residual times its level is exact in f32. In units of t's last bit it must stay below 2^24. If
  // 2^e <= |t|, that bit is 2^(e - 23). The residual is at most 1/2, or (|t| - kHigh) < 1 + 1/2 for a t that is limited
  // to kHigh.
  static constexpr bool exact(Ends ends) { return ends != Ends::both; }
  static Ints code(Floats t) { return __builtin_convertvector(nearest(t) - static_cast<float>(kLow), Ints); }
};

// Values of IQ4: an ascending table, and the midpoints between its entries.
struct Iq4 {
  static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr float middle(int k) { return (kValues[k] + kValues[k + 1]) * 0.5f; }
  static Floats nearest(Floats t) {
    Floats result = all(kValues[0]);
#pragma GCC unroll 15
    for (int k = 0; k < 15; ++k) result = t > middle(k) ? all(kValues[k + 1]) : result;
    return result;
  }
  template <Ends>
  static Floats nearest(Floats t, Floats& remaining) {
    const Floats q = nearest(t);
    remaining = t - q;
    return q;
  }
  static Ends ends(Floats) { return Ends::both; }
  static constexpr bool exact(Ends) { return false; }
  static Ints code(Floats t) {
    Ints result{};
#pragma GCC unroll 15
    for (int k = 0; k < 15; ++k) result -= t > middle(k);
    return result;
  }
};

// Twice the values of E2M1. Ties go to the smaller magnitude; zero has no sign.
struct E2m1 {
  static constexpr float kValues[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  static constexpr float middle(int k) { return (kValues[k] + kValues[k + 1]) * 0.5f; }
  static Floats nearest(Floats t) {
    const Floats size = magnitude(t);
    Floats result{};
#pragma GCC unroll 7
    for (int k = 0; k < 7; ++k) result = size > middle(k) ? all(kValues[k + 1]) : result;
    return t < 0.0f ? -result : result;
  }
  static Ints code(Floats t) {
    const Floats size = magnitude(t);
    Ints result{};
#pragma GCC unroll 7
    for (int k = 0; k < 7; ++k) result -= size > middle(k);
    return t < -0.5f ? result + 8 : result;
  }
};

// Transposes rows of sixteen groups, of kN words each, so that the words j of all groups are contiguous. `row(lane)` is
// the start of a row.
template <std::size_t kN, class Row>
void turn(const Row& row, float (*__restrict out)[kLanes]) {
  using Four = float __attribute__((vector_size(16)));
  for (std::size_t lane = 0; lane < kLanes; lane += 4) {
    const float* from[4] = {row(lane), row(lane + 1), row(lane + 2), row(lane + 3)};
    for (std::size_t j = 0; j < kN; j += 4) {
      Four a[4];
      for (int k = 0; k < 4; ++k) std::memcpy(&a[k], from[k] + j, sizeof a[k]);
      const Four low0 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5), high0 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
      const Four low1 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5), high1 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
      const Four turned[4] = {
          __builtin_shufflevector(low0, low1, 0, 1, 4, 5), __builtin_shufflevector(low0, low1, 2, 3, 6, 7),
          __builtin_shufflevector(high0, high1, 0, 1, 4, 5), __builtin_shufflevector(high0, high1, 2, 3, 6, 7)};
      for (std::size_t k = 0; k < 4; ++k) std::memcpy(out[j + k] + lane, &turned[k], sizeof turned[k]);
    }
  }
}

// Sixteen groups of kN weights, and the weights of their errors (1 without importance).
template <std::size_t kN, bool kWeighted>
struct Tile {
  static constexpr std::size_t kCount = kN;
  static constexpr bool kWhole = !kWeighted;  // products of levels are integers
  alignas(64) float x[kN][kLanes];
  alignas(64) float w[kWeighted ? kN : 1][kLanes];

  Floats value(std::size_t j, std::size_t c) const { return load_floats(x[j] + c); }
  Floats weighed(Floats values, std::size_t j, std::size_t c) const {
    if constexpr (kWeighted) return load_floats(w[j] + c) * values;
    return values;
  }
};

// The error of a scale and an offset in each group, and the sums from which a better scale and offset are computed. q
// are the values of the levels; error, q, qq and xq are weighted sums.
struct Sums {
  Lanes error, q, qq, xq;
};

template <class Level, class Weights>
void measure(const Weights& tile, const Lanes& scale, const Lanes& offset, Sums& out) {
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    const Floats s = load_floats(scale.values + c), off = load_floats(offset.values + c), id = inverse(s);
    Floats error{}, sum{}, squares{}, products{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c), q = Level::nearest((x - off) * id), wq = tile.weighed(q, j, c);
      const Floats residual = (x - off) - s * q;
      error += residual * tile.weighed(residual, j, c);
      sum += wq;
      squares = plus_product<Weights::kWhole>(squares, q, wq);
      products += x * wq;
    }
    store_floats(out.error.values + c, error);
    store_floats(out.q.values + c, sum);
    store_floats(out.qq.values + c, squares);
    store_floats(out.xq.values + c, products);
  }
}

// Codes, one group after the other. Four neighbours of each group make a word, and the words are transposed.
template <class Level, class Weights>
void codes_of(const Weights& tile, const Lanes& scale, const Lanes& offset, Byte* __restrict out) {
  constexpr std::size_t count = Weights::kCount / 4;
  alignas(64) std::int32_t words[count][kLanes];
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    const Floats off = load_floats(offset.values + c), id = inverse(load_floats(scale.values + c));
    for (std::size_t j = 0; j < count; ++j) {
      Ints word{};
#pragma GCC unroll 4
      for (std::size_t k = 0; k < 4; ++k) word |= Level::code((tile.value(4 * j + k, c) - off) * id) << (8 * static_cast<int>(k));
      std::memcpy(words[j] + c, &word, sizeof word);
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    for (std::size_t j = 0; j < count; ++j) std::memcpy(out + 4 * (lane * count + j), &words[j][lane], 4);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
