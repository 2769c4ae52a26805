// Adds differences with codes of 4 bits, sixty-four elements at a time, on processors with a masked byte expansion
// (VBMI2): the codes of a block are contiguous, and are expanded to the positions of the elements that are not
// outliers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/wdelta.h"

#include "kernels/delta_add_sums.h"
#include "kernels/floats.h"

// Some AVX-512 processors lack these instructions: the functions have a target attribute, and the processor is checked
// at run time.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define INGOT_EXPANDS 1
// GCC 12 takes the undefined vectors inside of its own intrinsics for a mistake (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define INGOT_EXPAND __attribute__((target("avx512vbmi,avx512vbmi2,popcnt,bmi2")))

namespace ingot::INGOT_ISA {
namespace {

inline bool expands() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"); }

constexpr std::size_t kWide = 64, kExpanded = kBlock;  // elements of a register of codes, and of a block
constexpr std::size_t kAhead = 64;                   // bytes that may be read from a code on

// The first bit of each code in the eight bytes of its group: the first code in high bits, or in low ones.
struct Shifts {
  alignas(64) std::uint8_t entries[2][64];
  constexpr Shifts() : entries() {
    for (int parity = 0; parity < 2; ++parity)
      for (int i = 0; i < 64; ++i) {
        const int code = i % 8 + parity;
        entries[parity][i] = static_cast<std::uint8_t>(code / 2 * 8 + (code % 2 ? 0 : 4));
      }
  }
};
constexpr Shifts kShifts;

// The next codes of a stream, as the low four bits of a byte for each set bit of `places`; 0 elsewhere.
INGOT_EXPAND inline __m512i codes_at(const std::uint8_t* packed, std::size_t first, std::uint64_t positions) {
  // four bytes hold eight codes
  const __m512i bit_of_lane = _mm512_setr_epi32(0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8);
  const __m512i bytes = _mm512_maskz_permutexvar_epi32(0xffff, bit_of_lane, _mm512_loadu_si512(packed + first / 2));
  const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_load_si512(kShifts.entries[first % 2]), bytes);
  return _mm512_maskz_expand_epi8(positions, codes);
}

// The values of sixteen codes. Only the low four bits of a lane are used.
inline __m512 looked_up(__m512i codes, __m512 table) { return _mm512_maskz_permutexvar_ps(0xffff, codes, table); }

struct Sixteens {
  __m512i entries[4];
};

inline Sixteens sixteens(__m512i codes) {
  return {{_mm512_cvtepu8_epi32(_mm512_castsi512_si128(codes)),
           _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 1)),
           _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2)),
           _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 3))}};
}

template <bool kLess>
inline __m512 plus(__m512 base, __m512 by) {
  return kLess ? _mm512_sub_ps(base, by) : _mm512_add_ps(by, base);
}

// number_to_bf16, in the high half of each lane.
inline __m512i rounded_high(__m512 sum) {
  const __m512i bits = _mm512_castps_si512(sum);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(up, odd, up, _mm512_set1_epi32(1));
}

// Sixty-four sums of bf16, even and odd elements separately. Writes nothing and returns false if one is a NaN.
template <bool kLess>
inline bool add_halves(__m512i codes, __m512 table, const std::uint16_t* base, std::uint16_t* out) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i entries[2] = {_mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)),
                         _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1))};
  __m512 even[2], odd[2];
  for (std::size_t half = 0; half < 2; ++half) {
    const __m512i from = _mm512_loadu_si512(base + 32 * half);
    even[half] = plus<kLess>(_mm512_castsi512_ps(_mm512_slli_epi32(from, 16)), looked_up(entries[half], table));
    odd[half] = plus<kLess>(_mm512_castsi512_ps(_mm512_and_si512(from, high)),
                            looked_up(_mm512_srli_epi32(entries[half], 16), table));
  }
  if (_mm512_cmp_ps_mask(even[0], odd[0], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(even[1], odd[1], _CMP_UNORD_Q))
    return false;
  for (std::size_t half = 0; half < 2; ++half) {
    const __m512i low = _mm512_srli_epi32(rounded_high(even[half]), 16);
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    _mm512_storeu_si512(out + 32 * half, _mm512_ternarylogic_epi32(low, rounded_high(odd[half]), high, kOrAnd));
  }
  return true;
}

