// Sums of products of a span of columns, for a few rows of x and a unit of the weights. Packed weights are 32-bit
// words, alternately an even and an odd one: a column in f32 each, or two columns in bf16. Rows of x are unpacked, a
// full span apart; the words of all rows of the unit are contiguous.
#pragma once
#include "kernels/affine_gemm_unpack.h"

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::size_t kTileRows = 6;  // rows of x with sums in registers, of which there are 32
#else
constexpr std::size_t kTileRows = 3;
#endif

// Products in f32: either rounded before the addition, or fused.
template <bool kFused>
struct Columns {
  static constexpr std::size_t kWords = kGemmBlock;  // of a block
  static constexpr std::size_t kAcross = 2;          // vectors of the unit that are added up at a time

  template <std::size_t kRows>
  static void block(const float* x, const float* q, Floats (&sums)[kRows][kAcross]) {
    const auto add = [](const Floats& sum, float value, const Floats& w) {
      return kFused ? fused(splat(value), w, sum) : splat(value) * w + sum;
    };
    Floats even[kRows][kAcross] = {}, odd[kRows][kAcross] = {};
    for (std::size_t remaining = kWords; remaining; remaining -= 2, x += 2, q += 2 * kUnit)
      for (std::size_t v = 0; v < kAcross; ++v) {
        const Floats first = load_floats(q + v * kWidth), second = load_floats(q + kUnit + v * kWidth);
        for (std::size_t m = 0; m < kRows; ++m) {
          even[m][v] = add(even[m][v], x[m * kGemmSpan * kWords], first);
          odd[m][v] = add(odd[m][v], x[m * kGemmSpan * kWords + 1], second);
        }
      }
    for (std::size_t m = 0; m < kRows; ++m)
      for (std::size_t v = 0; v < kAcross; ++v) sums[m][v] = even[m][v] + odd[m][v];
  }
};

#if defined(__AVX512F__)
// Pairs of bf16: the instruction adds the product of the upper halves, rounds, adds that of the lower halves, and
// rounds (Intel SDM volume 2, VDPBF16PS; AMD's processors do the same). x86-64-v4 does not include AVX512_BF16: the
// caller checks the processor. A block is one statement, because GCC 12 copies the registers of smaller ones.
struct Pairs {
  static constexpr std::size_t kWords = kGemmBlock / 2;
  static constexpr std::size_t kAcross = 1;

#define INGOT_ZERO(m)                                       \
  "vpxord %[even" #m "], %[even" #m "], %[even" #m "]\n\t" \
  "vpxord %[odd" #m "], %[odd" #m "], %[odd" #m "]\n\t"
#define INGOT_ADD(m)                                                  \
  "vdpbf16ps 512*" #m "(%[x])%{1to16%}, %%zmm30, %[even" #m "]\n\t" \
  "vdpbf16ps 512*" #m "+4(%[x])%{1to16%}, %%zmm31, %[odd" #m "]\n\t"
#define INGOT_OUT(m) [even##m] "=&v"(even[m]), [odd##m] "=&v"(odd[m])
#define INGOT_BLOCK(zeros, pairs, ...)                                                                      \
  asm volatile(zeros ".rept 8\n\tvmovups (%[q]), %%zmm30\n\tvmovups 128(%[q]), %%zmm31\n\t" pairs                   \
               "add $8, %[x]\n\tadd $256, %[q]\n\t.endr"                                                             \
               : __VA_ARGS__, [x] "+&r"(x), [q] "+&r"(q) : : "xmm30", "xmm31", "cc", "memory")

  template <std::size_t kRows>
  static void block(const float* x, const float* q, Floats (&sums)[kRows][kAcross]) {
    static_assert(kUnit == 32 && kGemmBlock == 32 && kGemmSpan == 8, "as the statement has them");
    Floats even[kRows], odd[kRows];
    if constexpr (kRows == 1)
      INGOT_BLOCK(INGOT_ZERO(0), INGOT_ADD(0), INGOT_OUT(0));
    else if constexpr (kRows == 2)
      INGOT_BLOCK(INGOT_ZERO(0) INGOT_ZERO(1), INGOT_ADD(0) INGOT_ADD(1), INGOT_OUT(0), INGOT_OUT(1));
    else if constexpr (kRows == 3)
      INGOT_BLOCK(INGOT_ZERO(0) INGOT_ZERO(1) INGOT_ZERO(2), INGOT_ADD(0) INGOT_ADD(1) INGOT_ADD(2), INGOT_OUT(0),
                  INGOT_OUT(1), INGOT_OUT(2));
    else if constexpr (kRows == 4)
      INGOT_BLOCK(INGOT_ZERO(0) INGOT_ZERO(1) INGOT_ZERO(2) INGOT_ZERO(3),
                  INGOT_ADD(0) INGOT_ADD(1) INGOT_ADD(2) INGOT_ADD(3), INGOT_OUT(0), INGOT_OUT(1), INGOT_OUT(2),
                  INGOT_OUT(3));
    else if constexpr (kRows == 5)
      INGOT_BLOCK(INGOT_ZERO(0) INGOT_ZERO(1) INGOT_ZERO(2) INGOT_ZERO(3) INGOT_ZERO(4),
                  INGOT_ADD(0) INGOT_ADD(1) INGOT_ADD(2) INGOT_ADD(3) INGOT_ADD(4), INGOT_OUT(0), INGOT_OUT(1),
                  INGOT_OUT(2), INGOT_OUT(3), INGOT_OUT(4));
    else
      INGOT_BLOCK(INGOT_ZERO(0) INGOT_ZERO(1) INGOT_ZERO(2) INGOT_ZERO(3) INGOT_ZERO(4) INGOT_ZERO(5),
                  INGOT_ADD(0) INGOT_ADD(1) INGOT_ADD(2) INGOT_ADD(3) INGOT_ADD(4) INGOT_ADD(5), INGOT_OUT(0),
                  INGOT_OUT(1), INGOT_OUT(2), INGOT_OUT(3), INGOT_OUT(4), INGOT_OUT(5));
    for (std::size_t m = 0; m < kRows; ++m) sums[m][0] = even[m] + odd[m];
  }
#undef INGOT_BLOCK
#undef INGOT_OUT
#undef INGOT_ADD
#undef INGOT_ZERO
};
#endif

