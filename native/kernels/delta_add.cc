// out = round(base + d) and, if requested, back = round(out - d): differences are decoded to f32 a block at a time, which
// stays in the first-level cache, added in f32, and rounded once. `out` may be `base`.
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

// Processes all elements from `from` on; `decode(start, count, d)` writes the next differences.
template <Dtype kDtype, class Decode>
void add_all(const Addition& addition, std::size_t from, const Decode& decode) {
  using T = TypeOf<kDtype>;
  const T* base = static_cast<const T*>(addition.base);
  T *out = static_cast<T*>(addition.out), *back = static_cast<T*>(addition.back);
  alignas(64) float d[kBlock];
  for (std::size_t start = from; start < addition.count; start += kBlock) {
    const std::size_t n = addition.count - start < kBlock ? addition.count - start : kBlock;
    decode(start, n, d);
    if (addition.less)
      add_some<kDtype, true>(d, base + start, n, out + start);
    else
      add_some<kDtype, false>(d, base + start, n, out + start);
    if (back) add_some<kDtype, true>(d, out + start, n, back + start);
  }
}

template <class Decode>
void add_typed(const Addition& addition, const Decode& decode, std::size_t from = 0) {
  switch (addition.type) {
    case Dtype::f32:
      return add_all<Dtype::f32>(addition, from, decode);
    case Dtype::f16:
      return add_all<Dtype::f16>(addition, from, decode);
    case Dtype::bf16:
      return add_all<Dtype::bf16>(addition, from, decode);
    case Dtype::f64:
      return;
  }
}

// A bit for each of 32 elements, set if it differs.
template <class T>
inline std::uint32_t differing(const T* old, const T* fresh) {
  std::uint32_t result = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2)
    return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(fresh));
  if constexpr (sizeof(T) == 4)
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(fresh)) |
           static_cast<std::uint32_t>(
               _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(old + 16), _mm512_loadu_si512(fresh + 16)))
               << 16;
#elif defined(__AVX2__)
  const auto equal = [&](std::size_t index) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + index));
    const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fresh + index));
    return sizeof(T) == 2 ? _mm256_cmpeq_epi16(first, other) : _mm256_cmpeq_epi32(first, other);
  };
  if constexpr (sizeof(T) == 2) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal(0), equal(16)), 0b11011000);
    return ~static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
  if constexpr (sizeof(T) == 4) {
    for (std::size_t index = 0; index < 32; index += 8)
      result |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal(index)))) << index;
    return ~result;
  }
#endif
  for (std::size_t i = 0; i < 32; ++i) result |= std::uint32_t{old[i] != fresh[i]} << i;
  return result;
}

template <class T>
std::size_t changed(const T* old, const T* fresh, std::size_t n, std::int64_t* gaps, T* steps, std::size_t room) {
  std::size_t result = 0, i = 0;
  std::int64_t last = -1;
  const auto note = [&](std::size_t index) {
    gaps[result] = static_cast<std::int64_t>(index) - last;
    steps[result++] = static_cast<T>(fresh[index] - old[index]);
    last = static_cast<std::int64_t>(index);
  };
  for (; i + 32 <= n; i += 32) {
    std::uint32_t hits = differing(old + i, fresh + i);
    if (static_cast<std::size_t>(std::popcount(hits)) > room - result) return room + 1;
    for (; hits; hits &= hits - 1) note(i + static_cast<std::size_t>(std::countr_zero(hits)));
  }
  for (; i < n; ++i) {
    if (old[i] == fresh[i]) continue;
    if (result == room) return room + 1;
    note(i);
  }
  return result;
}

// Writes the differences of `n` elements from `start` on, at most a block's.
void expand_signs(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols, std::size_t start,
                  std::size_t n, float* d) {
  alignas(64) std::uint32_t words[kBlock];
  for (std::size_t index = start; index < start + n;) {
    const std::size_t row = index / cols, end = (row + 1) * cols, stop = end < start + n ? end : start + n;
    sign_row(bits, first + index, std::bit_cast<std::uint32_t>(scales[row]), stop - index, words);
    std::memcpy(d + (index - start), words, (stop - index) * sizeof *d);
    index = stop;
  }
}

// Like add_all, for bf16: rows that begin at a byte are added in registers; other rows, and the ends of rows, in
// blocks.
template <bool kLess>
void add_sign_rows(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols,
                   const Addition& addition) {
  const auto* base = static_cast<const std::uint16_t*>(addition.base);
  auto *out = static_cast<std::uint16_t*>(addition.out), *back = static_cast<std::uint16_t*>(addition.back);
  alignas(64) float d[kBlock];
  for (std::size_t start = 0; start < addition.count;) {
    const std::size_t row = start / cols, bit = first + start, end = (row + 1) * cols;
    std::size_t stop = addition.count - start < kBlock ? addition.count : start + kBlock;
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
              const Addition& addition) {
  const Pairs<float> pairs(table);
  const float* values = static_cast<const float*>(outliers.values);
  std::size_t next = 0, done = 0;
#if defined(INGOT_EXPANDS)
  done = add_blocks(packed, first, table, outliers, next, gaps, addition);
#endif
  const auto decode = [&](std::size_t start, std::size_t n, float* d) {
    if (!gaps) pairs.expand(packed, first + (start - done), n, d);
    std::size_t index = 0;
    for (; next < outliers.count; ++next) {
      const std::size_t end = static_cast<std::size_t>(outliers.positions[next]) - start;
      if (end >= n) break;
      if (gaps) {
        pairs.expand(packed, first, end - index, d + index);
        first += end - index;
      }
      d[end] = values[next];
      index = end + 1;
    }
    if (gaps) {
      pairs.expand(packed, first, n - index, d + index);
      first += n - index;
    }
  };
  add_typed(addition, decode, done);
}

void sign_add(const std::uint8_t* bits, std::size_t first, const float* scales, std::size_t cols,
              const Addition& addition) {
  if (addition.type == Dtype::bf16)
    return addition.less ? add_sign_rows<true>(bits, first, scales, cols, addition)
                         : add_sign_rows<false>(bits, first, scales, cols, addition);
  add_typed(addition,
            [&](std::size_t start, std::size_t n, float* d) { expand_signs(bits, first, scales, cols, start, n, d); });
}

void placed_add(const Placed& values, const Addition& addition) {
  switch (addition.type) {
    case Dtype::f32:
      return addition.less ? add_placed<Dtype::f32, true>(values, addition)
                           : add_placed<Dtype::f32, false>(values, addition);
    case Dtype::f16:
      return addition.less ? add_placed<Dtype::f16, true>(values, addition)
                           : add_placed<Dtype::f16, false>(values, addition);
    case Dtype::bf16:
      return addition.less ? add_placed<Dtype::bf16, true>(values, addition)
                           : add_placed<Dtype::bf16, false>(values, addition);
    case Dtype::f64:
      return;
  }
}

void differences(const Differences& differences, float* out) {
  by_blocks(differences, 0, differences.count, [&](std::size_t start, std::size_t n, const float* values) {
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
