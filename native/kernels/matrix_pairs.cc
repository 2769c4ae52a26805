// Products of matrices in pairs of bf16 with sums in f32, for the descent of rounding: a gradient needs no more digits.
// Elements below 2^-50 of the matrix's unit become 0, so that no product and no sum is subnormal; then processors with
// AVX512_BF16, which flush subnormal numbers, return the bits that all others do.
#include "kernels/gcc_headers.h"
#include "kernels/matrix.h"

#include <bit>
#include <cmath>

#include "core/isa.h"
#include "core/matrix_pairs.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kPairs = kDepth / 2;  // of one sum
constexpr float kSmallest = 0x1p-50f;

inline std::uint32_t bits_of(float value, float factor) {
  const float scaled = value * factor;
  const auto word = std::bit_cast<std::uint32_t>(std::fabs(scaled) < kSmallest ? 0.0f : scaled);
  return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}

inline void pair_rows(const float* __restrict row, const float* __restrict next, std::size_t count, float factor,
                      std::uint32_t* __restrict out) {
  for (std::size_t j = 0; j < count; ++j) out[j] = bits_of(row[j], factor) | bits_of(next[j], factor) << 16;
}

// Returns the halves of a word as f32, the upper one first: the order in which they are added.
inline float upper(std::uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); }
inline float lower(std::uint32_t word) { return std::bit_cast<float>(word << 16); }

// Rows of the left matrix, and where the products go.
struct Strip {
  const std::uint32_t* a;  // words, kPairs apart
  std::size_t rows, pairs;
  float* out;
  std::size_t stride, cols;
  float factor;
};

#if defined(__AVX512F__)
template <std::size_t kRows>
__attribute__((target("avx512bf16"))) void pair_tile(const std::uint32_t* __restrict a, std::size_t pairs,
                                                     const std::uint32_t* __restrict panel, float* __restrict out,
                                                     std::size_t stride, std::size_t cols, float factor) {
  __m512 sums[kRows][4];
#pragma GCC unroll 6
  for (std::size_t row = 0; row < kRows; ++row)
    for (std::size_t v = 0; v < 4; ++v) sums[row][v] = _mm512_setzero_ps();
  for (std::size_t k = 0; k < pairs; ++k) {
    __m512bh b[4];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < 4; ++v)
      b[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + k * kPanel + v * 16));
#pragma GCC unroll 6
    for (std::size_t row = 0; row < kRows; ++row) {
      const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[row * kPairs + k])));
#pragma GCC unroll 4
      for (std::size_t v = 0; v < 4; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], pair, b[v]);
    }
  }
#pragma GCC unroll 6
  for (std::size_t row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (std::size_t v = 0; v < 4; ++v) {
      if (cols <= v * 16) continue;
      const auto mask = static_cast<__mmask16>(cols >= v * 16 + 16 ? 0xffff : (1u << (cols - v * 16)) - 1);
      float* to = out + row * stride + v * 16;
      const __m512 now = _mm512_maskz_loadu_ps(mask, to);
      _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(now, _mm512_mul_ps(_mm512_set1_ps(factor), sums[row][v])));
    }
}

void strip_by_dots(const Strip& strip, const std::uint32_t* panel) {
  std::size_t row = 0;
  const auto run = [&](auto tile, std::size_t count) {
    tile(strip.a + row * kPairs, strip.pairs, panel, strip.out + row * strip.stride, strip.stride, strip.cols,
         strip.factor);
    row += count;
  };
  while (row + kTileRows <= strip.rows) run(&pair_tile<kTileRows>, kTileRows);
  while (row + 2 <= strip.rows) run(&pair_tile<2>, 2);
  while (row < strip.rows) run(&pair_tile<1>, 1);
}
#endif

