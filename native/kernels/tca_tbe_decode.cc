// Decodes three bitmaps, high-frequency bytes and fallback elements to bf16: spec/tca_tbe.md, "Decoding".
#include "kernels/kernels.h"
#include "kernels/tca_tbe.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kAhead = 8;  // high bytes that may be read after a tile's last one

// The remaining parts of a tile; their sizes were checked.
struct Feed {
  const std::uint64_t* bitmaps[3];
  const std::uint8_t* high;
  const std::uint16_t* fallback;
};

// Consumes the high bytes of those of eight values whose bit in `mask` is set.
inline void take_eight(std::uint64_t mask, Feed& feed, std::uint8_t* bytes) {
#if defined(__BMI2__)
  store_word(_pdep_u64(load_word(feed.high), kSpread.words[mask] * 0xff), bytes);
  feed.high += count_ones(mask);
#elif defined(INGOT_NEON)
  store_at(feed.high, vld1_u8(kMaskBytes.spread[mask]), bytes);
  feed.high += kMaskBytes.count[mask];
#else
  if (mask == 0xff) {
    std::memcpy(bytes, feed.high, 8);
    feed.high += 8;
    return;
  }
  for (int i = 0; i < 8; ++i) {
    bytes[i] = *feed.high;
    feed.high += mask >> i & 1;
  }
#endif
}

void decode_stripe(Feed& feed, int start, Stripe& stripe) {
  for (std::size_t word = 0; word < kStripeWords; ++word) {
    std::uint64_t planes[3];
    for (int plane = 0; plane < 3; ++plane) planes[plane] = *feed.bitmaps[plane]++;
    const std::uint64_t indicator = planes[0] | planes[1] | planes[2];
    alignas(64) std::uint8_t codes[64], bytes[64];
#if defined(INGOT_NEON)
    const uint8x16_t twice = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}, bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (std::size_t row = 0; row < 8; row += 2) {
      const auto plane = [&](int i) {
        const uint8x16_t both = vaddq_u8(twice, vdupq_n_u8(static_cast<std::uint8_t>(row)));
        const uint8x16_t bits = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(planes[i])), both);
        return vandq_u8(vtstq_u8(bits, bit), vdupq_n_u8(static_cast<std::uint8_t>(1 << i)));
      };
      vst1q_u8(codes + 8 * row, vorrq_u8(vorrq_u8(plane(0), plane(1)), plane(2)));
    }
    for (std::size_t row = 0; row < 8; ++row) take_eight(indicator >> (8 * row) & 0xff, feed, bytes + 8 * row);
#else
    for (std::size_t row = 0; row < 8; ++row) {
      const auto plane = [&](int i) { return kSpread.words[planes[i] >> (8 * row) & 0xff] << i; };
      store_word(plane(0) | plane(1) | plane(2), codes + 8 * row);
      take_eight(indicator >> (8 * row) & 0xff, feed, bytes + 8 * row);
    }
#endif
    alignas(64) std::uint16_t values[64];
    const std::uint16_t base = static_cast<std::uint16_t>(start * 128);
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint16_t byte = bytes[i], code = codes[i];
      values[i] = static_cast<std::uint16_t>((((byte << 8) | byte) & 0x807f) | static_cast<std::uint16_t>((code << 7) + base));
    }
    for (std::uint64_t pending = ~indicator; pending; pending &= pending - 1)
      values[std::countr_zero(pending)] = *feed.fallback++;
    std::uint16_t* const to = stripe.values + word_offset(word);
    for (std::size_t row = 0; row < 8; ++row) std::memcpy(to + row * kSide, values + 8 * row, 16);
  }
}

#if defined(INGOT_TCA_VECTOR)
// Decodes 32 values from high bytes and codes, and from fallback elements where a code is 0.
INGOT_VBMI2 inline __m512i compose(__m256i bytes, const std::uint32_t planes[3], __m512i base, Feed& feed) {
  __m512i exponents = base;
  for (int plane = 0; plane < 3; ++plane)
    exponents = _mm512_mask_add_epi16(exponents, planes[plane], exponents,
                                      _mm512_set1_epi16(static_cast<short>(1 << (7 + plane))));
  const __m512i wide = _mm512_cvtepu8_epi16(bytes);
  const __m512i remainder = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 8)),
                                        _mm512_set1_epi16(static_cast<short>(0x807f)));
  const __mmask32 missing = ~(planes[0] | planes[1] | planes[2]);
  const auto count = static_cast<std::uint32_t>(_mm_popcnt_u32(missing));
  const __m512i elements = _mm512_maskz_loadu_epi16(_bzhi_u32(~0u, count), feed.fallback);
  feed.fallback += count;
  return _mm512_mask_expand_epi16(_mm512_or_si512(exponents, remainder), missing, elements);
}

