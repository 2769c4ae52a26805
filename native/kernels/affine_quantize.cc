// Quantizers of the affine family: spec/affine.md, "Quantizers". Scales are rounded to their stored type before they are
// used; divisions are true divisions; sums have a fixed order.
#include "kernels/gcc_headers.h"
#include "kernels/affine_choose.h"
#include "kernels/affine_levels.h"
#include "kernels/affine_search.h"
#include "kernels/bits.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

template <Dtype kDtype>
AffineRange checked_range(const TypeOf<kDtype>* in, std::size_t n, std::int32_t low, std::int32_t high) {
  AffineRange range{from_key(low), from_key(high), n};
  if (high >= kInfinity || low <= ~kInfinity)
    for (range.bad = 0; is_finite(Element<kDtype>::load(in[range.bad]));) ++range.bad;
  return range;
}

// Minimum and maximum of the values, and of 0 if requested.
template <Dtype kDtype, bool kAndZero = true>
AffineRange range_of(const TypeOf<kDtype>* in, std::size_t n) {
#if defined(__AVX512BW__)
  if constexpr (kDtype != Dtype::f64) {
    const KeyRange result = key_range<kDtype>(in, n, kAndZero ? KeyRange{0, 0} : KeyRange{kMagnitude, ~kMagnitude});
    return checked_range<kDtype>(in, n, result.low, result.high);
  }
#endif
  constexpr std::size_t width = sizeof(Ints) / sizeof(std::int32_t);
  Ints lows{}, highs{};
  if constexpr (!kAndZero) {
    lows = lows + kMagnitude;
    highs = highs + ~kMagnitude;
  }
  alignas(64) float block[kBlock];
  for (std::size_t start = 0; start < n; start += kBlock) {
    std::size_t count = n - start < kBlock ? n - start : kBlock;
    load_block<kDtype>(in + start, count, block);
    for (; count % width; ++count) block[count] = kAndZero ? 0 : block[0];
    for (std::size_t i = 0; i < count; i += width) {
      Ints bits;
      std::memcpy(&bits, block + i, sizeof bits);
      const Ints keys = bits ^ ((bits >> 31) & kMagnitude);  // order_key
      lows = keys < lows ? keys : lows;
      highs = keys > highs ? keys : highs;
    }
  }
  std::int32_t low = lows[0], high = highs[0];
  for (std::size_t lane = 1; lane < width; ++lane) {
    low = lows[lane] < low ? lows[lane] : low;
    high = highs[lane] > high ? highs[lane] : high;
  }
  return checked_range<kDtype>(in, n, low, high);
}

// rint((w - z) / s) clipped, with z an offset or 0.
inline float level(float value, const AffineGrid& grid) {
  float t = (value - grid.offset) / grid.scale;
  t = t > grid.low ? t : grid.low;
  t = t < grid.high ? t : grid.high;
  return round_even(t);
}

// A given zero point, limited to the range of `round_even`, as an integer.
inline float level_of_zero(float zero) {
  constexpr float kMost = 0x1p22f;
  zero = zero > -kMost ? zero : -kMost;
  return zero < kMost ? zero : kMost;
}

// Codes of `n` values; up to kLanes - 1 codes after them are overwritten.
template <Dtype kDtype>
void quantize_run(const TypeOf<kDtype>* in, std::size_t n, const AffineGrid grid, int bits,
                  std::uint8_t* __restrict codes) {
#if defined(__AVX512BW__)
  if constexpr (kDtype != Dtype::f64) return level_run<kDtype>(in, n, grid, bits, codes);
#endif
  const std::int32_t zero = static_cast<std::int32_t>(grid.zero), mask = (1 << bits) - 1;
  alignas(64) float block[kBlock];
  for (std::size_t start = 0; start < n; start += kBlock) {
    std::size_t count = n - start < kBlock ? n - start : kBlock;
    load_block<kDtype>(in + start, count, block);
    for (; count % kLanes; ++count) block[count] = 0;
    for (std::size_t i = 0; i < count; i += kLanes)
      for (std::size_t lane = i; lane < i + kLanes; ++lane)
        codes[start + lane] =
            static_cast<std::uint8_t>((static_cast<std::int32_t>(level(block[lane], grid)) + zero) & mask);
  }
}

// Chooses the grid of a group; its scale is infinite if the scale type cannot represent it.
template <Dtype kDtype>
AffineGrid choose(const TypeOf<kDtype>* in, std::size_t n, const AffineRange& range, const Chooser& chooser, Grids& grids) {
  if (!chooser.choice.search || chooser.flat(range.low, range.high)) return chooser.full_range(range.low, range.high);
  find_grids(chooser, range.low, range.high, grids);
  const int best = chooser.choice.offset ? best_of<kDtype, true>(in, n, range, grids) : best_of<kDtype, false>(in, n, range, grids);
  return best < 0 ? chooser.full_range(range.low, range.high) : grids.grid(best);
}

