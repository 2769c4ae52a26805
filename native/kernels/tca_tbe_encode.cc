// Encodes bf16 to three bitmaps, high-frequency bytes and fallback elements: spec/tca_tbe.md, "Encoding".
#include "kernels/kernels.h"
#include "kernels/tca_tbe.h"

namespace ingot::INGOT_ISA {
namespace {

// The output for the remaining parts of a tile. Up to 64 bytes after `high` and `fallback` may be overwritten.
struct Sink {
  std::uint64_t* bitmaps[3];
  std::uint8_t* high;
  std::uint16_t* fallback;
};

// Copies at most kStripe rows and kSide columns; the remainder of the stripe is `padding`.
void load_stripe(const std::uint16_t* in, std::size_t stride, std::size_t rows, std::size_t cols, std::uint16_t padding,
                 Stripe& stripe) {
  if (rows < kStripe || cols < kSide)
    for (std::uint16_t& value : stripe.values) value = padding;
  if (cols == kSide)
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(stripe.values + row * kSide, in + row * stride, 2 * kSide);
  else
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(stripe.values + row * kSide, in + row * stride, 2 * cols);
}

// Bit `plane` of each of 64 bytes.
inline std::uint64_t plane_of(const std::uint8_t* codes, int plane) {
  std::uint64_t bits = 0;
#if defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * half));
    const auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - plane)));
    bits |= static_cast<std::uint64_t>(mask) << (32 * half);
  }
#elif defined(INGOT_NEON)
  const uint8x16_t which = vdupq_n_u8(static_cast<std::uint8_t>(1 << plane)), bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const auto sixteen = [&](int index) { return vandq_u8(vtstq_u8(vld1q_u8(codes + 16 * index), which), bit); };
  const uint8x16_t low = vpaddq_u8(sixteen(0), sixteen(1)), high = vpaddq_u8(sixteen(2), sixteen(3));
  const uint8x16_t all = vpaddq_u8(low, high);
  bits = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
#else
  for (int row = 0; row < 8; ++row) {
    const std::uint64_t eight = load_word(codes + 8 * row) >> plane & 0x0101010101010101ull;
    bits |= (eight * 0x0102040810204080ull >> 56) << (8 * row);
  }
#endif
  return bits;
}

// Appends those of eight bytes whose bit in `mask` is set.
inline void keep_eight(std::uint64_t mask, const std::uint8_t* bytes, Sink& sink) {
#if defined(__BMI2__)
  store_word(_pext_u64(load_word(bytes), kSpread.words[mask] * 0xff), sink.high);
  sink.high += count_ones(mask);
#elif defined(INGOT_NEON)
  store_at(bytes, vld1_u8(kMaskBytes.kept[mask]), sink.high);
  sink.high += kMaskBytes.count[mask];
#else
  if (mask == 0xff) {
    std::memcpy(sink.high, bytes, 8);
    sink.high += 8;
    return;
  }
  for (int i = 0; i < 8; ++i) {
    *sink.high = bytes[i];
    sink.high += mask >> i & 1;
  }
#endif
}

void encode_stripe(const Stripe& stripe, int start, Sink& sink) {
  const std::uint16_t first = static_cast<std::uint16_t>(start + 1);
  for (std::size_t word = 0; word < kStripeWords; ++word) {
    const std::uint16_t* const from = stripe.values + word_offset(word);
    alignas(64) std::uint16_t values[64];
    alignas(64) std::uint8_t codes[64], bytes[64];
    for (std::size_t row = 0; row < 8; ++row) std::memcpy(values + 8 * row, from + row * kSide, 16);
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint16_t position = static_cast<std::uint16_t>((values[i] >> 7 & 0xff) - first);
      const std::uint16_t code = position < 7 ? static_cast<std::uint16_t>(position + 1) : 0;
      codes[i] = static_cast<std::uint8_t>(code);
      bytes[i] = static_cast<std::uint8_t>((values[i] >> 8 & 0x80) | (values[i] & 0x7f));
    }
    std::uint64_t indicator = 0;
    for (int plane = 0; plane < 3; ++plane) {
      const std::uint64_t bits = plane_of(codes, plane);
      *sink.bitmaps[plane]++ = bits;
      indicator |= bits;
    }
    for (std::size_t row = 0; row < 8; ++row) keep_eight(indicator >> (8 * row) & 0xff, bytes + 8 * row, sink);
    for (std::uint64_t pending = ~indicator; pending; pending &= pending - 1)
      *sink.fallback++ = values[std::countr_zero(pending)];
  }
}

#if defined(INGOT_TCA_VECTOR)
INGOT_VBMI2 inline __m512i load_rows(const std::uint16_t* from) {
  const auto row = [=](std::size_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kSide)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Codes of 32 values; appends those without a code to the fallback elements.
INGOT_VBMI2 inline __mmask32 classify(__m512i values, __m512i start, std::uint32_t planes[3], Sink& sink) {
  const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(values, 7), _mm512_set1_epi16(0xff));
  const __m512i codes = _mm512_sub_epi16(exponents, start);
  const __mmask32 mask =
      _mm512_cmplt_epu16_mask(_mm512_sub_epi16(codes, _mm512_set1_epi16(1)), _mm512_set1_epi16(7));
  for (int plane = 0; plane < 3; ++plane)
    planes[plane] = _mm512_mask_test_epi16_mask(mask, codes, _mm512_set1_epi16(static_cast<short>(1 << plane)));
  const __mmask32 rest = ~mask;
  _mm512_storeu_si512(sink.fallback, _mm512_maskz_compress_epi16(rest, values));
  sink.fallback += _mm_popcnt_u32(rest);
  return mask;
}