// Blocks one after the other. `phase` of the group's blocks are already in `products`, which holds sums of groups that
// continue past the span.
struct Span {
  const float *x, *q;
  std::size_t blocks, phase, per_group;
  bool last;                     // whether rows end with the span
  const float *scales, *zeros;   // of the unit, group after group, `kGemmRows` apart
  const float* sums;             // of x, group after group, `kGemmCount` apart
  float *products, *totals;      // of the unit, row of x after row, `kGemmRows` apart
  ZeroKind zero;
};

// Applies scale and zero: s * P, s * (P - z * X) or s * P + z * X.
template <ZeroKind kZero>
inline Floats scaled(const Floats& p, const Floats& scale, const Floats& zero, const float* sum) {
  if constexpr (kZero == ZeroKind::none) {
    return scale * p;
  } else {
    const Floats shift = zero * splat(*sum);
    return kZero == ZeroKind::point ? scale * (p - shift) : scale * p + shift;
  }
}

// Adds the result to the totals, of some vectors from `v` on, in the order of `sums`, one row of x after the other. It
// is not a loop, so that they stay in registers.
template <ZeroKind kZero, std::size_t kAcross, std::size_t... kSum>
inline void add_scaled(const Span& span, std::size_t v, const Floats* sums, std::index_sequence<kSum...>) {
  float* totals = span.totals + v * kWidth;
  Floats scales[kAcross], zeros[kAcross];
  for (std::size_t i = 0; i < kAcross; ++i) {
    scales[i] = load_floats(span.scales + (v + i) * kWidth);
    if constexpr (kZero != ZeroKind::none) zeros[i] = load_floats(span.zeros + (v + i) * kWidth);
  }
  const auto value = [&](const Floats& p, std::size_t m, std::size_t i) {
    return scaled<kZero>(p, scales[i], zeros[i], span.sums + m);
  };
  const auto add = [&](float* coordinate, const Floats& more) {
    store_floats(coordinate, load_floats(coordinate) + more);
  };
  (add(totals + kSum / kAcross * kGemmRows + kSum % kAcross * kWidth, value(sums[kSum], kSum / kAcross, kSum % kAcross)), ...);
}

// Adds the block's sums to those of its group.
template <std::size_t kRows, std::size_t kAcross, std::size_t... kSum>
inline void add_block(const Span& span, std::size_t v, const Floats (&sums)[kRows][kAcross], bool more, bool ends,
                      std::index_sequence<kSum...> all) {
  float* buffer = span.products + v * kWidth;
  Floats result[] = {sums[kSum / kAcross][kSum % kAcross]...};
  if (more)
    ((result[kSum] = load_floats(buffer + kSum / kAcross * kGemmRows + kSum % kAcross * kWidth) + result[kSum]), ...);
  if (!ends)
    (store_floats(buffer + kSum / kAcross * kGemmRows + kSum % kAcross * kWidth, result[kSum]), ...);
  else if (span.zero == ZeroKind::none)
    add_scaled<ZeroKind::none, kAcross>(span, v, result, all);
  else if (span.zero == ZeroKind::point)
    add_scaled<ZeroKind::point, kAcross>(span, v, result, all);
  else
    add_scaled<ZeroKind::offset, kAcross>(span, v, result, all);
}