template <Dtype kDtype>
AffineStatus quantize(const AffineLayout& layout, const AffineChoice& choice, const void* source, std::uint8_t* packed,
                      void* scales, void* zeros) {
  const Chooser chooser{layout.bits, choice};
  const Pack pack_codes = layout.msb ? packer<true>(layout.bits) : packer<false>(layout.bits);
  const auto* in = static_cast<const TypeOf<kDtype>*>(source);
  const std::size_t group = layout.group < layout.cols ? layout.group : layout.cols;
  Codes codes;
  Grids grids;
  std::size_t index = 0;
  for (std::size_t row = 0; row < layout.rows; ++row) {
    const auto* values = in + row * layout.cols;
    std::uint8_t* out = packed + row * layout.row_bytes;
    AffineGrid grid{};
    std::size_t group_end = 0;
    if (layout.per_tensor) index = 0;
    for (std::size_t start = 0; start < layout.cols; start += kChunk) {
      const std::size_t end = layout.cols - start < kChunk ? layout.cols : start + kChunk;
      for (std::size_t from = start, until; from < end; from = until) {
        if (from == group_end) {
          group_end = layout.cols - from < group ? layout.cols : from + group;
          const AffineRange range = choice.offset ? range_of<kDtype, false>(values + from, group_end - from)
                                                  : range_of<kDtype>(values + from, group_end - from);
          const std::size_t element = row * layout.cols + from;
          if (range.bad < group_end - from) return {AffineStatus::non_finite, element + range.bad};
          if (choice.provided) {
            grid = chooser.limits(load_at(scales, choice.scale_type, index),
                                  zeros ? level_of_zero(load_at(zeros, choice.scale_type, index)) : 0);
          } else {
            grid = choose<kDtype>(values + from, group_end - from, range, chooser, grids);
            if (!is_finite(grid.scale)) return {AffineStatus::scale_overflow, element};
            store_at(scales, choice.scale_type, index, grid.scale);
            if (zeros) store_at(zeros, choice.scale_type, index, choice.offset ? grid.offset : grid.zero);
          }
          ++index;
        }
        until = group_end < end ? group_end : end;
        quantize_run<kDtype>(values + from, until - from, grid, layout.bits, codes.bytes() + (from - start));
      }
      pack_codes(codes, end - start, out + start / 8 * layout.bits);
    }
  }
  return {AffineStatus::ok, 0};
}

template <Dtype kDtype>
void row_errors(const AffineLayout& layout, const AffineChoice& choice, const void* source, const float* scales,
                const float* zeros, int count, double* totals) {
  const Chooser chooser{layout.bits, choice};
  Grids grids;
  for (int k = 0; k < count; ++k) grids.set(k, chooser.limits(scales[k], zeros[k]));
  for (std::size_t row = 0; row < layout.rows; ++row) {
    float errors[kCandidates];
    const auto* in = static_cast<const TypeOf<kDtype>*>(source) + row * layout.cols;
    Trial<kDtype>(in, layout.cols, grids, count).template run<false>(kAllOf, errors);
    for (int k = 0; k < count; ++k) totals[k] += static_cast<double>(errors[k]);
  }
}

}  // namespace

AffineRange affine_range(const void* in, Dtype type, std::size_t n) {
  switch (type) {
    case Dtype::f16:
      return range_of<Dtype::f16>(static_cast<const std::uint16_t*>(in), n);
    case Dtype::bf16:
      return range_of<Dtype::bf16>(static_cast<const std::uint16_t*>(in), n);
    case Dtype::f64:
      return range_of<Dtype::f64>(static_cast<const double*>(in), n);
    default:
      return range_of<Dtype::f32>(static_cast<const float*>(in), n);
  }
}

void affine_candidates(float low, float high, int bits, const AffineChoice& choice, float* scales, float* zeros) {
  const Chooser chooser{bits, choice};
  Grids grids;
  const bool flat = chooser.flat(low, high);
  if (!flat) find_grids(chooser, low, high, grids);
  for (int k = 0; k < kCandidates; ++k) {
    const AffineGrid grid = flat ? chooser.full_range(low, high) : grids.grid(k);
    scales[k] = grid.scale;
    zeros[k] = grid.zero;
  }
}

void affine_errors(const AffineLayout& layout, const AffineChoice& choice, const void* in, Dtype type,
                   const float* scales, const float* zeros, int count, double* totals) {
  switch (type) {
    case Dtype::f16:
      return row_errors<Dtype::f16>(layout, choice, in, scales, zeros, count, totals);
    case Dtype::bf16:
      return row_errors<Dtype::bf16>(layout, choice, in, scales, zeros, count, totals);
    case Dtype::f64:
      return row_errors<Dtype::f64>(layout, choice, in, scales, zeros, count, totals);
    default:
      return row_errors<Dtype::f32>(layout, choice, in, scales, zeros, count, totals);
  }
}

AffineStatus affine_quantize(const AffineLayout& layout, const AffineChoice& choice, const void* in, Dtype type,
                             std::uint8_t* packed, void* scales, void* zeros) {
  switch (type) {
    case Dtype::f16:
      return quantize<Dtype::f16>(layout, choice, in, packed, scales, zeros);
    case Dtype::bf16:
      return quantize<Dtype::bf16>(layout, choice, in, packed, scales, zeros);
    case Dtype::f64:
      return quantize<Dtype::f64>(layout, choice, in, packed, scales, zeros);
    default:
      return quantize<Dtype::f32>(layout, choice, in, packed, scales, zeros);
  }
}

}  // namespace ingot::INGOT_ISA
