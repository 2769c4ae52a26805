// Products of tiles in bf16 (AMX, Intel SDM volume 2, TDPBF16PS). A tile's product adds columns 0, 2, ... 30 of a block
// one after the other, columns 1, 3, ... 31 likewise, then the two sums, then the result to the accumulator: the order
// of `multiply` in affine_gemm_unit.h.
#pragma once
#if defined(__AVX512F__) && defined(__linux__)
#define INGOT_AMX 1
#include <immintrin.h>

#include "kernels/affine_gemm_unit.h"

namespace ingot::INGOT_ISA {
namespace {

#define INGOT_TILES __attribute__((target("amx-tile,amx-bf16"), noinline))

constexpr std::size_t kAmxRows = 32;                             // rows of x: two tiles
constexpr std::size_t kAmxTile = 16 * kGemmBlock;                // values in bf16

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, unused[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

INGOT_TILES inline void amx_begin() {
  const TileConfig config;
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

INGOT_TILES inline void amx_end() { _tile_release(); }

// products[32 rows of x, 32 rows of weights] of consecutive blocks; added to the previous values if `more`. The
// compiler cannot see the memory that tiles access.
INGOT_TILES inline void amx_unit(const std::uint16_t* x, const std::uint16_t* q, std::size_t blocks, bool more, bool both,
                                 float* products, std::size_t stride) {
  asm volatile("" : : : "memory");
  float* low = products + 16 * stride;
  stride *= sizeof(float);
  if (more) {
    _tile_loadd(0, products, stride);
    _tile_loadd(1, products + 16, stride);
    if (both) {
      _tile_loadd(2, low, stride);
      _tile_loadd(3, low + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::size_t b = 0; b < blocks; ++b, x += 2 * kAmxTile, q += 2 * kAmxTile) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, q, 128);
    _tile_loadd(7, q + 32, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, x + kAmxTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, products, stride);
  _tile_stored(1, products + 16, stride);
  if (both) {
    _tile_stored(2, low, stride);
    _tile_stored(3, low + 16, stride);
  }
  asm volatile("" : : : "memory");
}

// Groups of a span whose products are in `parts`, one row of x after the other, or in `span.products`; adds them to the
// totals like `add_scaled`.
template <ZeroKind kZero>
void amx_scale(const Span& span, std::size_t rows, std::size_t count, const float* parts, std::size_t stride, std::size_t part) {
  for (std::size_t v = 0; v < kUnit; v += kWidth) {
    Floats scales[kGemmParts], zeros[kGemmParts];
    for (std::size_t g = 0; g < count; ++g) {
      scales[g] = load_floats(span.scales + g * kGemmRows + v);
      if constexpr (kZero != ZeroKind::none) zeros[g] = load_floats(span.zeros + g * kGemmRows + v);
    }
    const auto add_row = [&](std::size_t i, std::size_t groups) {
      float* target = span.totals + i * kGemmRows + v;
      Floats total = load_floats(target);
      for (std::size_t g = 0; g < groups; ++g) {
        const Floats p = load_floats(parts + g * part + i * stride + v);
        if constexpr (kZero == ZeroKind::none) {
          total += scales[g] * p;
        } else {
          const Floats shift = zeros[g] * splat(span.sums[g * kGemmCount + i]);
          total += kZero == ZeroKind::point ? scales[g] * (p - shift) : scales[g] * p + shift;
        }
      }
      store_floats(target, total);
    };
    for (std::size_t i = 0; i < rows; ++i) {
      if (count == kGemmParts) add_row(i, kGemmParts);  // a constant, so that scales stay in registers
      else add_row(i, count);
    }
  }
}

inline void amx_add_groups(Span& span, std::size_t rows, std::size_t count, const float* parts, std::size_t stride,
                           std::size_t part) {
  switch (span.zero) {
    case ZeroKind::point:
      amx_scale<ZeroKind::point>(span, rows, count, parts, stride, part);
      break;
    case ZeroKind::offset:
      amx_scale<ZeroKind::offset>(span, rows, count, parts, stride, part);
      break;
    default:
      amx_scale<ZeroKind::none>(span, rows, count, parts, stride, part);
  }
  span.scales += count * kGemmRows, span.zeros += count * kGemmRows, span.sums += count * kGemmCount;
}

// A span of `rows` rows of x; `parts` is scratch memory for the products of `kGemmParts` short groups.
inline void amx_span(Span span, std::size_t rows, float* parts) {
  const auto* x = reinterpret_cast<const std::uint16_t*>(span.x);
  const auto* q = reinterpret_cast<const std::uint16_t*>(span.q);
  const bool both = rows > kAmxRows / 2, brief = span.per_group < kGemmSpan && kGemmSpan % span.per_group == 0;
  constexpr std::size_t part = kAmxRows * kUnit;
  for (std::size_t b = 0; b < span.blocks;) {
    std::size_t count = 0;
    if (brief) {  // groups that begin and end in the span
      for (; b < span.blocks && count < kGemmParts; ++count) {
        const std::size_t stop = b + span.per_group < span.blocks ? b + span.per_group : span.blocks;
        amx_unit(x + b * 2 * kAmxTile, q + b * 2 * kAmxTile, stop - b, false, both, parts + count * part, kUnit);
        b = stop;
      }
      amx_add_groups(span, rows, count, parts, kUnit, part);
      continue;
    }
    const std::size_t end = b + span.per_group - span.phase, stop = end < span.blocks ? end : span.blocks;
    amx_unit(x + b * 2 * kAmxTile, q + b * 2 * kAmxTile, stop - b, span.phase != 0, both, span.products, kGemmRows);
    span.phase += stop - b;
    b = stop;
    if (span.phase < span.per_group && !(span.last && b == span.blocks)) continue;
    amx_add_groups(span, rows, 1, span.products, kGemmRows, 0);
    span.phase = 0;
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
