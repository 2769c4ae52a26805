// out = round(base + d) and, where it is asked for, back = round(out - d): differences are decoded to f32 a block at a
// time, which stays in the first-level cache, added in f32, and rounded once. `out` may be `base`.
#include "kernels/delta_add.h"

#include <bit>
#include <cstring>

#include "kernels/delta_add_expand.h"
#include "kernels/delta_add_placed.h"
#include "kernels/delta_add_signs.h"
#include "kernels/delta_add_sums.h"
#include "kernels/floats.h"
#include "kernels/wdelta_codes.h"
#include "kernels/wdelta_differences.h"

namespace ingot::INGOT_ISA {
namespace {

// Runs through all elements from `from` on; `decode(start, count, d)` writes the next differences.
template <Dtype kDtype, class Decode>
void add_all(const Addition& what, std::size_t from, const Decode& decode) {
  using T = TypeOf<kDtype>;
  const T* base = static_cast<const T*>(what.base);
  T *out = static_cast<T*>(what.out), *back = static_cast<T*>(what.back);
  alignas(64) float d[kBlock];
  for (std::size_t start = from; start < what.count; start += kBlock) {
    const std::size_t n = what.count - start < kBlock ? what.count - start : kBlock;
    decode(start, n, d);
    if (what.less)
      add_some<kDtype, true>(d, base + start, n, out + start);
    else
      add_some<kDtype, false>(d, base + start, n, out + start);
    if (back) add_some<kDtype, true>(d, out + start, n, back + start);
  }
}

template <class Decode>
void add_typed(const Addition& what, const Decode& decode, std::size_t from = 0) {
  switch (what.type) {
    case Dtype::f32:
      return add_all<Dtype::f32>(what, from, decode);
    case Dtype::f16:
      return add_all<Dtype::f16>(what, from, decode);
    case Dtype::bf16:
      return add_all<Dtype::bf16>(what, from, decode);
    case Dtype::f64:
      return;
  }
}

// A bit for each of 32 elements that differ.
template <class T>
inline std::uint32_t differing(const T* old, const T* fresh) {
  std::uint32_t found = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2)
    return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(fresh));
  if constexpr (sizeof(T) == 4)
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(fresh)) |
           static_cast<std::uint32_t>(
               _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(old + 16), _mm512_loadu_si512(fresh + 16)))
               << 16;
#elif defined(__AVX2__)
  const auto equal = [&](std::size_t at) {
    const __m256i one = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + at));
    const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fresh + at));
    return sizeof(T) == 2 ? _mm256_cmpeq_epi16(one, other) : _mm256_cmpeq_epi32(one, other);
  };
  if constexpr (sizeof(T) == 2) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal(0), equal(16)), 0b11011000);
    return ~static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
  if constexpr (sizeof(T) == 4) {
    for (std::size_t at = 0; at < 32; at += 8)
      found |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal(at)))) << at;
    return ~found;
  }
#endif
  for (std::size_t i = 0; i < 32; ++i) found |= std::uint32_t{old[i] != fresh[i]} << i;
  return found;
}

template <class T>
std::size_t changed(const T* old, const T* fresh, std::size_t n, std::int64_t* gaps, T* steps, std::size_t room) {
  std::size_t found = 0, i = 0;
  std::int64_t last = -1;
  const auto note = [&](std::size_t at) {
    gaps[found] = static_cast<std::int64_t>(at) - last;
    steps[found++] = static_cast<T>(fresh[at] - old[at]);
    last = static_cast<std::int64_t>(at);
  };
  for (; i + 32 <= n; i += 32) {
    std::uint32_t hits = differing(old + i, fresh + i);
    if (static_cast<std::size_t>(std::popcount(hits)) > room - found) return room + 1;
    for (; hits; hits &= hits - 1) note(i + static_cast<std::size_t>(std::countr_zero(hits)));
  }
  for (; i < n; ++i) {
    if (old[i] == fresh[i]) continue;
    if (found == room) return room + 1;
    note(i);
  }
  return found;
}

// Writes the differences of `n` elements from `start` on, at most a block's.
void expand_signs(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols, std::size_t start,
                  std::size_t n, float* d) {
  alignas(64) std::uint32_t words[kBlock];
  for (std::size_t at = start; at < start + n;) {
    const std::size_t row = at / cols, end = (row + 1) * cols, stop = end < start + n ? end : start + n;
    sign_row(bits, first + at, std::bit_cast<std::uint32_t>(scales[row]), stop - at, words);
    std::memcpy(d + (at - start), words, (stop - at) * sizeof *d);
    at = stop;
  }
}

