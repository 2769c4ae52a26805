// Looks up indices in table entries (core/palette.h). Entries have 2, 4, 8 or 16 bytes of any meaning.
#include "kernels/gcc_headers.h"
#include "core/palette.h"

#include <algorithm>

#include "kernels/bits.h"
#include "kernels/kernels.h"
#include "kernels/register_tables.h"
#include "kernels/tiles.h"

namespace ingot::INGOT_ISA {
namespace {

struct Wide {
  std::uint64_t low, high;
};

template <class T>
void look_up(const T* __restrict table, [[maybe_unused]] int bits, const std::uint8_t* __restrict codes, std::size_t n,
             T* __restrict out) {
  std::size_t i = 0;
#if defined(INGOT_NEON)
  if constexpr (sizeof(T) <= 4) {
    const std::size_t entries = std::size_t{1} << bits;
    if (n >= 32 && bits <= 4) i = ByteTables<T, 1>(table, entries).store_all(codes, n, out);
    if (n >= 128 && bits == 6) i = ByteTables<T, 4>(table, entries).store_all(codes, n, out);
  }
#endif
#pragma GCC unroll 8
  for (; i < n; ++i) out[i] = table[codes[i]];
}

#if defined(__AVX512BW__)

inline __m512i entries(const std::uint16_t* table, int contexts) { return _mm512_loadu_si512(table + 32 * contexts); }

template <>
void look_up(const std::uint16_t* __restrict table, int bits, const std::uint8_t* __restrict codes, std::size_t n,
             std::uint16_t* __restrict out) {
  const auto index = [&](std::size_t i) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
  };
  std::size_t i = 0;
  if (n >= 32 && bits <= 5) {
    const __m512i all = repeated(table, bits);
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(index(i), all));
  } else if (n >= 32 && bits == 6) {
    const __m512i low = entries(table, 0), high = entries(table, 1);
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(low, index(i), high));
  } else if (n >= 32 && bits == 8) {
    return look_up_bytes(table, codes, n, out);
  }
  for (; i < n; ++i) out[i] = table[codes[i]];
}

#elif defined(__AVX2__)

// Low and high bytes of sixteen entries are looked up separately and interleaved.
template <>
void look_up(const std::uint16_t* __restrict table, int bits, const std::uint8_t* __restrict codes, std::size_t n,
             std::uint16_t* __restrict out) {
  std::size_t i = 0;
  if (n >= 32 && bits <= 4) {
    alignas(16) std::uint8_t lows[16], highs[16];
    for (int index = 0; index < 16; ++index) {
      lows[index] = static_cast<std::uint8_t>(table[index & ((1 << bits) - 1)]);
      highs[index] = static_cast<std::uint8_t>(table[index & ((1 << bits) - 1)] >> 8);
    }
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(lows)));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(highs)));
    for (; i + 32 <= n; i += 32) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
      const __m256i index = _mm256_permute4x64_epi64(raw, 0xd8);  // interleaving works within halves
      const __m256i first = _mm256_shuffle_epi8(low, index), second = _mm256_shuffle_epi8(high, index);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_unpacklo_epi8(first, second));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), _mm256_unpackhi_epi8(first, second));
    }
  }
  for (; i < n; ++i) out[i] = table[codes[i]];
}

#endif

template <class T>
void decode(const PaletteLayout& layout, const std::uint8_t* packed, const T* tables, std::size_t n, T* out) {
  const Unpack unpack = unpacker<false>(layout.bits);
  Codes buffer;
  std::size_t run = 0, left = layout.run - layout.phase;  // remaining indices of the current run
  for (std::size_t i = 0; i < n; i += kChunk) {
    const std::size_t count = std::min(kChunk, n - i);
    const std::uint8_t* from = packed + i / 8 * static_cast<std::size_t>(layout.bits);
    const std::uint8_t* codes = from;
    std::size_t done = 0;
#if defined(__AVX512BW__)
    if constexpr (sizeof(T) == 2)
      if (layout.bits <= 4 && left >= count) {
        const T* table = tables + (layout.ids ? std::size_t{layout.ids[run]} << layout.bits : 0);
        stream_look_up(layout.bits, false)(repeated(table, layout.bits), from, count, out + i);
        done = count;
        left -= done;
      }
#endif
    if (layout.bits < 8 && done < count) {
      unpack(from, count, buffer);
      codes = buffer.bytes();
    }
    while (done < count) {
      if (left == 0) {
        ++run;
        left = layout.run;
      }
      const std::size_t batch = std::min(left, count - done);
      const T* table = tables + (layout.ids ? std::size_t{layout.ids[run]} << layout.bits : 0);
      look_up(table, layout.bits, codes + done, batch, out + i + done);
      done += batch;
      left -= batch;
    }
    if (left == 0 && i + count < n) {
      ++run;
      left = layout.run;
    }
  }
}

}  // namespace

void palette_decode(const PaletteLayout& layout, const std::uint8_t* packed, const void* tables, std::size_t n,
                    void* out, std::size_t width) {
  switch (width) {
    case 2:
      return decode(layout, packed, static_cast<const std::uint16_t*>(tables), n, static_cast<std::uint16_t*>(out));
    case 4:
      return decode(layout, packed, static_cast<const std::uint32_t*>(tables), n, static_cast<std::uint32_t*>(out));
    case 8:
      return decode(layout, packed, static_cast<const std::uint64_t*>(tables), n, static_cast<std::uint64_t*>(out));
    default:
      return decode(layout, packed, static_cast<const Wide*>(tables), n, static_cast<Wide*>(out));
  }
}

void palette_tile(const void* packed_matrix, const Tile& tile) {
  const auto& matrix = *static_cast<const PaletteMatrix*>(packed_matrix);
  const std::size_t width = tile.type == Dtype::f32 ? 4 : 2, bits = static_cast<std::size_t>(matrix.bits);
  const PaletteLayout layout{matrix.bits, tile.cols, 0, nullptr};
  for (std::size_t i = 0; i < tile.rows; ++i) {
    const std::size_t row = tile.row + i, table = (row / matrix.run << matrix.bits) * width;
    palette_decode(layout, matrix.packed + (row * matrix.cols + tile.first) * bits / 8,
                   static_cast<const std::uint8_t*>(matrix.tables) + table, tile.cols,
                   static_cast<std::uint8_t*>(tile.out) + i * tile.stride * width, width);
  }
}

void palette_unpack(const std::uint8_t* packed, int bits, std::size_t n, std::uint8_t* out) {
  const Unpack unpack = unpacker<false>(bits);
  Codes buffer;
  for (std::size_t i = 0; i < n; i += kChunk) {
    const std::size_t count = std::min(kChunk, n - i);
    unpack(packed + i / 8 * static_cast<std::size_t>(bits), count, buffer);
    std::memcpy(out + i, buffer.bytes(), count);
  }
}

void palette_pack(const std::uint8_t* codes, int bits, std::size_t n, std::uint8_t* out) {
  const Pack pack = packer<false>(bits);
  Codes buffer;
  for (std::size_t i = 0; i < n; i += kChunk) {
    const std::size_t count = std::min(kChunk, n - i);
    std::memcpy(buffer.bytes(), codes + i, count);
    pack(buffer, count, out + i / 8 * static_cast<std::size_t>(bits));
  }
}

}  // namespace ingot::INGOT_ISA
