// y[m, row] for many rows of x: weights are unpacked once for all of them, and every vector holds one column of several
// rows of the weights. Sums are in f32 in a fixed order: spec/affine.md, "Many rows".
#include "kernels/affine_gemm.h"

#include "kernels/affine_gemm_amx.h"
#include "kernels/affine_gemm_fill.h"
#include "kernels/affine_gemm_unit.h"

namespace ingot::INGOT_ISA {
namespace {

// Returns the position, in values, of the span that begins at block `b` in the row of x (or AMX tile) that begins at
// row `m`.
inline std::size_t place_of(const GemmJob& job, std::size_t m, std::size_t b) {
  if (job.mode != GemmMode::tiles) return (b / kGemmSpan * job.count + m) * kGemmSpan * kGemmBlock;
  const std::size_t all = (job.count + job.tile - 1) / job.tile * job.tile;
  const std::size_t blocks = job.blocks - b < kGemmSpan ? job.blocks - b : kGemmSpan;
  return (b * all + m * blocks) * kGemmBlock;
}

// The rows of the weights of a task, `kGemmSpan` blocks at a time.
class Rows {
 public:
  Rows(const GemmJob& job, std::size_t first, std::size_t last, GemmScratch& scratch)
      : job_(job), first_(first), rows_(last - first), units_((rows_ + kUnit - 1) / kUnit), s_(scratch),
        per_group_(job.groups == 1 ? job.blocks : job.layout.group / kGemmBlock) {
    if (job_.out.bias) load_floats_of(job_.out.bias, job_.out.bias_type, first_, rows_, bias_);
  }

  void run() {
    for (std::size_t b = 0; b < job_.blocks; b += kGemmSpan) {
      const std::size_t last = job_.blocks - b < kGemmSpan ? job_.blocks : b + kGemmSpan;
      load_scales(b / per_group_, (last - 1) / per_group_ + 1);
      for (std::size_t n = 0; n < units_; ++n) {
        fill_unit(job_, first_ + n * kUnit, b, last, s_);
        multiply(b, last, n);
      }
    }
  }

 private:
  // Multiplies blocks `b` to `last` of unit `n` with all rows of x, tile after tile. After the last block a tile is
  // stored while its sums are in cache and the products of the next tile run.
  void multiply(std::size_t b, std::size_t last, std::size_t n) {
    Span span{nullptr, s_.values, last - b, b % per_group_, per_group_, last == job_.blocks, s_.scales + n * kUnit,
              s_.zeros + n * kUnit, nullptr, nullptr, nullptr, job_.layout.zero};
    for (std::size_t m = 0; m < job_.count; m += job_.tile) {
      const std::size_t rows = job_.count - m < job_.tile ? job_.count - m : job_.tile, unit = m * kGemmRows + n * kUnit;
      if (b == 0)  // totals are in cache when they are first added to
        for (std::size_t i = 0; i < rows; ++i)
          for (std::size_t v = 0; v < kUnit; v += kWidth) store_floats(s_.totals + unit + i * kGemmRows + v, Floats{});
      const auto* packed = static_cast<const std::uint8_t*>(job_.packed);
      const auto* x = reinterpret_cast<const float*>(packed + place_of(job_, m, b) * (job_.mode >= GemmMode::tiles ? 2 : 4));
      const float* sums = job_.sums ? job_.sums + b / per_group_ * kGemmCount + m : s_.totals;
#if INGOT_AMX
      if (job_.mode == GemmMode::tiles) {
        span.x = x, span.sums = sums, span.products = s_.products + unit, span.totals = s_.totals + unit;
        amx_span(span, rows, s_.parts);
      } else
#endif
        multiply_of(job_.mode, span.zero, rows)(span, x, sums, s_.products + unit, s_.totals + unit);
      if (span.last) finish(m, rows, n * kUnit);
    }
  }