// x and sums are passed in registers: copying a span that was just written in parts would have to wait for the store
// queue.
template <class Method, std::size_t kRows>
void multiply(const Span& unit, const float* x, const float* sums_of_x, float* products, float* totals) {
  Span span = unit;
  span.x = x, span.sums = sums_of_x, span.products = products, span.totals = totals;
  for (std::size_t b = 0; b < span.blocks; ++b) {
    const bool more = span.phase != 0, ends = ++span.phase == span.per_group || (span.last && b + 1 == span.blocks);
    for (std::size_t m = 0; m < kRows; ++m)  // the next tile's
      __builtin_prefetch(span.x + ((kRows + m) * kGemmSpan + b) * Method::kWords);
    for (std::size_t v = 0; v < 2; v += Method::kAcross) {
      Floats sums[kRows][Method::kAcross];
      Method::block(span.x + b * Method::kWords, span.q + b * Method::kWords * kUnit + v * kWidth, sums);
      add_block(span, v, sums, more, ends, std::make_index_sequence<kRows * Method::kAcross>{});
    }
    if (!ends) continue;
    span.phase = 0;
    span.scales += kGemmRows, span.zeros += kGemmRows, span.sums += kGemmCount;
  }
}

#if defined(__AVX512F__)
// The same for pairs, one vector of the unit after the other: totals and the sums of the current group stay in
// registers, so a group of one block costs one multiplication and one addition.
template <std::size_t kRows, ZeroKind kZero>
void multiply_pairs(const Span& unit, const float* x, const float* sums_of_x, float* products, float* totals) {
  const bool adds = unit.last || unit.phase + unit.blocks >= unit.per_group;  // whether a group ends
  for (std::size_t v = 0; v < kUnit; v += kWidth, products += kWidth, totals += kWidth) {
    std::size_t phase = unit.phase;
    const float *scales = unit.scales + v, *zeros = unit.zeros + v, *sums = sums_of_x, *q = unit.q + v, *here = x;
    Floats buffer[kRows], total[kRows];
#pragma GCC unroll 6
    for (std::size_t m = 0; m < kRows; ++m) {
      buffer[m] = phase ? load_floats(products + m * kGemmRows) : Floats{};
      total[m] = adds ? load_floats(totals + m * kGemmRows) : Floats{};
    }
    for (std::size_t b = 0; b < unit.blocks; ++b, here += Pairs::kWords, q += Pairs::kWords * kUnit) {
      if (v == 0)
        for (std::size_t m = 0; m < kRows; ++m) __builtin_prefetch(here + (kRows + m) * kGemmSpan * Pairs::kWords);
      Floats result[kRows][1];
      Pairs::block(here, q, result);
#pragma GCC unroll 6
      for (std::size_t m = 0; m < kRows; ++m) buffer[m] = phase ? buffer[m] + result[m][0] : result[m][0];
      if (++phase < unit.per_group && !(unit.last && b + 1 == unit.blocks)) continue;
      const Floats scale = load_floats(scales), zero = kZero == ZeroKind::none ? Floats{} : load_floats(zeros);
#pragma GCC unroll 6
      for (std::size_t m = 0; m < kRows; ++m) total[m] += scaled<kZero>(buffer[m], scale, zero, sums + m);
      phase = 0;
      scales += kGemmRows, zeros += kGemmRows, sums += kGemmCount;
    }
#pragma GCC unroll 6
    for (std::size_t m = 0; m < kRows; ++m) {
      if (phase) store_floats(products + m * kGemmRows, buffer[m]);
      if (adds) store_floats(totals + m * kGemmRows, total[m]);
    }
  }
}
#endif

using MultiplyFn = void (*)(const Span&, const float*, const float*, float*, float*);

#if defined(__AVX512F__)
template <ZeroKind kZero>
MultiplyFn multiply_pairs_of(std::size_t rows) {
  constexpr MultiplyFn kAll[] = {multiply_pairs<1, kZero>, multiply_pairs<2, kZero>, multiply_pairs<3, kZero>,
                                 multiply_pairs<4, kZero>, multiply_pairs<5, kZero>, multiply_pairs<6, kZero>};
  return kAll[rows - 1];
}
#endif

template <class Method>
MultiplyFn multiply_of_rows(std::size_t rows) {
  if constexpr (kTileRows == 6) {
    if (rows == 6) return multiply<Method, 6>;
    if (rows == 5) return multiply<Method, 5>;
    if (rows == 4) return multiply<Method, 4>;
  }
  return rows == 3 ? multiply<Method, 3> : rows == 2 ? multiply<Method, 2> : multiply<Method, 1>;
}

inline MultiplyFn multiply_of(GemmMode mode, [[maybe_unused]] ZeroKind zero, std::size_t rows) {
#if defined(__AVX512F__)
  if (mode == GemmMode::dots && zero == ZeroKind::none) return multiply_pairs_of<ZeroKind::none>(rows);
  if (mode == GemmMode::dots && zero == ZeroKind::point) return multiply_pairs_of<ZeroKind::point>(rows);
  if (mode == GemmMode::dots) return multiply_pairs_of<ZeroKind::offset>(rows);
#endif
  return mode == GemmMode::plain ? multiply_of_rows<Columns<false>>(rows) : multiply_of_rows<Columns<true>>(rows);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
