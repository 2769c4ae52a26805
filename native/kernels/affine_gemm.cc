// y[m, row] for many rows of x: weights are unpacked once for all of them, and every vector holds a column of several rows
// of the weights. Sums are in f32 in a fixed order: spec/affine.md, "Many rows".
#include "kernels/affine_gemm.h"

#include "kernels/affine_gemm_amx.h"
#include "kernels/affine_gemm_unpack.h"

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::size_t kTile = 6;  // rows of x whose sums are in registers: 32 registers
#else
constexpr std::size_t kTile = 3;
#endif

// products[kRows rows of x, kUnit rows of weights] of blocks one after the other; added to what is there where `more`.
template <std::size_t kRows, bool kFused>
void unit(const float* x, const float* q, std::size_t blocks, bool more, float* products,
          std::size_t stride) {
  Floats found[kRows][2];
  for (std::size_t m = 0; m < kRows; ++m)
    for (std::size_t v = 0; v < 2; ++v)
      found[m][v] = more ? load_floats(products + m * stride + v * kWidth) : Floats{};
  for (std::size_t b = 0; b < blocks; ++b) {
    Floats even[kRows][2] = {}, odd[kRows][2] = {};
    const auto column = [&](Floats (&sums)[kRows][2]) {
      const Floats w[2] = {load_floats(q), load_floats(q + kWidth)};
      for (std::size_t m = 0; m < kRows; ++m) {
        const Floats value = splat(x[m]);
        for (std::size_t v = 0; v < 2; ++v) sums[m][v] = kFused ? fused(value, w[v], sums[m][v]) : value * w[v] + sums[m][v];
      }
      x += kRows, q += kUnit;
    };
    for (std::size_t k = 0; k < kGemmBlock; k += 2) {
      column(even);
      column(odd);
    }
    for (std::size_t m = 0; m < kRows; ++m)
      for (std::size_t v = 0; v < 2; ++v) found[m][v] += even[m][v] + odd[m][v];
  }
  for (std::size_t m = 0; m < kRows; ++m)
    for (std::size_t v = 0; v < 2; ++v) store_floats(products + m * stride + v * kWidth, found[m][v]);
}

using UnitFn = void (*)(const float*, const float*, std::size_t, bool, float*, std::size_t);

template <bool kFused>
UnitFn unit_of(std::size_t rows) {
  if constexpr (kTile == 6) {
    if (rows == 6) return unit<6, kFused>;
    if (rows == 5) return unit<5, kFused>;
    if (rows == 4) return unit<4, kFused>;
  }
  return rows == 3 ? unit<3, kFused> : rows == 2 ? unit<2, kFused> : unit<1, kFused>;
}

// Where block `b` of the tile of x lies that has `rows` rows from `m` on: spans of all tiles, one tile's after the other's.
inline std::size_t place_of(const GemmJob& job, std::size_t m, std::size_t rows, std::size_t b) {
  const std::size_t tile = gemm_tile(job.mode), span = b / kGemmSpan * kGemmSpan;
  const std::size_t all = job.mode == GemmMode::tiles ? (job.count + tile - 1) / tile * tile : job.count;
  const std::size_t blocks = job.blocks - span < kGemmSpan ? job.blocks - span : kGemmSpan;
  return (span * all + m * blocks + (b - span) * rows) * kGemmBlock;
}

// The span that begins at block `span`, unit `n` of the weights, and `rows` of x from `m` on.
struct Place {
  std::size_t span, n, m, rows;
};

// A thread's rows of the weights, `kGemmSpan` blocks at a time.
class Rows {
 public:
  Rows(const GemmJob& job, std::size_t first, std::size_t last, GemmScratch& scratch)
      : job_(job), first_(first), rows_(last - first), units_((rows_ + kUnit - 1) / kUnit), s_(scratch),
        per_group_(job.groups == 1 ? job.blocks : job.at.group / kGemmBlock), tile_(gemm_tile(job.mode)) {}

  void run() {
    const UnpackUnit unpack = unpack_of(job_.at);
    for (std::size_t m = 0; m < job_.count * kGemmRows; ++m) s_.totals[m] = 0;
    for (std::size_t b = 0; b < job_.blocks; b += kGemmSpan) {
      const std::size_t last = job_.blocks - b < kGemmSpan ? job_.blocks : b + kGemmSpan;
      load_scales(b / per_group_, (last - 1) / per_group_ + 1);
      for (std::size_t n = 0; n < units_; ++n) {
        unpack(job_, first_ + n * kUnit, b, last, s_.values);
        for (std::size_t m = 0; m < job_.count; m += tile_) span(b, last, n, m);
      }
    }
    finish();
  }