  // Scales of the span's groups; if a row has only one, it is applied at the end.
  void load_scales(std::size_t from, std::size_t to) {
    if (job_.groups == 1 && from_ == 0) return;
    from_ = from;
    spread(job_.weights.scales, from, to, s_.scales);
    if (job_.layout.zero != ZeroKind::none) spread(job_.weights.zeros, from, to, s_.zeros);
  }

  // Scales group after group, each for all rows. Entries past the last row are arbitrary, because their results are not
  // stored.
  void spread(const void* values, std::size_t from, std::size_t to, float* out) const {
    const Dtype type = job_.weights.scale_type;
    if (job_.layout.per_tensor || job_.groups == 1) {
      load_floats_of(values, type, job_.layout.per_tensor ? 0 : first_, job_.layout.per_tensor ? 1 : rows_, out);
      for (std::size_t row = job_.layout.per_tensor ? 1 : rows_; row < kGemmRows; ++row) out[row] = out[row - 1];
      return;
    }
    const std::size_t ahead = 64 / (type == Dtype::f32 ? 4 : 2), size = 64 / ahead, some = to - from;
    for (std::size_t n = 0; n < kGemmRows; n += kWidth) {
      std::size_t positions[kWidth];
      for (std::size_t i = 0; i < kWidth; ++i) {
        positions[i] = (first_ + (n + i < rows_ ? n + i : rows_ - 1)) * job_.groups + from;
        const auto* next = static_cast<const std::uint8_t*>(values) + (positions[i] + ahead) * size;
        __builtin_prefetch(next + (from + ahead < job_.groups ? 0 : (kGemmRows - 1) * job_.groups * size), 0, 2);
      }
#if defined(__AVX512F__)
      if (some == 8) {
        turn_eights(values, type, positions, out + n, kGemmRows);
        continue;
      }
#endif
      turn_some(values, positions, some, out + n);
    }
  }

  void turn_some(const void* values, const std::size_t* positions, std::size_t batch, float* out) const {
    alignas(64) float sums[kWidth][kGemmSpan + kWidth];
    for (std::size_t i = 0; i < kWidth; ++i)
      load_floats_of(values, job_.weights.scale_type, positions[i], batch, sums[i]);
    for (std::size_t g = 0; g < batch; g += kWidth) {
      Words turned[kWidth];
      for (std::size_t i = 0; i < kWidth; ++i) turned[i] = std::bit_cast<Words>(load_floats(sums[i] + g));
      transpose(turned);
      for (std::size_t k = 0; k < kWidth && g + k < batch; ++k)
        store_floats(out + (g + k) * kGemmRows, std::bit_cast<Floats>(turned[k]));
    }
  }

  // Stores the results of rows of x from `m` on and of the unit that begins at `row`.
  void finish(std::size_t m, std::size_t count, std::size_t row) {
    const std::size_t filled = rows_ - row < kUnit ? rows_ - row : kUnit;
    for (std::size_t end = m + count; m < end; ++m) {
      float* sums = s_.totals + m * kGemmRows + row;
      fetch_output(m + count, row, filled);
#if defined(__AVX512F__)
      if (filled == kUnit && job_.out.type == Dtype::bf16) {
        finish_row(sums, row, static_cast<std::uint16_t*>(job_.out.values) + m * job_.layout.rows + first_ + row);
        continue;
      }
#endif
      if (job_.out.bias)
        for (std::size_t k = 0; k < filled; ++k) sums[k] += bias_[row + k];
      store_values(sums, filled, job_.out, m * job_.layout.rows + first_ + row);
    }
  }

#if defined(__AVX512F__)
  // A complete unit in bf16, in the layout that `store_values` writes.
  void finish_row(const float* sums, std::size_t row, std::uint16_t* out) const {
    for (std::size_t v = 0; v < kUnit; v += kWidth) {
      Floats values = load_floats(sums + v);
      if (job_.out.bias) values += load_floats(bias_ + row + v);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + v), store_sixteen<Dtype::bf16>(values));
    }
  }
#endif