// The same with f32 products of the halves, which are exact.
void strip_by_halves(const Strip& strip, const std::uint32_t* panel, float* halves) {
  constexpr std::size_t wide = Lanes<float>::tile;
  alignas(64) float part[kDepth * wide];
  const std::size_t depth = 2 * strip.pairs;
  for (std::size_t row = 0; row < strip.rows; ++row)
    for (std::size_t k = 0; k < strip.pairs; ++k) {
      halves[row * depth + 2 * k] = upper(strip.a[row * kPairs + k]);
      halves[row * depth + 2 * k + 1] = lower(strip.a[row * kPairs + k]);
    }
  for (std::size_t col = 0; col < strip.cols; col += wide) {
    for (std::size_t k = 0; k < strip.pairs; ++k)
      for (std::size_t j = 0; j < wide; ++j) {
        const std::uint32_t word = panel[k * kPanel + col + j];
        part[2 * k * wide + j] = upper(word);
        part[(2 * k + 1) * wide + j] = lower(word);
      }
    const std::size_t batch = std::min(wide, strip.cols - col);
    std::size_t row = 0;
    for (; row + kTileRows <= strip.rows; row += kTileRows)
      tile<float, kTileRows>(halves + row * depth, depth, depth, part, strip.out + row * strip.stride + col,
                             strip.stride, batch, strip.factor);
    for (; row < strip.rows; ++row)
      tile<float, 1>(halves + row * depth, depth, depth, part, strip.out + row * strip.stride + col, strip.stride,
                     batch, strip.factor);
  }
}

}  // namespace

void pairs_pack(const float* rows, std::size_t stride, std::size_t first, std::size_t count, float factor,
                const PairedMatrix& to) {
  const std::size_t height = (to.depth + 1) / 2;
  const std::vector<float> none(kPanel, 0.0f);
  for (std::size_t row = 0; row < count;) {
    const std::size_t k = (first + row) / 2;
    const bool alone = (first + row) % 2 != 0 || (row + 1 == count && first + count < to.depth);
    const float* even = rows + row * stride;
    const bool last = !alone && row + 1 == count;
    for (std::size_t col = 0; col < to.cols; col += kPanel) {
      const std::size_t batch = std::min(kPanel, to.cols - col);
      std::uint32_t* words = to.words + (col / kPanel * height + k) * kPanel;
      if (!alone) {
        pair_rows(even + col, last ? none.data() : even + stride + col, batch, factor, words);
        continue;
      }
      const bool high = (first + row) % 2 != 0;
      for (std::size_t j = 0; j < batch; ++j)
        words[j] = high ? (words[j] & 0xffffu) | bits_of(even[col + j], factor) << 16
                        : (words[j] & 0xffff0000u) | bits_of(even[col + j], factor);
    }
    row += alone ? 1 : 2;
  }
}

// out += a[:, :depth] * b[first:first + depth], times `1 / factor`; `first` is even.
void pairs_multiply_add(const float* a, std::size_t a_stride, const PairedMatrix& b, std::size_t first, std::size_t depth,
                        float factor, float unit, float* out, std::size_t out_stride, std::size_t rows) {
  const std::size_t height = (b.depth + 1) / 2;
  std::vector<std::uint32_t> words(std::min(rows, kTogetherRows) * kPairs);
#if defined(__AVX512F__)
  const bool dots = has_pair_dots(current_isa());
#else
  constexpr bool dots = false;
#endif
  std::vector<float> halves(dots ? 0 : std::min(rows, kTogetherRows) * kDepth);
  for (std::size_t k = 0; k < depth; k += kDepth) {
    const std::size_t deep = std::min(kDepth, depth - k), pairs = (deep + 1) / 2;
    for (std::size_t above = 0; above < rows; above += kTogetherRows) {
      const std::size_t count = std::min(kTogetherRows, rows - above);
      for (std::size_t row = 0; row < count; ++row) {
        const float* from = a + (above + row) * a_stride + k;
        for (std::size_t p = 0; p < pairs; ++p) {
          const float second = 2 * p + 1 < deep ? from[2 * p + 1] : 0.0f;
          words[row * kPairs + p] = bits_of(from[2 * p], factor) | bits_of(second, factor) << 16;
        }
      }
      for (std::size_t col = 0; col < b.cols; col += kPanel) {
        const std::uint32_t* panel = b.words + (col / kPanel * height + (first + k) / 2) * kPanel;
        const Strip strip{words.data(), count, pairs, out + above * out_stride + col, out_stride,
                          std::min(kPanel, b.cols - col), unit};
#if defined(__AVX512F__)
        if (dots) {
          strip_by_dots(strip, panel);
          continue;
        }
#endif
        strip_by_halves(strip, panel, halves.data());
      }
    }
  }
}

}  // namespace ingot::INGOT_ISA
