// Moves values between a dense array and a compact array of the selected ones, by a mask of one bit per element, bit 0
// of a byte first (spec/sparse_mask.md). Elements have 1, 2, 4 or 8 bytes of any meaning.
#include "kernels/gcc_headers.h"
#include <bit>
#include <cstring>

#include "kernels/bits.h"
#include "kernels/kernels.h"
#include "kernels/neon.h"

namespace ingot::INGOT_ISA {
namespace {

inline bool is_selected(const std::uint8_t* mask, std::size_t i) { return mask[i / 8] >> (i % 8) & 1; }

#if defined(__AVX512F__)

// Sixteen elements (eight of 8 bytes) at a time, widened for vpexpandd; needs that many readable values.
template <class T>
inline void expand_some(unsigned bits, const T* values, T* out) {
  if constexpr (sizeof(T) == 8) {
    _mm512_storeu_si512(out, _mm512_maskz_expand_epi64(static_cast<__mmask8>(bits), _mm512_loadu_si512(values)));
  } else if constexpr (sizeof(T) == 4) {
    _mm512_storeu_si512(out, _mm512_maskz_expand_epi32(static_cast<__mmask16>(bits), _mm512_loadu_si512(values)));
  } else if constexpr (sizeof(T) == 2) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    const __m512i placed = _mm512_maskz_expand_epi32(static_cast<__mmask16>(bits), wide);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(placed));
  } else {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    const __m512i placed = _mm512_maskz_expand_epi32(static_cast<__mmask16>(bits), wide);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(placed));
  }
}

template <class T>
constexpr std::size_t kStep = sizeof(T) == 8 ? 8 : 16;

#else

template <class T>
inline void expand_some(unsigned bits, const T* values, T* out) {
#if defined(INGOT_NEON)
  if constexpr (sizeof(T) <= 4) return store_at(values, vld1_u8(kMaskBytes.spread[bits]), out);
#endif
  std::size_t taken = 0;
  for (int i = 0; i < 8; ++i) {
    const unsigned bit = bits >> i & 1;
    out[i] = static_cast<T>(values[taken] & static_cast<T>(-static_cast<T>(bit)));
    taken += bit;
  }
}

template <class T>
constexpr std::size_t kStep = 8;

#endif

inline std::size_t ones(unsigned bits) {
#if defined(INGOT_NEON)  // counts in vector registers only: a look-up is one step
  if (bits < 256) return kMaskBytes.count[bits];
#endif
  return static_cast<std::size_t>(std::popcount(bits));
}

template <class T>
void expand(const std::uint8_t* mask, std::size_t n, const T* values, std::size_t count, T* out) {
  std::size_t i = 0, taken = 0;
  constexpr std::size_t step = kStep<T>;
  for (; i + step <= n && taken + step <= count; i += step) {
    unsigned bits = mask[i / 8];
    if constexpr (step == 16) bits |= static_cast<unsigned>(mask[i / 8 + 1]) << 8;
    expand_some(bits, values + taken, out + i);
    taken += ones(bits);
  }
  for (; i < n; ++i) out[i] = is_selected(mask, i) && taken < count ? values[taken++] : T{0};
}

template <class T>
using Eight __attribute__((vector_size(8 * sizeof(T)))) = T;

template <class T>
void clear(const std::uint8_t* mask, std::size_t n, T* out) {
  constexpr Eight<T> bit_of_lane = {1, 2, 4, 8, 16, 32, 64, 128};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    Eight<T> values;
    std::memcpy(&values, out + i, sizeof values);
    values &= reinterpret_cast<Eight<T>>(((Eight<T>{} + static_cast<T>(mask[i / 8])) & bit_of_lane) != 0);
    std::memcpy(out + i, &values, sizeof values);
  }
  for (; i < n; ++i) out[i] = is_selected(mask, i) ? out[i] : T{0};
}

template <class T>
void select(const std::uint8_t* mask, std::size_t n, const T* values, T* out, std::size_t count) {
  std::size_t taken = 0, i = 0;
#if defined(INGOT_NEON)
  if constexpr (sizeof(T) <= 4)
    for (; i + 8 <= n && taken + 8 <= count; i += 8) {
      store_at(values + i, vld1_u8(kMaskBytes.kept[mask[i / 8]]), out + taken);
      taken += kMaskBytes.count[mask[i / 8]];
    }
#endif
  for (; i < n && taken < count; ++i) {
    out[taken] = values[i];
    taken += is_selected(mask, i);
  }
}

}  // namespace

std::size_t mask_count(const std::uint8_t* mask, std::size_t n) {
  std::size_t total = 0, i = 0;
  for (; i + 8 <= n / 8; i += 8) total += static_cast<std::size_t>(std::popcount(load_word(mask + i)));
  for (; i < n / 8; ++i) total += static_cast<std::size_t>(std::popcount(mask[i]));
  for (i *= 8; i < n; ++i) total += is_selected(mask, i);
  return total;
}

void mask_expand(const std::uint8_t* mask, std::size_t n, const void* values, std::size_t count, void* out, int width) {
  switch (width) {
    case 1:
      return expand(mask, n, static_cast<const std::uint8_t*>(values), count, static_cast<std::uint8_t*>(out));
    case 2:
      return expand(mask, n, static_cast<const std::uint16_t*>(values), count, static_cast<std::uint16_t*>(out));
    case 4:
      return expand(mask, n, static_cast<const std::uint32_t*>(values), count, static_cast<std::uint32_t*>(out));
    default:
      return expand(mask, n, static_cast<const std::uint64_t*>(values), count, static_cast<std::uint64_t*>(out));
  }
}

void mask_clear(const std::uint8_t* mask, std::size_t n, void* out, int width) {
  switch (width) {
    case 1:
      return clear(mask, n, static_cast<std::uint8_t*>(out));
    case 2:
      return clear(mask, n, static_cast<std::uint16_t*>(out));
    case 4:
      return clear(mask, n, static_cast<std::uint32_t*>(out));
    default:
      return clear(mask, n, static_cast<std::uint64_t*>(out));
  }
}

void mask_select(const std::uint8_t* mask, std::size_t n, const void* values, void* out, std::size_t count, int width) {
  switch (width) {
    case 1:
      return select(mask, n, static_cast<const std::uint8_t*>(values), static_cast<std::uint8_t*>(out), count);
    case 2:
      return select(mask, n, static_cast<const std::uint16_t*>(values), static_cast<std::uint16_t*>(out), count);
    case 4:
      return select(mask, n, static_cast<const std::uint32_t*>(values), static_cast<std::uint32_t*>(out), count);
    default:
      return select(mask, n, static_cast<const std::uint64_t*>(values), static_cast<std::uint64_t*>(out), count);
  }
}

}  // namespace ingot::INGOT_ISA