// As add_all, of bf16: rows that begin with a byte in registers, what is left of them and others by blocks.
template <bool kLess>
void add_sign_rows(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols, const Addition& what) {
  const auto* base = static_cast<const std::uint16_t*>(what.base);
  auto *out = static_cast<std::uint16_t*>(what.out), *back = static_cast<std::uint16_t*>(what.back);
  alignas(64) float d[kBlock];
  for (std::size_t start = 0; start < what.count;) {
    const std::size_t row = start / cols, bit = first + start, end = (row + 1) * cols;
    std::size_t stop = what.count - start < kBlock ? what.count : start + kBlock;
    const float scale = scales[row];
    if (bit % 8 == 0 && end - start >= kSigns && scale == scale) {
      std::uint16_t* again = back ? back + start : nullptr;
      start += add_signs<kLess>(bits + bit / 8, scale, base + start, end - start, out + start, again);
      stop = end;
    }
    const std::size_t n = stop - start;
    expand_signs(bits, first, scales, cols, start, n, d);
    add_some<Dtype::bf16, kLess>(d, base + start, n, out + start);
    if (back) add_some<Dtype::bf16, true>(d, out + start, n, back + start);
    start = stop;
  }
}

}  // namespace

void int4_add(const std::uint8_t* packed, std::size_t first, const float* table, const Placed& outliers, bool gaps,
              const Addition& what) {
  const Pairs<float> pairs(table);
  const float* values = static_cast<const float*>(outliers.values);
  std::size_t next = 0, done = 0;
#if defined(INGOT_EXPANDS)
  done = add_blocks(packed, first, table, outliers, next, gaps, what);
#endif
  const auto decode = [&](std::size_t start, std::size_t n, float* d) {
    if (!gaps) pairs.expand(packed, first + (start - done), n, d);
    std::size_t at = 0;
    for (; next < outliers.count; ++next) {
      const std::size_t end = static_cast<std::size_t>(outliers.positions[next]) - start;
      if (end >= n) break;
      if (gaps) {
        pairs.expand(packed, first, end - at, d + at);
        first += end - at;
      }
      d[end] = values[next];
      at = end + 1;
    }
    if (gaps) {
      pairs.expand(packed, first, n - at, d + at);
      first += n - at;
    }
  };
  add_typed(what, decode, done);
}

void sign_add(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols,
              const Addition& what) {
  if (what.type == Dtype::bf16)
    return what.less ? add_sign_rows<true>(bits, first, scales, cols, what) : add_sign_rows<false>(bits, first, scales, cols, what);
  add_typed(what, [&](std::size_t start, std::size_t n, float* d) { expand_signs(bits, first, scales, cols, start, n, d); });
}

void placed_add(const Placed& values, const Addition& what) {
  switch (what.type) {
    case Dtype::f32:
      return what.less ? add_placed<Dtype::f32, true>(values, what) : add_placed<Dtype::f32, false>(values, what);
    case Dtype::f16:
      return what.less ? add_placed<Dtype::f16, true>(values, what) : add_placed<Dtype::f16, false>(values, what);
    case Dtype::bf16:
      return what.less ? add_placed<Dtype::bf16, true>(values, what) : add_placed<Dtype::bf16, false>(values, what);
    case Dtype::f64:
      return;
  }
}

void differences(const Differences& of, float* out) {
  by_blocks(of, 0, of.count, [&](std::size_t start, std::size_t n, const float* values) {
    std::memcpy(out + start, values, n * sizeof *values);
  });
}

std::size_t changed_words(const void* old, const void* fresh, std::size_t n, int width, std::int64_t* gaps, void* steps,
                          std::size_t room) {
  const auto run = [&]<class T>(T) {
    return changed(static_cast<const T*>(old), static_cast<const T*>(fresh), n, gaps, static_cast<T*>(steps), room);
  };
  switch (width) {
    case 1:
      return run(std::uint8_t{});
    case 2:
      return run(std::uint16_t{});
    case 4:
      return run(std::uint32_t{});
    default:
      return run(std::uint64_t{});
  }
}

}  // namespace ingot::INGOT_ISA