template <Dtype kDtype>
inline __m512 load_sixteen(const TypeOf<kDtype>* from) {
  if constexpr (kDtype == Dtype::f32)
    return _mm512_loadu_ps(from);
  else
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// As add_halves, of any type.
template <Dtype kDtype, bool kLess>
inline bool add_wide(__m512i codes, __m512 table, const TypeOf<kDtype>* base, TypeOf<kDtype>* out) {
  if constexpr (kDtype == Dtype::bf16) {
    return add_halves<kLess>(codes, table, base, out);
  } else {
    const Sixteens codes_of = sixteens(codes);
    __m512 sums[4];
    for (std::size_t i = 0; i < 4; ++i)
      sums[i] = plus<kLess>(load_sixteen<kDtype>(base + 16 * i), looked_up(codes_of.entries[i], table));
    if (_mm512_cmp_ps_mask(sums[0], sums[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(sums[2], sums[3], _CMP_UNORD_Q))
      return false;
    for (std::size_t i = 0; i < 4; ++i)
      if constexpr (kDtype == Dtype::f32)
        _mm512_storeu_ps(out + 16 * i, sums[i]);
      else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i), store_sixteen<kDtype>(sums[i]));
    return true;
  }
}

// Like add_wide, one by one, if a sum is a NaN.
template <Dtype kDtype, bool kLess>
[[gnu::noinline]] void add_each(__m512i codes, __m512 table, const TypeOf<kDtype>* base, TypeOf<kDtype>* out) {
  alignas(64) std::uint8_t code[kWide];
  alignas(64) float entries[16];
  _mm512_store_si512(code, codes);
  _mm512_store_ps(entries, table);
  for (std::size_t i = 0; i < kWide; ++i) {
    const float wide = Element<kDtype>::load(base[i]), by = entries[code[i] & 15];
    out[i] = Element<kDtype>::store(kLess ? sum_of<true>(wide, by) : sum_of<false>(by, wide));
  }
}

template <Dtype kDtype, bool kLess>
inline void add_codes(__m512i codes, __m512 table, const TypeOf<kDtype>* base, TypeOf<kDtype>* out) {
  if (!add_wide<kDtype, kLess>(codes, table, base, out)) [[unlikely]]
    add_each<kDtype, kLess>(codes, table, base, out);
}

// The outliers of a block. Their sums are computed before the others are written, because `out` may be `base`.
template <class T>
struct Apart {
  std::uint64_t others[kExpanded / kWide];  // a bit for each element that is not an outlier
  std::size_t count;
  std::uint16_t indices[kExpanded];
  alignas(64) float by[kExpanded];
  alignas(64) T base[kExpanded], out[kExpanded], back[kExpanded];
};

template <Dtype kDtype, bool kLess>
void set_apart(const Placed& outliers, std::size_t next, std::size_t start, const TypeOf<kDtype>* base, bool back,
               Apart<TypeOf<kDtype>>& apart) {
  const float* values = static_cast<const float*>(outliers.values) + next;
  const std::int64_t* positions = outliers.positions + next;
  const std::size_t remaining = outliers.count - next;
  std::memset(apart.others, 0xff, sizeof apart.others);
  std::size_t n = 0;
  for (; n < remaining; ++n) {
    const std::size_t index = static_cast<std::size_t>(positions[n]) - start;
    if (index >= kExpanded) break;
    apart.others[index / kWide] &= ~(std::uint64_t{1} << index % kWide);
    apart.indices[n] = static_cast<std::uint16_t>(index);
    apart.base[n] = base[index];
    apart.by[n] = values[n];
  }
  apart.count = n;
  for (; n % 16; ++n) apart.base[n] = 0, apart.by[n] = 0;  // whole registers
  add_some<kDtype, kLess>(apart.by, apart.base, n, apart.out);
  if (back) add_some<kDtype, true>(apart.by, apart.out, n, apart.back);
}

// Adds complete blocks whose reads stay within the codes; advances `first` and `next` past them. Returns the number of
// added elements.
template <Dtype kDtype, bool kLess>
INGOT_EXPAND std::size_t add_expanded(const std::uint8_t* packed, std::size_t& first, const float* table,
                                      const Placed& outliers, std::size_t& next, bool gaps, const Addition& addition) {
  using T = TypeOf<kDtype>;
  const T* base = static_cast<const T*>(addition.base);
  T *out = static_cast<T*>(addition.out), *back = static_cast<T*>(addition.back);
  const std::size_t last = (first + addition.count - (gaps ? outliers.count : 0) + 1) / 2;  // bytes of codes
  const std::uint64_t all = gaps ? 0 : ~std::uint64_t{0};
  const __m512 values = _mm512_loadu_ps(table);
  Apart<T> apart;
  std::size_t start = 0, code = first;
  for (; start + kExpanded <= addition.count && (code + kExpanded) / 2 + kAhead <= last; start += kExpanded) {
    set_apart<kDtype, kLess>(outliers, next, start, base + start, back != nullptr, apart);
    for (std::size_t index = start; index < start + kExpanded; index += kWide) {
      const std::uint64_t positions = apart.others[(index - start) / kWide] | all;
      const __m512i codes = codes_at(packed, code, positions);
      code += static_cast<std::size_t>(_mm_popcnt_u64(positions));
      for (std::size_t line = 0; line < kWide; line += 64 / sizeof(T))  // of the next block, for its outliers
        _mm_prefetch(reinterpret_cast<const char*>(base + index + line) + kExpanded * sizeof(T), _MM_HINT_T0);
      add_codes<kDtype, kLess>(codes, values, base + index, out + index);
      if (back) add_codes<kDtype, true>(codes, values, out + index, back + index);
    }
    for (std::size_t i = 0; i < apart.count; ++i) out[start + apart.indices[i]] = apart.out[i];
    if (back)
      for (std::size_t i = 0; i < apart.count; ++i) back[start + apart.indices[i]] = apart.back[i];
    next += apart.count;
  }
  first = code;
  return start;
}

// The same for a type known at run time; does nothing on processors without the instructions.
inline std::size_t add_blocks(const std::uint8_t* packed, std::size_t& first, const float* table,
                              const Placed& outliers, std::size_t& next, bool gaps, const Addition& addition) {
  if (!expands()) return 0;
  const auto run = [&]<Dtype kDtype>() {
    return addition.less ? add_expanded<kDtype, true>(packed, first, table, outliers, next, gaps, addition)
                     : add_expanded<kDtype, false>(packed, first, table, outliers, next, gaps, addition);
  };
  if (addition.type == Dtype::f16) return run.template operator()<Dtype::f16>();
  if (addition.type == Dtype::bf16) return run.template operator()<Dtype::bf16>();
  return run.template operator()<Dtype::f32>();
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
