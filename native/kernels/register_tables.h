// Tables of 16-bit numbers in registers of AVX-512: of up to 32 entries for a stream of codes, of 256 for codes in
// bytes.
#pragma once
#if defined(__AVX512BW__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ingot::INGOT_ISA {
namespace {

// A register has 32 entries; a smaller table is repeated, so that the bits above a code need no mask.
inline __m512i repeated(const std::uint16_t* table, int bits) {
  alignas(64) std::uint16_t all[32];
  for (int i = 0; i < 32; ++i) all[i] = table[i & ((1 << bits) - 1)];
  return _mm512_load_si512(all);
}

// The position of each of 32 codes: the two bytes that contain it, as a 16-bit number, and its shift. Bits above the
// code are kept.
template <int kBits, bool kMsb>
struct StreamWindows {
  alignas(64) std::uint8_t bytes[64];
  alignas(64) std::uint16_t shifts[32];
  constexpr StreamWindows() : bytes(), shifts() {
    for (int code = 0; code < 32; ++code) {
      const int position = code * kBits / 8, bit = code * kBits % 8;
      bytes[2 * code] = static_cast<std::uint8_t>((kMsb ? position + 1 : position) & 15);
      bytes[2 * code + 1] = static_cast<std::uint8_t>((kMsb ? position : position + 1) & 15);
      shifts[code] = static_cast<std::uint16_t>(kMsb ? 16 - kBits - bit : bit);
    }
  }
};

// The bytes of 32 codes, in each quarter of a register.
template <int kBits>
inline __m512i stream_bytes(const std::uint8_t* in) {
  if constexpr (kBits == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
  if constexpr (kBits == 2) return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
  return _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8((1 << 4 * kBits) - 1, in));
}

// out[i] = the entry of the i-th code of a stream that begins at a byte; kBits is at most 4.
template <int kBits, bool kMsb>
void look_up_stream(__m512i table, const std::uint8_t* __restrict in, std::size_t n, std::uint16_t* __restrict out) {
  static constexpr StreamWindows<kBits, kMsb> index;
  const __m512i order = _mm512_load_si512(index.bytes), shifts = _mm512_load_si512(index.shifts);
  const auto entries = [&](__m512i bytes) {
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, order), shifts), table);
  };
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, entries(stream_bytes<kBits>(in + i / 8 * kBits)));
  if (i == n) return;
  const std::size_t remaining = n - i, bytes = (remaining * kBits + 7) / 8;
  const __m128i last = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << bytes) - 1), in + i / 8 * kBits);
  _mm512_mask_storeu_epi16(out + i, (std::uint32_t{1} << remaining) - 1, entries(_mm512_broadcast_i32x4(last)));
}

using LookUpStream = void (*)(__m512i, const std::uint8_t*, std::size_t, std::uint16_t*);

// For codes of 1 to 4 bits.
inline LookUpStream stream_look_up(int bits, bool msb) {
  constexpr LookUpStream table[2][4] = {
      {look_up_stream<1, false>, look_up_stream<2, false>, look_up_stream<3, false>, look_up_stream<4, false>},
      {look_up_stream<1, true>, look_up_stream<2, true>, look_up_stream<3, true>, look_up_stream<4, true>}};
  return table[msb][bits - 1];
}

// Looks up 32 codes of 16 bits each in a table of 256 entries in eight registers.
inline __m512i look_up_wide(const __m512i* table, __m512i indices) {
  const __mmask32 sixth = _mm512_test_epi16_mask(indices, _mm512_set1_epi16(64));
  const __mmask32 seventh = _mm512_test_epi16_mask(indices, _mm512_set1_epi16(128));
  const __m512i low = _mm512_mask_blend_epi16(sixth, _mm512_permutex2var_epi16(table[0], indices, table[1]),
                                              _mm512_permutex2var_epi16(table[2], indices, table[3]));
  const __m512i high = _mm512_mask_blend_epi16(sixth, _mm512_permutex2var_epi16(table[4], indices, table[5]),
                                               _mm512_permutex2var_epi16(table[6], indices, table[7]));
  return _mm512_mask_blend_epi16(seventh, low, high);
}

// out[i] = table[codes[i]], of 256 entries.
inline void look_up_bytes(const std::uint16_t* __restrict table, const std::uint8_t* __restrict codes, std::size_t n,
                          std::uint16_t* __restrict out) {
  __m512i all[8];
  for (int part = 0; part < 8; ++part) all[part] = _mm512_loadu_si512(table + 32 * part);
  const auto entries = [&](__m256i codes_of) { return look_up_wide(all, _mm512_cvtepu8_epi16(codes_of)); };
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32)
    _mm512_storeu_si512(out + i, entries(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i))));
  if (i == n) return;
  const auto mask = static_cast<__mmask32>((std::uint32_t{1} << (n - i)) - 1);
  _mm512_mask_storeu_epi16(out + i, mask, entries(_mm256_maskz_loadu_epi8(mask, codes + i)));
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
