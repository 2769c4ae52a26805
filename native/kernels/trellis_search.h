// Finds the stream of least squared error through a trellis (Viterbi, IEEE Trans. Inf. Theory 13, 1967), from the last
// row to the first: a row's window is the next row's, shifted by one symbol, with the row's symbol in its low bits.
// Among paths of equal cost, the one with the lower number wins, so that results are the same for any width of vectors.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/trellis.h"
#include "kernels/vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

using Costs = float __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kCosts = kVectorBytes / sizeof(float);
using Bytes = std::uint8_t __attribute__((vector_size(kCosts)));

inline Costs load_costs(const float* from) {
  Costs result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// Repeats each of the first entries once per possible symbol.
template <int kBits>
inline Costs repeated(const float* from) {
#if defined(__AVX512F__)
  const __m512i indices =
      _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), kBits);
  return reinterpret_cast<Costs>(_mm512_permutexvar_ps(indices, _mm512_loadu_ps(from)));
#elif defined(__AVX2__)
  const __m256i indices = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), kBits);
  return reinterpret_cast<Costs>(_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), indices));
#else
  return Costs{} + *from;  // four lanes, and at least four symbols
#endif
}

constexpr int kAny = -1;

template <int kBits>
class Search {
 public:
  static constexpr std::size_t kSymbols = std::size_t{1} << kBits;
  static constexpr std::size_t kPlane = kTrellisStates / kSymbols;  // number of windows without one symbol
  static constexpr std::size_t kSpan = kTrellisBits / kBits;        // number of symbols of a window
  static constexpr std::size_t kBrief = 12;                         // windows of a stream that counts as short
  static constexpr std::size_t kTried = 14;                         // bits of a stream short enough to try all

  explicit Search(const float* values) : values_(values) {}

  // Finds the windows of a complete cyclic stream. Its beginning comes from a search that starts half-way; for short
  // streams, one round before, and these are searched again from other rows.
  void search_all(const float* targets, const float* weights, std::size_t rows, std::uint16_t* windows) {
    if (rows * kBits <= kTried) return all(targets, weights, rows, windows);
    const std::size_t half = rows / 2;
    const bool brief = rows < kBrief * kSpan;
    turned(targets, weights, rows, half, brief ? 3 * rows : rows);
    run(kAny);
    trace(kAny);
    windows[rows - 1] = path_[(brief ? rows : 0) + rows - half - 1];
    again(targets, weights, rows, 0, windows);
    for (std::size_t turn = 1; brief && turn < kSpan; ++turn) again(targets, weights, rows, turn * rows / kSpan, windows);
  }

  // Finds the last row's window, by a search of the rows around it and around the first one.
  void last_window(const float* targets, const float* weights, std::size_t rows, std::uint16_t* windows) {
    const std::size_t near = kBrief * kSpan;
    if (rows <= 2 * near) return search_all(targets, weights, rows, windows);
    turned(targets, weights, rows, rows - near, 2 * near);
    run(kAny);
    trace(kAny);
    windows[rows - 1] = path_[near - 1];
  }

  // Finds the windows with fixed bits between row `turn` - 1 and row `turn`: their cost never increases.
  void again(const float* targets, const float* weights, std::size_t rows, std::size_t turn, std::uint16_t* windows) {
    if (rows * kBits <= kTried) return all(targets, weights, rows, windows);
    const int between = windows[(turn + rows - 1) % rows] >> kBits;
    turned(targets, weights, rows, turn, rows);
    run(between);
    trace(between);
    for (std::size_t i = 0; i < rows; ++i) windows[(turn + i) % rows] = path_[i];
  }

  // A path with free ends: approximately the errors of a complete search.
  void open(const float* targets, const float* weights, std::size_t rows, std::uint16_t* windows) {
    turned(targets, weights, rows, 0, rows);
    run(kAny);
    trace(kAny);
    std::copy_n(path_.data(), rows, windows);
  }

