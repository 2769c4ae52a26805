// Fills a unit of the weights, in the order in which `multiply` uses it, from codes of the affine family or from rows
// decoded by another codec.
#pragma once
#include "kernels/affine_gemm_unpack.h"

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512BW__)
// Pairs columns 0 to 3: 2 and 0, then 3 and 1, as the halves of words.
inline Words turn_pairs(const Words& columns) {
  const __m512i order = _mm512_set4_epi32(0x0b0a0f0e, 0x09080d0c, 0x03020706, 0x01000504);
  return std::bit_cast<Words>(_mm512_shuffle_epi8(std::bit_cast<__m512i>(columns), order));
}
#endif

// Transposes `words` words (a multiple of a vector's) of as many rows as a vector has lanes, `stride` apart.
inline void arrange(const float* rows, std::size_t stride, std::size_t words, [[maybe_unused]] bool pairs, float* out) {
  for (std::size_t w = 0; w < words; w += kWidth) {
    Words result[kWidth];
    for (std::size_t i = 0; i < kWidth; ++i) {
      result[i] = std::bit_cast<Words>(load_floats(rows + i * stride + w));
#if defined(__AVX512BW__)
      if (pairs) result[i] = turn_pairs(result[i]);
#endif
    }
    transpose(result);
    for (std::size_t k = 0; k < kWidth; ++k) store_floats(out + (w + k) * kUnit, std::bit_cast<Floats>(result[k]));
  }
}

// Fills blocks `b` to `last` of the unit that begins at `row`: they are decoded in stored order, then rearranged. Past
// the last row and column they are 0.
inline void fill_decoded(const GemmJob& job, std::size_t row, std::size_t b, std::size_t last, GemmScratch& s) {
  const bool narrow = job.mode >= GemmMode::tiles;  // bf16: two values per word
  const std::size_t first = b * kGemmBlock, all = (last - b) * kGemmBlock;
  const std::size_t cols = job.layout.cols - first < all ? job.layout.cols - first : all;
  const std::size_t rows = job.layout.rows - row < kUnit ? job.layout.rows - row : kUnit,
                    words = narrow ? all / 2 : all;
  if (cols < all || rows < kUnit) std::memset(s.decoded, 0, kUnit * words * 4);
  const auto decode = [&](void* out) {
    job.source->decode(job.source->matrix, {row, rows, first, cols, out, all, job.type});
  };
  if (narrow || job.type == Dtype::f32) {
    decode(s.decoded);
  } else {
    static_assert(sizeof s.parts >= kUnit * kTileCols * 2);
    decode(s.parts);
    for (std::size_t i = 0; i < rows; ++i) load_floats_of(s.parts, job.type, i * all, cols, s.decoded + i * all);
  }
  for (std::size_t v = 0; v < 2; ++v)
    arrange(s.decoded + v * kWidth * words, words, words, job.mode == GemmMode::dots, s.values + v * kWidth);
}

inline void fill_unit(const GemmJob& job, std::size_t row, std::size_t b, std::size_t last, GemmScratch& s) {
  if (job.source) fill_decoded(job, row, b, last, s);
  else unpack_of(job.layout)(job, row, b, last, s.values);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