 private:
  // Blocks `b` to `last` of unit `n` and of the tile of x that begins at row `m`.
  void span(std::size_t b, std::size_t last, std::size_t n, std::size_t m) {
    const Place at{b, n, m, job_.count - m < tile_ ? job_.count - m : tile_};
    if (per_group_ < kGemmSpan && kGemmSpan % per_group_ == 0) return short_groups(at, last);
    float* products = s_.products + m * kGemmRows + n * kUnit;
    while (b < last) {
      const std::size_t group = b / per_group_, end = (group + 1) * per_group_, stop = end < last ? end : last;
      multiply(at, b, stop, products, kGemmRows);
      if (stop == end || stop == job_.blocks) add_groups(at, group, 1, products, kGemmRows, 0);
      b = stop;
    }
  }

  // Groups that end in the span where they begin.
  void short_groups(const Place& at, std::size_t last) {
    const std::size_t stride = kUnit, part = tile_ * kUnit;
    for (std::size_t b = at.span; b < last;) {
      const std::size_t group = b / per_group_;
      std::size_t count = 0;
      for (; b < last && count < kGemmParts; ++count, b += per_group_)
        multiply(at, b, b + per_group_ < last ? b + per_group_ : last, s_.parts + count * part, stride);
      add_groups(at, group, count, s_.parts, stride, part);
    }
  }

  void multiply(const Place& at, std::size_t b, std::size_t stop, float* products, std::size_t stride) {
    const std::size_t step = kGemmBlock * kUnit, place = (b - at.span) * step;
    const bool more = b % per_group_ != 0;
#if INGOT_AMX
    if (job_.mode == GemmMode::tiles) {
      const auto* x = static_cast<const std::uint16_t*>(job_.packed) + place_of(job_, at.m, kAmxRows, b);
      const auto* q = reinterpret_cast<const std::uint16_t*>(s_.values) + place;
      return amx_unit(x, q, stop - b, more, at.rows > kAmxRows / 2, products, stride);
    }
#endif
    const float* x = static_cast<const float*>(job_.packed) + place_of(job_, at.m, at.rows, b);
    const UnitFn unit = job_.mode == GemmMode::plain ? unit_of<false>(at.rows) : unit_of<true>(at.rows);
    unit(x, s_.values + place, stop - b, more, products, stride);
  }

  void add_groups(const Place& at, std::size_t group, std::size_t count, const float* parts, std::size_t stride,
                  std::size_t part) {
    switch (job_.at.zero) {
      case ZeroKind::point:
        return scale_groups<ZeroKind::point>(at, group, count, parts, stride, part);
      case ZeroKind::offset:
        return scale_groups<ZeroKind::offset>(at, group, count, parts, stride, part);
      default:
        return scale_groups<ZeroKind::none>(at, group, count, parts, stride, part);
    }
  }

  // total += s * P, s * (P - z * X) or s * P + z * X, group after group.
  template <ZeroKind kZero>
  void scale_groups(const Place& at, std::size_t group, std::size_t count, const float* parts, std::size_t stride,
                    std::size_t part) {
    const std::size_t first = (group - at.span / per_group_) * kGemmRows + at.n * kUnit;
    for (std::size_t v = 0; v < kUnit; v += kWidth) {
      Floats scales[kGemmParts], zeros[kGemmParts];
      for (std::size_t g = 0; g < count; ++g) {
        scales[g] = load_floats(s_.scales + first + g * kGemmRows + v);
        if constexpr (kZero != ZeroKind::none) zeros[g] = load_floats(s_.zeros + first + g * kGemmRows + v);
      }
      const auto add_row = [&](std::size_t i, std::size_t groups) {
        float* place = s_.totals + (at.m + i) * kGemmRows + at.n * kUnit + v;
        Floats total = load_floats(place);
        for (std::size_t g = 0; g < groups; ++g) {
          const Floats p = load_floats(parts + g * part + i * stride + v);
          if constexpr (kZero == ZeroKind::none) {
            total += scales[g] * p;
          } else {
            const Floats shift = zeros[g] * splat(job_.sums[(group + g) * kGemmCount + at.m + i]);
            total += kZero == ZeroKind::point ? scales[g] * (p - shift) : scales[g] * p + shift;
          }
        }
        store_floats(place, total);
      };
      for (std::size_t i = 0; i < at.rows; ++i) {
        if (count == kGemmParts) add_row(i, kGemmParts);  // a constant, which leaves scales in registers
        else add_row(i, count);
      }
    }
  }

  void load_scales(std::size_t from, std::size_t to) {
    spread(job_.weights.scales, from, to, s_.scales);
    if (job_.at.zero != ZeroKind::none) spread(job_.weights.zeros, from, to, s_.zeros);
  }

  void spread(const void* values, std::size_t from, std::size_t to, float* out) const {
    float found[kGemmSpan];
    for (std::size_t row = 0; row < kGemmRows; ++row) {
      const std::size_t held = row < rows_ ? first_ + row : first_ + rows_ - 1;  // any: what comes of it is not stored
      const std::size_t place = job_.at.per_tensor ? 0 : held * job_.groups + from;
      load_floats_of(values, job_.weights.scale_type, place, to - from, found);
      for (std::size_t group = 0; group < to - from; ++group) out[group * kGemmRows + row] = found[group];
    }
  }