 protected:
  // Rotates `rows` rows by `by`, cyclically.
  void turned(const float* targets, const float* weights, std::size_t rows, std::size_t by, std::size_t count) {
    targets_.resize(count);
    weights_.resize(count);
    path_.resize(count);
    back_.resize(count * kPlane);
    for (std::size_t i = 0; i < count; ++i) {
      targets_[i] = targets[(i + by) % rows];
      weights_[i] = weights[(i + by) % rows];
    }
  }

  void run(int after) {
    start(after);
    for (std::size_t i = targets_.size(); i-- > 0;) step(targets_[i], weights_[i], back_.data() + i * kPlane);
  }

  // `after` are the low bits of the window after the last row.
  void start(int after) {
    std::fill_n(cost_, kTrellisStates, after == kAny ? 0.0f : std::numeric_limits<float>::infinity());
    if (after != kAny)
      for (std::size_t k = 0; k < kSymbols; ++k) cost_[k * kPlane + static_cast<std::size_t>(after)] = 0;
  }

  // The best next window, for each window that may precede it.
  void choose(std::uint8_t* __restrict back) {
    for (std::size_t u = 0; u < kPlane; u += kCosts) {
      Costs best = load_costs(cost_ + u);
      Ints from = {};
      for (std::size_t k = 1; k < kSymbols; ++k) {
        const Costs other = load_costs(cost_ + k * kPlane + u);
        const auto less = other < best;
        best = less ? other : best;
        from = less ? Ints{} + static_cast<std::int32_t>(k) : from;
      }
      std::memcpy(smallest_ + u, &best, sizeof best);
      const Bytes narrow = __builtin_convertvector(from, Bytes);
      std::memcpy(back + u, &narrow, sizeof narrow);
    }
  }

  void step(float target, float weight, std::uint8_t* __restrict back) {
    choose(back);
    for (std::size_t s = 0; s < kTrellisStates; s += kCosts) {
      const Costs away = target - load_costs(values_ + s);
      const Costs sum = repeated<kBits>(smallest_ + (s >> kBits)) + weight * (away * away);
      std::memcpy(cost_ + s, &sum, sizeof sum);
    }
  }

  // `low` are the low bits of the first window.
  void trace(int low) { trace(low, targets_.size()); }

  void trace(int low, std::size_t rows) {
    std::size_t window = low == kAny ? 0 : static_cast<std::size_t>(low);
    for (std::size_t s = window; s < kTrellisStates; s += low == kAny ? 1 : kPlane)
      if (cost_[s] < cost_[window]) window = s;
    for (std::size_t i = 0; i < rows; ++i) {
      path_[i] = static_cast<std::uint16_t>(window);
      const std::size_t shared = window >> kBits;
      window = back_[i * kPlane + shared] * kPlane + shared;
    }
  }

  // Streams of about one window: all are tried.
  void all(const float* targets, const float* weights, std::size_t rows, std::uint16_t* windows) const {
    const std::size_t total = rows * kBits;
    float smallest = std::numeric_limits<float>::infinity();
    for (std::uint32_t stream = 0; stream < std::uint32_t{1} << total; ++stream) {
      std::uint64_t round = 0;
      for (std::size_t have = 0; have < total + kTrellisBits; have += total) round |= std::uint64_t{stream} << have;
      float error = 0;
      for (std::size_t i = 0; i < rows; ++i) {
        const float away = targets[i] - values_[round >> i * kBits & (kTrellisStates - 1)];
        error += weights[i] * (away * away);
      }
      if (!(error < smallest) && stream > 0) continue;
      smallest = error;
      for (std::size_t i = 0; i < rows; ++i)
        windows[i] = static_cast<std::uint16_t>(round >> i * kBits & (kTrellisStates - 1));
    }
  }

  alignas(64) float cost_[kTrellisStates];
  alignas(64) float smallest_[kPlane + 16] = {};  // read past the end, for unused entries
  const float* values_;
  std::vector<float> targets_, weights_;
  std::vector<std::uint16_t> path_;
  std::vector<std::uint8_t> back_;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