  // Rows of the output are pages apart.
  void fetch_output(std::size_t m, std::size_t row, std::size_t filled) const {
    const std::size_t size = job_.out.type == Dtype::f32 ? 4 : 2;
    const auto* to = static_cast<const std::uint8_t*>(job_.out.values) + (m * job_.layout.rows + first_ + row) * size;
    if (m < job_.count)
      for (std::size_t line = 0; line < filled * size; line += 64) __builtin_prefetch(to + line, 1);
  }

  const GemmJob& job_;
  const std::size_t first_, rows_, units_;
  GemmScratch& s_;
  const std::size_t per_group_;
  std::size_t from_ = std::size_t(-1);  // first group of the loaded scales
  alignas(64) float bias_[kGemmRows];
};

// The sum of a block's 32 values in the order of its products.
inline float sum_block(const float* values) {
  float even = 0, odd = 0;
  for (std::size_t k = 0; k < kGemmBlock; k += 2) {
    even += values[k];
    odd += values[k + 1];
  }
  return even + odd;
}

// The sums of x by which zeros are multiplied.
void sum_rows(const GemmJob& job, std::size_t first, std::size_t last) {
  alignas(64) float values[kGemmBlock];
  const std::size_t cols = job.layout.cols, per_group = job.groups == 1 ? job.blocks : job.layout.group / kGemmBlock;
  for (std::size_t m = first; m < last; ++m)
    for (std::size_t b = 0; b < job.blocks; ++b) {
      load_filled<kGemmBlock>(job.x, job.type, m * cols + b * kGemmBlock, cols - b * kGemmBlock, values);
      float& sum = job.sums[b / per_group * kGemmCount + m];
      sum = (b % per_group ? sum : 0) + sum_block(values);
    }
}

// A block of some rows of x, for AMX; 0 in the `missing` rows of the last tile.
void pack_tile(const std::uint16_t* x, std::size_t cols, std::size_t filled, std::size_t rows, std::size_t missing,
               std::uint16_t* out) {
  for (std::size_t m = 0; m < rows; ++m, x += cols, out += kGemmBlock) {
    if (filled == kGemmBlock) {
      std::memcpy(out, x, kGemmBlock * 2);
    } else {
      std::memcpy(out, x, filled * 2);
      std::memset(out + filled, 0, (kGemmBlock - filled) * 2);
    }
  }
  std::memset(out, 0, missing * kGemmBlock * 2);
}

// A block of a row of x: in f32, or in pairs of bf16.
inline void pack_block(const GemmJob& job, std::size_t first, std::size_t filled, std::uint8_t* out) {
#if defined(__AVX512BW__)
  if (job.mode == GemmMode::dots) {
    alignas(64) std::uint16_t tail[kGemmBlock] = {};
    const auto* values = static_cast<const std::uint16_t*>(job.x) + first;
    if (filled < kGemmBlock) values = static_cast<const std::uint16_t*>(std::memcpy(tail, values, filled * 2));
    const Words pairs = turn_pairs(load_words(reinterpret_cast<const std::uint8_t*>(values)));
    std::memcpy(out, &pairs, sizeof pairs);
    return;
  }
#endif
  alignas(64) float values[kGemmBlock];
  load_filled<kGemmBlock>(job.x, job.type, first, filled, values);
  std::memcpy(out, values, sizeof values);
}

// Packs rows of x one after the other. The output position of the span after the next is prefetched, because the
// processor does not predict strides of this size.
void pack_rows(const GemmJob& job, std::size_t from, std::size_t rows) {
  const std::size_t cols = job.layout.cols, size = job.mode == GemmMode::dots ? 2 : 4, block = kGemmBlock * size;
  for (std::size_t m = from; m < from + rows; ++m)
    for (std::size_t b = 0; b < job.blocks; ++b) {
      const std::size_t span = b / kGemmSpan * kGemmSpan, left = cols - b * kGemmBlock;
      auto* out = static_cast<std::uint8_t*>(job.packed) + place_of(job, m, span) * size + (b - span) * block;
      if (b + 2 * kGemmSpan < job.blocks) __builtin_prefetch(out + 2 * job.count * kGemmSpan * block, 1);
      pack_block(job, m * cols + b * kGemmBlock, left < kGemmBlock ? left : kGemmBlock, out);
    }
}

