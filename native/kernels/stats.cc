// Sums of squares, products and differences of two arrays (core/stats.h).
#include "core/stats.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/float_vectors.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 256;
constexpr std::size_t kLanes = 8;
constexpr std::int64_t kRest = 0x7fffffffffffffff;  // bits of a double, without its sign

constexpr std::size_t kDoubles = sizeof(Doubles) / sizeof(double);
constexpr std::size_t kVectors = kLanes / kDoubles;  // vectors that hold the eight partial sums

struct Sums {
  Doubles squared_error[kVectors] = {};
  Doubles squared_reference[kVectors] = {};
  Doubles squared_other[kVectors] = {};
  Doubles dot[kVectors] = {};
  Doubles max_abs[kVectors] = {};
  Longs same[kVectors] = {};
};

// The element type of the terms: f32 for shorter types, otherwise f64.
template <Dtype kOne, Dtype kTwo>
using Wide = std::conditional_t<kOne == Dtype::f64 || kTwo == Dtype::f64, double, float>;

template <Dtype kDtype, class T>
void widen(const void* source, std::size_t start, std::size_t n, T* __restrict out) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(source) + start;
  if constexpr (kDtype == Dtype::f64) {
    for (std::size_t i = 0; i < n; ++i) out[i] = in[i];
  } else if constexpr (std::is_same_v<T, float>) {
    load_block<kDtype>(in, n, out);
  } else {
    alignas(64) float block[kBlock];
    load_block<kDtype>(in, n, block);
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<double>(block[i]);
  }
}

inline Doubles load(const double* from) {
  Doubles result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

inline Doubles load(const float* from) { return load_doubles(from); }

// `a > b ? a : b`, which compilers translate to two instructions.
inline Doubles larger(Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_pd(0xff, a, b);
#elif defined(__AVX__)
  return _mm256_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}

// sum + a * b. The product of two f32 values is exact in f64, so there is one rounding with and without fusing.
template <class T>
Doubles plus_product(Doubles sum, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm512_fmadd_pd(a, b, sum);
#elif defined(__FMA__)
  if constexpr (std::is_same_v<T, float>) return _mm256_fmadd_pd(a, b, sum);
#endif
  return sum + a * b;
}

// Adds `n` pairs, a multiple of kLanes; returns false, and leaves `sums` unchanged, if a value is not finite. Without
// kAll it adds only squared errors. Sums of squares of f32 values cannot overflow, so a finite sum proves that all
// values are finite. Partial sums are computed one vector after the other, because the registers do not hold two of
// each.
template <bool kAll, class T>
bool add(Sums& sums, const T* first, const T* second, std::size_t n) {
  Sums now;
  Longs special{};
  for (std::size_t v = 0; v < kVectors; ++v) {
    Doubles squared_error = sums.squared_error[v], squared_reference = sums.squared_reference[v];
    Doubles squared_other = sums.squared_other[v], dot = sums.dot[v], max_abs = sums.max_abs[v];
    Longs same = sums.same[v];
    for (std::size_t i = v * kDoubles; i < n; i += kLanes) {
      const Doubles r = load(first + i), x = load(second + i), error = r - x;
      if constexpr (std::is_same_v<T, double>) special |= (r - r != 0) | (x - x != 0);  // Inf - Inf and NaN - NaN are NaN
      squared_error += error * error;
      if constexpr (!kAll) continue;
      same -= reinterpret_cast<Longs>(r) == reinterpret_cast<Longs>(x);
      squared_reference = plus_product<T>(squared_reference, r, r);
      squared_other = plus_product<T>(squared_other, x, x);
      dot = plus_product<T>(dot, r, x);
      max_abs = larger(reinterpret_cast<Doubles>(reinterpret_cast<Longs>(error) & kRest), max_abs);
    }
    if constexpr (std::is_same_v<T, float>) {
      const Doubles squares = kAll ? squared_reference + squared_other : squared_error;
      special |= squares - squares != 0;
    }
    now.squared_error[v] = squared_error;
    if constexpr (!kAll) continue;
    now.squared_reference[v] = squared_reference, now.squared_other[v] = squared_other, now.dot[v] = dot;
    now.max_abs[v] = max_abs, now.same[v] = same;
  }
  for (std::size_t lane = 0; lane < kDoubles; ++lane)
    if (special[lane]) return false;
  if constexpr (kAll)
    sums = now;
  else
    std::memcpy(sums.squared_error, now.squared_error, sizeof now.squared_error);
  return true;
}

// Excludes pairs that are not finite from the sums, and counts them.
template <class T>
void set_aside(T* first, T* second, std::size_t n, PairStats& stats) {
  using Bits = std::conditional_t<std::is_same_v<T, float>, std::uint32_t, std::uint64_t>;
  constexpr Bits kInfinity = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  constexpr Bits kMagnitude = ~Bits{0} >> 1;
  for (std::size_t i = 0; i < n; ++i) {
    const Bits a = std::bit_cast<Bits>(first[i]), b = std::bit_cast<Bits>(second[i]);
    if ((a & kMagnitude) < kInfinity && (b & kMagnitude) < kInfinity) continue;
    const bool same = a == b || ((a & kMagnitude) > kInfinity && (b & kMagnitude) > kInfinity);
    stats.incomparable += same ? 0 : 1;
    stats.different += same ? 0 : 1;
    first[i] = second[i] = 0;
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
  alignas(64) Wide<kOne, kTwo> first[kBlock], second[kBlock];
  for (std::size_t start = 0; start < n; start += kBlock) {
    std::size_t count = n - start < kBlock ? n - start : kBlock;
    widen<kOne>(reference, start, count, first);
    widen<kTwo>(other, start, count, second);
    stats.finite += count;
    for (; count % kLanes; ++count) first[count] = second[count] = 0;
    stats.different += count;  // minus the equal ones
    if (!add<kAll>(sums, first, second, count)) {
      set_aside(first, second, count, stats);
      add<kAll>(sums, first, second, count);
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const double largest = sums.max_abs[lane / kDoubles][lane % kDoubles];
    stats.max_abs = largest > stats.max_abs ? largest : stats.max_abs;
    stats.different -= static_cast<std::size_t>(sums.same[lane / kDoubles][lane % kDoubles]);
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
PairStats measure_any(const void* reference, Dtype first, const void* other, Dtype second, std::size_t n) {
  switch (first) {
    case Dtype::f16:
      return measure_to<kAll, Dtype::f16>(reference, other, second, n);
    case Dtype::bf16:
      return measure_to<kAll, Dtype::bf16>(reference, other, second, n);
    case Dtype::f64:
      return measure_to<kAll, Dtype::f64>(reference, other, second, n);
    default:
      return measure_to<kAll, Dtype::f32>(reference, other, second, n);
  }
}

}  // namespace

PairStats pair_stats(const void* reference, Dtype first, const void* other, Dtype second, std::size_t n) {
  return measure_any<true>(reference, first, other, second, n);
}

double pair_error(const void* reference, Dtype first, const void* other, Dtype second, std::size_t n) {
  return measure_any<false>(reference, first, other, second, n).squared_error;
}

}  // namespace ingot::INGOT_ISA