INGOT_VBMI2 inline __m256i high_bytes(__m512i values) {
  const __m512i mantissa = _mm512_set1_epi16(0x7f);
  return _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(mantissa, values, _mm512_srli_epi16(values, 8), 0xca));
}

INGOT_VBMI2 void encode_stripe_vbmi2(const Stripe& stripe, int start, Sink& sink) {
  const __m512i base = _mm512_set1_epi16(static_cast<short>(start));
  for (std::size_t word = 0; word < kStripeWords; ++word) {
    const std::uint16_t* from = stripe.values + word_offset(word);
    const __m512i upper = load_rows(from), lower = load_rows(from + 4 * kSide);
    std::uint32_t single[3], two[3];
    const std::uint64_t first = classify(upper, base, single, sink), second = classify(lower, base, two, sink);
    const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(high_bytes(upper)), high_bytes(lower), 1);
    const std::uint64_t mask = first | second << 32;
    _mm512_storeu_si512(sink.high, _mm512_maskz_compress_epi8(mask, bytes));
    sink.high += _mm_popcnt_u64(mask);
    for (int plane = 0; plane < 3; ++plane)
      *sink.bitmaps[plane]++ = single[plane] | static_cast<std::uint64_t>(two[plane]) << 32;
  }
}
#endif

using EncodeStripe = void (*)(const Stripe&, int, Sink&);

EncodeStripe stripe_encoder() {
#if defined(INGOT_TCA_VECTOR)
  if (has_vbmi2()) return encode_stripe_vbmi2;
#endif
  return encode_stripe;
}

std::size_t pad_high(Sink& sink, const std::uint8_t* start) {
  const std::size_t used = static_cast<std::size_t>(sink.high - start), size = round_up(used, kHighUnit);
  for (std::size_t i = used; i < size; ++i) *sink.high++ = 0;
  return size;
}

std::size_t pad_fallback(Sink& sink, const std::uint16_t* start) {
  const std::size_t used = static_cast<std::size_t>(sink.fallback - start), size = round_up(used, kFallbackUnit);
  for (std::size_t i = used; i < size; ++i) *sink.fallback++ = 0;
  return size;
}

constexpr std::size_t kTables = 4;  // equal neighbours would wait for each other's increments in a single table

}  // namespace

TcaSizes tca_tbe_encode(const std::uint16_t* in, std::size_t rows, std::size_t cols, int start, const TcaParts& parts) {
  const EncodeStripe encode = stripe_encoder();
  const std::uint16_t padding = static_cast<std::uint16_t>((start + 1) << 7);  // code 1, high byte 0
  Sink sink{{parts.bitmaps[0], parts.bitmaps[1], parts.bitmaps[2]}, parts.high, parts.fallback};
  std::uint16_t* counts = parts.counts;
  Stripe stripe;
  for (std::size_t row = 0; row < rows; row += kSide)
    for (std::size_t col = 0; col < cols; col += kSide) {
      const std::uint8_t* const high = sink.high;
      const std::uint16_t* const fallback = sink.fallback;
      const std::size_t wide = cols - col < kSide ? cols - col : kSide;
      for (std::size_t index = row; index < row + kSide; index += kStripe) {
        const std::size_t remaining = index < rows ? rows - index : 0, tall = remaining < kStripe ? remaining : kStripe;
        load_stripe(tall ? in + index * cols + col : in, cols, tall, wide, padding, stripe);
        encode(stripe, start, sink);
      }
      *counts++ = static_cast<std::uint16_t>(pad_high(sink, high));
      *counts++ = static_cast<std::uint16_t>(pad_fallback(sink, fallback));
    }
  return {static_cast<std::size_t>(sink.high - parts.high), static_cast<std::size_t>(sink.fallback - parts.fallback)};
}

void bf16_exponents(const std::uint16_t* in, std::size_t n, std::uint64_t* counts) {
  constexpr std::size_t limit = std::size_t{1} << 30;  // a counter cannot overflow with this number of increments
  for (std::size_t start = 0; start < n; start += limit) {
    const std::size_t end = n - start < limit ? n : start + limit;
    std::uint32_t tables[kTables][256] = {};
    std::size_t i = start;
    for (; i + kTables <= end; i += kTables)
      for (std::size_t k = 0; k < kTables; ++k) ++tables[k][in[i + k] >> 7 & 0xff];
    for (; i < end; ++i) ++tables[0][in[i] >> 7 & 0xff];
    for (std::size_t e = 0; e < 256; ++e)
      for (std::size_t k = 0; k < kTables; ++k) counts[e] += tables[k][e];
  }
}

}  // namespace ingot::INGOT_ISA