// Magnitudes of values in 16 bits: the largest, and the smallest that is not 0.
struct Range {
  std::uint32_t largest, least;
};

Range range_of(const void* x, std::size_t n) {
  const auto* values = static_cast<const std::uint16_t*>(x);
  std::uint16_t largest = 0, before = 0xffff;  // `before` is one less, so that 0 becomes the largest value
  for (std::size_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<std::uint16_t>(values[i] & 0x7fffu), less = static_cast<std::uint16_t>(magnitude - 1);
    largest = magnitude > largest ? magnitude : largest;
    before = less < before ? less : before;
  }
  return {largest, before + 1u};
}

}  // namespace

// The mode that x allows. An exact product has at most the bits of x plus those of a weight (a code, at most 2^8, or a
// 16-bit value). It must neither overflow nor become subnormal, because bf16 instructions flush subnormal values; so
// magnitudes must be between 2^-reach and 2^reach.
GemmMode gemm_mode(const void* x, Dtype type, std::size_t n, std::uint32_t reach) {
  if (type == Dtype::f16) return range_of(x, n).largest >= 0x7c00u ? GemmMode::plain : GemmMode::fused;
  const std::uint32_t limit = (127 + reach) << 23, least = (127 - reach) << 23;
  if (type == Dtype::bf16) {
    const Range result = range_of(x, n);
    if (result.largest >= limit >> 16) return GemmMode::plain;
    return result.least < least >> 16 ? GemmMode::fused : GemmMode::tiles;
  }
  const auto* values = static_cast<const float*>(x);
  std::uint32_t bits = 0, large = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto value = std::bit_cast<std::uint32_t>(values[i]);
    bits |= value;
    large |= (value & 0x7fffffffu) >= limit;
  }
  if (large || (bits & 0xff)) return GemmMode::plain;
  return GemmMode::fused;
}

std::size_t gemm_tile([[maybe_unused]] GemmMode mode, std::size_t count) {
#if INGOT_AMX
  if (mode == GemmMode::tiles) return kAmxRows;
#endif
  // Parts of about the same size, because short chains of sums have to wait.
  const std::size_t tiles = (count + kTileRows - 1) / kTileRows;
  return tiles ? (count + tiles - 1) / tiles : kTileRows;
}

// Packs the rows of x of one tile, span after span; for AMX block after block. Past the last column they are 0.
void gemm_pack(const GemmJob& job, std::size_t tile) {
  const std::size_t all = job.tile, from = tile * all, cols = job.layout.cols;
  const std::size_t rows = job.count - from < all ? job.count - from : all;
  if (job.sums) sum_rows(job, from, from + rows);
  if (job.mode != GemmMode::tiles) return pack_rows(job, from, rows);
  for (std::size_t b = 0; b < job.blocks; ++b) {
    const std::size_t filled = cols - b * kGemmBlock < kGemmBlock ? cols - b * kGemmBlock : kGemmBlock;
    const std::size_t first = from * cols + b * kGemmBlock, span = b / kGemmSpan * kGemmSpan;
    auto* out = static_cast<std::uint16_t*>(job.packed) + place_of(job, from, span) + (b - span) * all * kGemmBlock;
    pack_tile(static_cast<const std::uint16_t*>(job.x) + first, cols, filled, rows, all - rows, out);
  }
}

void gemm_rows(const GemmJob& job, std::size_t first, std::size_t last, GemmScratch& scratch) {
#if INGOT_AMX
  if (job.mode == GemmMode::tiles) amx_begin();
#endif
  Rows(job, first, last, scratch).run();
#if INGOT_AMX
  if (job.mode == GemmMode::tiles) amx_end();
#endif
}

}  // namespace ingot::INGOT_ISA
