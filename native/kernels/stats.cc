// Sums of squares, products and differences of two arrays (core/stats.h).
#include "core/stats.h"

#include <cstring>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 256;
constexpr std::size_t kLanes = 8;
constexpr std::uint64_t kSign = 0x8000000000000000ull;
constexpr std::uint64_t kInfinity = 0x7ff0000000000000ull;

constexpr std::size_t kWidth = sizeof(Doubles) / sizeof(double);
constexpr std::size_t kVectors = kLanes / kWidth;  // of them hold the eight partial sums

struct Sums {
  Doubles squared_error[kVectors] = {};
  Doubles squared_reference[kVectors] = {};
  Doubles squared_other[kVectors] = {};
  Doubles dot[kVectors] = {};
  Doubles max_abs[kVectors] = {};
  Longs different[kVectors] = {};
};

template <Dtype kDtype>
void widen(const void* source, std::size_t start, std::size_t n, double* __restrict out) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(source) + start;
  if constexpr (kDtype == Dtype::f64) {
    for (std::size_t i = 0; i < n; ++i) out[i] = in[i];
  } else {
    alignas(64) float block[kBlock];
    load_block<kDtype>(in, n, block);
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<double>(block[i]);
  }
}

// Adds `n` pairs, a multiple of kLanes; returns false and leaves `sums` alone where one is not finite. Without kAll it
// adds squared errors alone.
template <bool kAll>
bool add(Sums& sums, const double* one, const double* two, std::size_t n) {
  Sums now = sums;
  Longs special{};
  for (std::size_t i = 0; i < n; i += kLanes)
    for (std::size_t v = 0; v < kVectors; ++v) {
      Doubles r, x;
      std::memcpy(&r, one + i + v * kWidth, sizeof r);
      std::memcpy(&x, two + i + v * kWidth, sizeof x);
      const Doubles error = r - x, magnitude = error < 0 ? -error : error;
      special |= (r - r != 0) | (x - x != 0);  // Inf - Inf and NaN - NaN are NaN
      now.squared_error[v] += error * error;
      if constexpr (!kAll) continue;
      now.different[v] -= reinterpret_cast<Longs>(r) != reinterpret_cast<Longs>(x);
      now.squared_reference[v] += r * r;
      now.squared_other[v] += x * x;
      now.dot[v] += r * x;
      now.max_abs[v] = magnitude > now.max_abs[v] ? magnitude : now.max_abs[v];
    }
  for (std::size_t lane = 0; lane < kWidth; ++lane)
    if (special[lane]) return false;
  sums = now;
  return true;
}

// Takes pairs that are not finite out of the sums, and counts them.
void set_aside(double* one, double* two, std::size_t n, PairStats& stats) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t a = std::bit_cast<std::uint64_t>(one[i]), b = std::bit_cast<std::uint64_t>(two[i]);
    if ((a & ~kSign) < kInfinity && (b & ~kSign) < kInfinity) continue;
    const bool same = a == b || ((a & ~kSign) > kInfinity && (b & ~kSign) > kInfinity);
    stats.odd += same ? 0 : 1;
    stats.different += same ? 0 : 1;
    one[i] = two[i] = 0;
    --stats.finite;
  }
}

double fold(const Doubles* vectors) {
  double lanes[kLanes];
  std::memcpy(lanes, vectors, sizeof lanes);
  for (std::size_t width = kLanes / 2; width; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

template <bool kAll, Dtype kOne, Dtype kTwo>
PairStats measure(const void* reference, const void* other, std::size_t n) {
  PairStats stats{};
  Sums sums;
  alignas(64) double one[kBlock], two[kBlock];
  for (std::size_t start = 0; start < n; start += kBlock) {
    std::size_t count = n - start < kBlock ? n - start : kBlock;
    widen<kOne>(reference, start, count, one);
    widen<kTwo>(other, start, count, two);
    stats.finite += count;
    for (; count % kLanes; ++count) one[count] = two[count] = 0;
    if (!add<kAll>(sums, one, two, count)) {
      set_aside(one, two, count, stats);
      add<kAll>(sums, one, two, count);
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const double largest = sums.max_abs[lane / kWidth][lane % kWidth];
    stats.max_abs = largest > stats.max_abs ? largest : stats.max_abs;
    stats.different += static_cast<std::size_t>(sums.different[lane / kWidth][lane % kWidth]);
  }
  stats.squared_error = fold(sums.squared_error);
  stats.squared_reference = fold(sums.squared_reference);
  stats.squared_other = fold(sums.squared_other);
  stats.dot = fold(sums.dot);
  return stats;
}

template <bool kAll, Dtype kOne>
PairStats measure_to(const void* reference, const void* other, Dtype two, std::size_t n) {
  switch (two) {
    case Dtype::f16:
      return measure<kAll, kOne, Dtype::f16>(reference, other, n);
    case Dtype::bf16:
      return measure<kAll, kOne, Dtype::bf16>(reference, other, n);
    case Dtype::f64:
      return measure<kAll, kOne, Dtype::f64>(reference, other, n);
    default:
      return measure<kAll, kOne, Dtype::f32>(reference, other, n);
  }
}

template <bool kAll>
PairStats measure_any(const void* reference, Dtype one, const void* other, Dtype two, std::size_t n) {
  switch (one) {
    case Dtype::f16:
      return measure_to<kAll, Dtype::f16>(reference, other, two, n);
    case Dtype::bf16:
      return measure_to<kAll, Dtype::bf16>(reference, other, two, n);
    case Dtype::f64:
      return measure_to<kAll, Dtype::f64>(reference, other, two, n);
    default:
      return measure_to<kAll, Dtype::f32>(reference, other, two, n);
  }
}

}  // namespace

PairStats pair_stats(const void* reference, Dtype one, const void* other, Dtype two, std::size_t n) {
  return measure_any<true>(reference, one, other, two, n);
}

double pair_error(const void* reference, Dtype one, const void* other, Dtype two, std::size_t n) {
  return measure_any<false>(reference, one, other, two, n).squared_error;
}

}  // namespace ingot::INGOT_ISA
