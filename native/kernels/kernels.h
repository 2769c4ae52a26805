// Declarations of all kernels, once per instruction set: ingot::baseline::…, ingot::v3::…, ingot::v4::….
// Callers go through core/dispatch.h. Sizes and alignment are checked before the call (bind/).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/affine.h"
#include "core/affine_zeros.h"
#include "core/delta.h"
#include "core/dtype.h"
#include "core/entropy.h"
#include "core/ggml.h"
#include "core/palette.h"
#include "core/records.h"
#include "core/rounding.h"
#include "core/scaled.h"
#include "core/stats.h"
#include "core/symbols.h"
#include "core/tca_tbe.h"
#include "core/trellis.h"
#include "core/wdelta.h"
#include "core/words.h"

#define INGOT_DECLARE_KERNELS(isa)                                                                                    \
  namespace ingot::isa {                                                                                              \
  void affine_dequantize(const AffineLayout& layout, const std::uint8_t* packed, const void* scales,                  \
                         const void* zeros, Dtype scale_type, void* out, Dtype type);                                 \
  AffineStatus affine_quantize(const AffineLayout& layout, const AffineChoice& choice, const void* in, Dtype type,    \
                               std::uint8_t* packed, void* scales, void* zeros);                                      \
  AffineRange affine_range(const void* in, Dtype type, std::size_t n);                                                \
  void affine_candidates(float low, float high, int bits, const AffineChoice& choice, float* scales, float* zeros);   \
  void affine_errors(const AffineLayout& layout, const AffineChoice& choice, const void* in, Dtype type,              \
                     const float* scales, const float* zeros, int count, double* totals);                             \
  bool affine_offsets(const Numbers& scales, const Numbers& points, std::size_t n, void* out);                        \
  bool affine_points(const Numbers& scales, const Numbers& offsets, std::size_t n, float low, float high, void* out); \
  bool affine_shift(const Numbers& points, std::size_t n, double delta, void* out, Dtype type);                       \
  bool affine_equal(const Numbers& numbers, std::size_t n, float target);                                             \
  bool affine_integers(const Numbers& numbers, std::size_t n, float low, float high, std::uint8_t* out);              \
  void affine_numbers(const std::uint8_t* integers, bool is_signed, std::size_t n, void* out, Dtype type);            \
  bool affine_same(const Numbers& numbers, std::size_t n, void* out, Dtype type);                                     \
  void cast(const void* in, Dtype from, std::size_t n, void* out, Dtype to);                                          \
  std::size_t delta_encode(const void* base, const void* tuned, const DeltaShape& shape, std::uint8_t* out,           \
                           std::uint32_t* sizes, std::uint8_t* scratch);                                              \
  EntropyStatus delta_apply(const std::uint8_t* data, std::size_t size, const std::uint32_t* sizes,                   \
                            const DeltaShape& shape, const void* base, void* out, std::uint8_t* scratch,              \
                            std::size_t* bad);                                                                        \
  std::size_t entropy_encode(const void* in, const EntropyShape& shape, EntropyChoice how, std::uint8_t* out,         \
                             std::uint32_t* sizes, std::uint8_t* scratch);                                            \
  EntropyStatus entropy_decode(const std::uint8_t* data, std::size_t size, const std::uint32_t* sizes,                \
                               const EntropyShape& shape, void* out, std::uint8_t* scratch, std::size_t* bad);        \
  bool ggml_decode(Ggml type, const std::uint8_t* in, std::size_t count, const std::int8_t* grid,                     \
                   const GgmlTarget& to);                                                                             \
  bool ggml_compose(Ggml type, const GgmlNumbers& from, std::size_t count, std::uint8_t* out);                        \
  void ggml_pack(Ggml type, const std::uint8_t* codes, const std::uint8_t* scales, const std::uint8_t* minima,        \
                 std::size_t count, std::uint8_t* out);                                                               \
  void ggml_unpack(Ggml type, const std::uint8_t* in, std::size_t count, std::uint8_t* codes, std::uint8_t* scales,   \
                   std::uint8_t* minima);                                                                             \
  RecordsSeen gather_column(const std::uint8_t* records, std::size_t n, std::uint64_t key, int column, void* out,     \
                            Dtype type);                                                                              \
  void scaled_decode(const ScaledLayout& layout, const std::uint8_t* packed, std::size_t n, void* out, Dtype type);   \
  void move_bits(const std::uint8_t* in, std::uint8_t* out, std::size_t records, const BitMove* moves,                \
                 std::size_t count);                                                                                  \
  std::size_t symbols_encode(const std::uint8_t* in, const SymbolShape& shape, std::uint8_t* out, std::size_t limit,  \
                             std::uint8_t* scratch);                                                                  \
  EntropyStatus symbols_decode(const std::uint8_t* data, std::size_t size, const SymbolShape& shape,                  \
                               std::uint8_t* out, std::uint8_t* scratch);                                             \
  double pair_error(const void* reference, Dtype first, const void* other, Dtype second, std::size_t n);              \
  PairStats pair_stats(const void* reference, Dtype first, const void* other, Dtype second, std::size_t n);           \
  TcaSizes tca_tbe_encode(const std::uint16_t* in, std::size_t rows, std::size_t cols, int start,                     \
                          const TcaParts& parts);                                                                     \
  std::size_t tca_tbe_decode(const TcaConst& parts, const TcaSizes& sizes, int start, std::uint16_t* out,             \
                             std::size_t rows, std::size_t cols);                                                     \
  std::size_t first_unordered(const std::int64_t* positions, std::size_t n, std::int64_t last, std::int64_t limit);   \
  void int4_decode(const std::uint8_t* packed, std::size_t first, const void* table, const Placed& outliers,          \
                   bool gaps, std::size_t n, void* out, int width);                                                   \
  void int4_encode(const Differences& differences, const float* before, const std::int64_t* skipped,                  \
                   std::size_t count, const Int4Grid& grid, std::uint8_t* packed);                                    \
  void place_values(const Placed& entries, void* out, int width);                                                     \
  FloatRange range_between(const float* in, std::size_t n, const std::int64_t* skipped, std::size_t count);           \
  void sign_decode(const std::uint8_t* bits, std::size_t first, const void* scales, std::size_t rows,                 \
                   std::size_t cols, void* out, int width);                                                           \
  std::size_t sign_encode(const Differences& differences, std::size_t rows, std::size_t cols, float* sums,            \
                          std::uint8_t* bits);                                                                        \
  TopFound top_collect(const Differences& differences, const TopPlaces& to);                                          \
  TopFound top_of(const Differences& differences, std::size_t k, std::int64_t* positions, float* values);             \
  std::int32_t top_prune(std::int64_t* positions, float* values, std::size_t n, std::size_t k);                       \
  void bf16_exponents(const std::uint16_t* in, std::size_t n, std::uint64_t* counts);                                 \
  void palette_decode(const PaletteLayout& layout, const std::uint8_t* packed, const void* tables, std::size_t n,     \
                      void* out, std::size_t width);                                                                  \
  void palette_unpack(const std::uint8_t* packed, int bits, std::size_t n, std::uint8_t* out);                        \
  void palette_pack(const std::uint8_t* codes, int bits, std::size_t n, std::uint8_t* out);                           \
  std::size_t palette_count(const void* in, Dtype type, std::size_t n, std::size_t cols, const double* importance,    \
                            int exponent, double* weights, double* sums);                                             \
  void palette_assign(const void* in, Dtype type, std::size_t n, const double* thresholds, std::size_t k,             \
                      std::uint8_t* codes);                                                                           \
  void palette_runs(const PaletteRuns& input, double penalty, std::size_t runs);                                      \
  std::size_t palette_keys(const double* weights, std::uint16_t* keys);                                               \
  std::size_t palette_points(const double* weights, const std::uint16_t* keys, std::size_t n, Dtype type,             \
                             double* values, double* result_out);                                                     \
  double palette_nearest(const PalettePoints& points, const float* centroids, std::size_t k,                          \
                         const PaletteFound& output);                                                                 \
  void palette_spread(const PalettePoints& points, const double* draws, std::size_t k, std::uint64_t* chosen,         \
                      double* scratch);                                                                               \
  std::size_t mask_count(const std::uint8_t* mask, std::size_t n);                                                    \
  void mask_expand(const std::uint8_t* mask, std::size_t n, const void* values, std::size_t count, void* out,         \
                   int width);                                                                                        \
  void mask_clear(const std::uint8_t* mask, std::size_t n, void* out, int width);                                     \
  void mask_select(const std::uint8_t* mask, std::size_t n, const void* values, void* out, std::size_t count,         \
                   int width);                                                                                        \
  void matrix_multiply_add(const float* a, std::size_t a_stride, const float* b, std::size_t b_stride, float* out,    \
                           std::size_t out_stride, std::size_t rows, std::size_t depth, std::size_t cols);            \
  void pairs_pack(const float* rows, std::size_t stride, std::size_t first, std::size_t count, float factor,          \
                  const PairedMatrix& to);                                                                            \
  void pairs_multiply_add(const float* a, std::size_t a_stride, const PairedMatrix& b, std::size_t first,             \
                          std::size_t depth, float factor, float unit, float* out, std::size_t out_stride,            \
                          std::size_t rows);                                                                          \
  bool matrix_factor(float* a, double* diagonal, std::size_t n, std::size_t threads);                                 \
  std::size_t rounding_scales(const Grid& grid, const float* values, std::size_t stride, std::size_t rows,            \
                              std::size_t cols, const float* weights, float* scales, float* zeros,                    \
                              std::size_t scale_stride);                                                              \
  void rounding_nearest(const Grid& grid, const Rounded& to, const float* values);                                    \
  void rounding_feedback(const Grid& grid, const Rounded& to, const Feedback& feed);                                  \
  void rounding_descend(const Grid& grid, const Rounded& to, const Descent& down);                                    \
  void trellis_decode(const TrellisBand& band, const float* values, const float* scales, std::size_t first,           \
                      std::size_t count, void* out, Dtype type);                                                      \
  void trellis_search(const TrellisColumns& to, const float* target, bool open);                                      \
  void trellis_feedback(const TrellisColumns& to, const TrellisLinks& links, std::size_t first, std::size_t last,     \
                        const float* original, float* targets, const float* factor, float* errors);                   \
  void words_turn(const WordMatrix& in, const WordWindow& out);                                                       \
  void words_from_awq(const WordMatrix& in, const WordWindow& out);                                                   \
  void words_to_awq(const WordMatrix& in, const WordWindow& out);                                                     \
  }

INGOT_DECLARE_KERNELS(baseline)
INGOT_DECLARE_KERNELS(v3)
INGOT_DECLARE_KERNELS(v4)