  void finish() const {
    alignas(64) float bias[kGemmRows];
    if (job_.out.bias) load_floats_of(job_.out.bias, job_.out.bias_type, first_, rows_, bias);
    for (std::size_t m = 0; m < job_.count; ++m) {
      float* sums = s_.totals + m * kGemmRows;
      if (job_.out.bias)
        for (std::size_t row = 0; row < rows_; ++row) sums[row] += bias[row];
      store_values(sums, rows_, job_.out, m * job_.at.rows + first_);
    }
  }

  const GemmJob& job_;
  const std::size_t first_, rows_, units_;
  GemmScratch& s_;
  const std::size_t per_group_, tile_;
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
  const std::size_t cols = job.at.cols, per_group = job.groups == 1 ? job.blocks : job.at.group / kGemmBlock;
  for (std::size_t m = first; m < last; ++m)
    for (std::size_t b = 0; b < job.blocks; ++b) {
      load_filled<kGemmBlock>(job.x, job.type, m * cols + b * kGemmBlock, cols - b * kGemmBlock, values);
      float& sum = job.sums[b / per_group * kGemmCount + m];
      sum = (b % per_group ? sum : 0) + sum_block(values);
    }
}

// A block of some rows of x, for AMX; 0 in the `missing` rows of the last tile.
void pack_tile(const std::uint16_t* x, std::size_t cols, std::size_t held, std::size_t rows, std::size_t missing,
               std::uint16_t* out) {
  for (std::size_t m = 0; m < rows; ++m, x += cols, out += kGemmBlock) {
    if (held == kGemmBlock) {
      std::memcpy(out, x, kGemmBlock * 2);
    } else {
      std::memcpy(out, x, held * 2);
      std::memset(out + held, 0, (kGemmBlock - held) * 2);
    }
  }
  std::memset(out, 0, missing * kGemmBlock * 2);
}

// A block of some rows of x, column after column.
void pack_columns(const GemmJob& job, std::size_t first, std::size_t held, std::size_t rows, float* out) {
  alignas(64) float values[kGemmBlock];
  for (std::size_t m = 0; m < rows; ++m) {
    load_filled<kGemmBlock>(job.x, job.type, first + m * job.at.cols, held, values);
    for (std::size_t k = 0; k < kGemmBlock; ++k) out[k * rows + m] = values[k];
  }
}

}  // namespace

// The mode that x allows: an exact product has the bits of x and those of a code (at most 2^8), and neither
// overflows nor, in bf16 instructions, which know no subnormal numbers, is near them.
GemmMode gemm_mode(const void* x, Dtype type, std::size_t n) {
  constexpr std::uint32_t kLarge = (127 + 118) << 23, kSmall = (127 - 118) << 23;
  alignas(64) float values[256];
  std::uint32_t bits = 0, large = 0, tiny = 0;
  for (std::size_t first = 0; first < n; first += 256) {
    const std::size_t some = n - first < 256 ? n - first : 256;
    load_floats_of(x, type, first, some, values);
    for (std::size_t i = 0; i < some; ++i) {
      const std::uint32_t value = std::bit_cast<std::uint32_t>(values[i]), magnitude = value & 0x7fffffffu;
      bits |= value;
      large |= magnitude >= kLarge;
      tiny |= (magnitude < kSmall) & (magnitude != 0);
    }
  }
  if (large || (bits & 0xff)) return GemmMode::plain;
  return tiny || (bits & 0xffff) || type != Dtype::bf16 ? GemmMode::fused : GemmMode::tiles;
}

std::size_t gemm_tile([[maybe_unused]] GemmMode mode) {
#if INGOT_AMX
  if (mode == GemmMode::tiles) return kAmxRows;
#endif
  return kTile;
}

// Rows of x of one tile, block after block: column after column, or as they lie for AMX. Past the last column they are 0.
void gemm_pack(const GemmJob& job, std::size_t tile) {
  const std::size_t all = gemm_tile(job.mode), from = tile * all, cols = job.at.cols;
  const std::size_t rows = job.count - from < all ? job.count - from : all;
  if (job.sums) sum_rows(job, from, from + rows);
  for (std::size_t b = 0; b < job.blocks; ++b) {
    const std::size_t held = cols - b * kGemmBlock < kGemmBlock ? cols - b * kGemmBlock : kGemmBlock;
    const std::size_t first = from * cols + b * kGemmBlock;
    if (job.mode == GemmMode::tiles)
      pack_tile(static_cast<const std::uint16_t*>(job.x) + first, cols, held, rows,
                all - rows, static_cast<std::uint16_t*>(job.packed) + place_of(job, from, all, b));
    else
      pack_columns(job, first, held, rows, static_cast<float*>(job.packed) + place_of(job, from, rows, b));
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