INGOT_VBMI2 inline void store_rows(__m512i values, std::uint16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(values));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kSide), _mm512_extracti32x4_epi32(values, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * kSide), _mm512_extracti32x4_epi32(values, 2));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 3 * kSide), _mm512_extracti32x4_epi32(values, 3));
}

INGOT_VBMI2 void decode_stripe_vbmi2(Feed& feed, int start, Stripe& stripe) {
  const __m512i base = _mm512_set1_epi16(static_cast<short>(start * 128));
  for (std::size_t word = 0; word < kStripeWords; ++word) {
    std::uint32_t first[3], second[3];
    std::uint64_t indicator = 0;
    for (int plane = 0; plane < 3; ++plane) {
      const std::uint64_t bits = *feed.bitmaps[plane]++;
      indicator |= bits;
      first[plane] = static_cast<std::uint32_t>(bits);
      second[plane] = static_cast<std::uint32_t>(bits >> 32);
    }
    const auto count = static_cast<std::uint32_t>(_mm_popcnt_u64(indicator));
    const __m512i bytes =
        _mm512_maskz_expand_epi8(indicator, _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, count), feed.high));
    feed.high += count;
    std::uint16_t* const to = stripe.values + word_offset(word);
    store_rows(compose(_mm512_castsi512_si256(bytes), first, base, feed), to);
    store_rows(compose(_mm512_extracti64x4_epi64(bytes, 1), second, base, feed), to + 4 * kSide);
  }
}
#endif

using DecodeStripe = void (*)(Feed&, int, Stripe&);

DecodeStripe stripe_decoder() {
#if defined(INGOT_TCA_VECTOR)
  if (has_vbmi2()) return decode_stripe_vbmi2;
#endif
  return decode_stripe;
}

void store_stripe(const Stripe& stripe, std::size_t stride, std::size_t rows, std::size_t cols, std::uint16_t* out) {
  if (cols == kSide)
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(out + row * stride, stripe.values + row * kSide, 2 * kSide);
  else
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(out + row * stride, stripe.values + row * kSide, 2 * cols);
}

// Returns whether a tile's counts match its bitmaps.
bool fits(const Feed& feed, const std::uint16_t* counts) {
  std::size_t ones = 0;
  for (std::size_t word = 0; word < kWords; ++word)
    ones += count_ones(feed.bitmaps[0][word] | feed.bitmaps[1][word] | feed.bitmaps[2][word]);
  return counts[0] == round_up(ones, kHighUnit) && counts[1] == round_up(kElements - ones, kFallbackUnit);
}

}  // namespace

std::size_t tca_tbe_decode(const TcaConst& parts, const TcaSizes& sizes, int start, std::uint16_t* out,
                           std::size_t rows, std::size_t cols) {
  const DecodeStripe decode = stripe_decoder();
  std::size_t tile = 0, high = 0, fallback = 0;
  Stripe stripe;
  std::uint8_t last[kElements + kAhead] = {};
  for (std::size_t row = 0; row < rows; row += kSide)
    for (std::size_t col = 0; col < cols; col += kSide, ++tile) {
      Feed feed{{parts.bitmaps[0] + tile * kWords, parts.bitmaps[1] + tile * kWords, parts.bitmaps[2] + tile * kWords},
                parts.high + high,
                parts.fallback + fallback};
      const std::uint16_t* const counts = parts.counts + 2 * tile;
      if (!fits(feed, counts) || counts[0] > sizes.high - high || counts[1] > sizes.fallback - fallback) return tile;
      if (sizes.high - high - counts[0] < kAhead) {
        std::memcpy(last, feed.high, counts[0]);
        feed.high = last;
      }
      high += counts[0];
      fallback += counts[1];
      const std::size_t wide = cols - col < kSide ? cols - col : kSide;
      for (std::size_t index = row; index < rows && index < row + kSide; index += kStripe) {
        decode(feed, start, stripe);
        store_stripe(stripe, cols, rows - index < kStripe ? rows - index : kStripe, wide, out + index * cols + col);
      }
    }
  return tile;
}

}  // namespace ingot::INGOT_ISA
