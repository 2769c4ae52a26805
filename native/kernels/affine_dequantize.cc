// w = s * (q - z) or s * q + z in f32, then one rounding to the target: spec/affine.md, "Decoding".
#include "kernels/gcc_headers.h"
#include "kernels/affine_value.h"
#include "kernels/bits.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/register_tables.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 64;

template <Dtype kDtype, bool kSigned, Zero kZero>
void convert(const std::uint8_t* __restrict codes, std::size_t n, float scale, float zero, int half,
             TypeOf<kDtype>* __restrict out) {
  const auto value = [=](std::uint8_t code) {
    const int number = kSigned ? static_cast<std::int8_t>((code ^ half) - half) : code;  // faster here than number_of
    return scaled<kZero>(static_cast<float>(number), scale, zero);
  };
  if constexpr (kDtype == Dtype::f32) {
    for (std::size_t i = 0; i < n; ++i) out[i] = value(codes[i]);
  } else {
    if (kDtype == Dtype::bf16 && is_finite(scale) && is_finite(zero)) {  // then no result is NaN
      for (std::size_t i = 0; i < n; ++i) out[i] = number_to_bf16(value(codes[i]));
      return;
    }
    alignas(64) float block[kBlock];
    std::size_t start = 0;
    for (; start + kBlock <= n; start += kBlock) {
      for (std::size_t i = 0; i < kBlock; ++i) block[i] = value(codes[start + i]);
      store_block<kDtype>(block, kBlock, out + start);
    }
    for (std::size_t i = start; i < n; ++i) block[i - start] = value(codes[i]);
    store_block<kDtype>(block, n - start, out + start);
  }
}

// out[i] = table[codes[i]].
template <class T>
void look_up(const std::uint8_t* __restrict codes, std::size_t n, const T* __restrict table, int bits,
             T* __restrict out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if (bits <= 4) {  // sixteen entries (fewer for fewer bits) fit in one register, low and high bytes apart
    const __m128i low_half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m128i high_half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8));
    const __m128i mask = _mm_set1_epi16(0xff);
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(low_half, mask), _mm_and_si128(high_half, mask)));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(low_half, 8), _mm_srli_epi16(high_half, 8)));
    for (; i + 32 <= n; i += 32) {
      const __m256i indices = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
      const __m256i lows = _mm256_shuffle_epi8(low, indices), highs = _mm256_shuffle_epi8(high, indices);
      const __m256i even = _mm256_unpacklo_epi8(lows, highs), odd = _mm256_unpackhi_epi8(lows, highs);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
#elif defined(INGOT_NEON)
  if constexpr (sizeof(T) == 2)
    if (bits <= 4) i = ByteTables<T, 1>(table).store_all(codes, n, out);
#else
  static_cast<void>(bits);
#endif
  for (; i < n; ++i) out[i] = table[codes[i]];
}

// The ways to compute a group's values: one by one; or, if 16-bit results take few values and a group is long enough,
// from a table of all values, indexed by codes in bytes, or in registers by the stream of codes or by codes in bytes.
enum class By { product, table, stream, bytes };

// Tables pay (bench/kernels.py) if registers can hold them, and if rounding to f16 takes many instructions.
constexpr By path_for(Dtype dtype, int bits, std::size_t group, std::size_t cols) {
#if defined(__AVX512BW__)
  if (dtype != Dtype::f32 && bits <= 4 && group >= 32 && (group % 8 == 0 || group == cols)) return By::stream;
  if (dtype != Dtype::f32 && bits > 4 && group >= 1024) return By::bytes;
#else
  static_cast<void>(cols);
#endif
  const std::size_t entries = std::size_t{1} << (bits < 3 ? 3 : bits);
#if defined(__AVX2__) || defined(INGOT_NEON)
  return dtype != Dtype::f32 && entries <= 16 && group >= 32 ? By::table : By::product;
#else
  return dtype == Dtype::f16 && group >= 2 * entries ? By::table : By::product;
#endif
}

// Decodes rows chunk by chunk: unpacks codes, widens the scales of the chunk's groups, then decodes each group.
template <Dtype kDtype, Zero kZero>
class RowDecoder {
 public:
  explicit RowDecoder(const AffineLayout& layout)
      : layout_(layout),
        group_(layout.group < layout.cols ? layout.group : layout.cols),
        half_(half_of(layout)),
        by_(path_for(kDtype, layout.bits, group_, layout.cols)),
        table_size_(by_ == By::bytes ? 256 : layout.bits <= 3 ? 8 : std::size_t{1} << layout.bits),
        unpack_(layout.msb ? unpacker<true>(layout.bits) : unpacker<false>(layout.bits)) {
    for (int i = 0; i < 256; ++i)
      values_[i] = number_of(static_cast<std::uint8_t>(i & ((1 << layout.bits) - 1)), half_);
  }

  // `first_scale` is the position of the row's first scale, and of its first zero.
  void row(const std::uint8_t* in, const void* scales, const void* zeros, Dtype scale_type, std::size_t first_scale,
           TypeOf<kDtype>* out) {
    for (std::size_t start = 0; start < layout_.cols; start += kChunk) {
      const std::size_t end = layout_.cols - start < kChunk ? layout_.cols : start + kChunk;
      const std::uint8_t* codes = in + start / 8 * static_cast<std::size_t>(layout_.bits);
      if (layout_.bits != 8 && by_ != By::stream) {
        unpack_(codes, end - start, codes_);
        codes = codes_.bytes();
      }
      const std::size_t first = start / group_, count = (end - 1) / group_ + 1 - first;
      widen(scales, scale_type, first_scale + first, count, scales_);
      if (kZero != Zero::none) widen(zeros, scale_type, first_scale + first, count, zeros_);
#if defined(__AVX512BW__)
      if (by_ == By::stream)
        (this->*stream_)(codes, start, end, first, count, out + start);
      else
#endif
        groups(codes, start, end, first, count, out + start);
    }
  }

 private:
  __attribute__((noinline)) void groups(const std::uint8_t* codes, std::size_t start, std::size_t end,
                                        std::size_t first, std::size_t count, TypeOf<kDtype>* out) {
    if (by_ == By::table) fill_tables(count);
    for (std::size_t i = 0, from = start; i < count; ++i) {
      const std::size_t group_end = (first + i + 1) * group_, until = group_end < end ? group_end : end;
      const float zero = kZero != Zero::none ? zeros_[i] : 0;
      if (by_ == By::table)
        look_up(codes + (from - start), until - from, tables_ + i * table_size_, layout_.bits, out + (from - start));
      else if (by_ == By::bytes)
        look_up_long(codes + (from - start), until - from, scales_[i], zero, from == start && start % group_ != 0,
                     out + (from - start));
      else if (half_)
        convert<kDtype, true, kZero>(codes + (from - start), until - from, scales_[i], zero, half_,
                                     out + (from - start));
      else
        convert<kDtype, false, kZero>(codes + (from - start), until - from, scales_[i], zero, half_,
                                      out + (from - start));
      from = until;
    }
  }

  // Decodes a group; `again` is true if an earlier part of it was decoded before.
  void look_up_long([[maybe_unused]] const std::uint8_t* codes, [[maybe_unused]] std::size_t n,
                    [[maybe_unused]] float scale, [[maybe_unused]] float zero, [[maybe_unused]] bool again,
                    [[maybe_unused]] TypeOf<kDtype>* out) {
#if defined(__AVX512BW__)
    if constexpr (kDtype != Dtype::f32) {
      for (std::size_t c = again ? 256 : 0; c < 256; c += 16)
        _mm256_store_si256(reinterpret_cast<__m256i*>(tables_ + c), sixteen(values_ + c, scale, zero));
      look_up_bytes(tables_, codes, n, out);
    }
#endif
  }

#if defined(__AVX512BW__)
  static __m256i sixteen(const float* values, float scale, float zero) {
    __m512 products = _mm512_load_ps(values);
    if (kZero == Zero::point) products = _mm512_sub_ps(products, _mm512_set1_ps(zero));
    products = _mm512_mul_ps(_mm512_set1_ps(scale), products);
    if (kZero == Zero::offset) products = _mm512_add_ps(products, _mm512_set1_ps(zero));
    return kDtype == Dtype::bf16 && is_finite(scale) && is_finite(zero) ? sixteen_numbers(products) : store_sixteen<kDtype>(products);
  }

  // Groups that begin at bytes of the stream.
  template <int kBits, bool kMsb>
  void stream_groups(const std::uint8_t* codes, std::size_t start, std::size_t end, std::size_t first, std::size_t count,
                     TypeOf<kDtype>* out) {
    if constexpr (kDtype != Dtype::f32)
      for (std::size_t i = 0, from = start; i < count; ++i) {
        const std::size_t group_end = (first + i + 1) * group_, until = group_end < end ? group_end : end;
        const __m256i table = sixteen(values_, scales_[i], kZero != Zero::none ? zeros_[i] : 0);
        look_up_stream<kBits, kMsb>(_mm512_broadcast_i64x4(table), codes + (from - start) / 8 * kBits, until - from,
                                    out + (from - start));
        from = until;
      }
  }

  using StreamGroups = void (RowDecoder::*)(const std::uint8_t*, std::size_t, std::size_t, std::size_t, std::size_t, TypeOf<kDtype>*);

  static StreamGroups stream_groups_of(int bits, bool msb) {
    using D = RowDecoder;
    constexpr StreamGroups table[2][4] = {
        {&D::stream_groups<1, false>, &D::stream_groups<2, false>, &D::stream_groups<3, false>, &D::stream_groups<4, false>},
        {&D::stream_groups<1, true>, &D::stream_groups<2, true>, &D::stream_groups<3, true>, &D::stream_groups<4, true>}};
    return table[msb][(bits < 4 ? bits : 4) - 1];
  }
#endif

  // tables_[i * table_size_ + c] is the value of code c in the chunk's i-th group.
  void fill_tables(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t c = 0; c < table_size_; c += 8)
        fill_eight(values_ + c, scales_[i], kZero != Zero::none ? zeros_[i] : 0, tables_ + i * table_size_ + c);
  }

  static void fill_eight(const float* values, float scale, float zero, TypeOf<kDtype>* out) {
#if defined(__AVX2__)
    if constexpr (kDtype != Dtype::f32) {
      __m256 eight = _mm256_load_ps(values);
      if (kZero == Zero::point) eight = _mm256_sub_ps(eight, _mm256_set1_ps(zero));
      eight = _mm256_mul_ps(_mm256_set1_ps(scale), eight);
      if (kZero == Zero::offset) eight = _mm256_add_ps(eight, _mm256_set1_ps(zero));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), store_eight<kDtype>(eight));
    }
#else
    float eight[8];
    for (int c = 0; c < 8; ++c) eight[c] = scaled<kZero>(values[c], scale, zero);
    store_block<kDtype>(eight, 8, out);
#endif
  }

  const AffineLayout& layout_;
  const std::size_t group_;
  const int half_;
  const By by_;
  const std::size_t table_size_;
  const Unpack unpack_;
#if defined(__AVX512BW__)
  const StreamGroups stream_ = stream_groups_of(layout_.bits, layout_.msb);
#endif
  Codes codes_;
  alignas(64) float values_[256];
  alignas(64) float scales_[kChunk + 1];
  alignas(64) float zeros_[kChunk + 1];
  alignas(64) TypeOf<kDtype> tables_[kChunk + 16];  // at most kChunk / (2 * size) + 2 tables of at most 256 entries
};

template <Dtype kDtype, Zero kZero>
void rows_to(const AffineLayout& layout, const std::uint8_t* packed, const void* scales, const void* zeros,
             Dtype scale_type, void* out) {
  RowDecoder<kDtype, kZero> decoder(layout);
  const std::size_t stride = layout.per_tensor ? 0 : layout.cols / layout.group + (layout.cols % layout.group != 0);
  for (std::size_t row = 0; row < layout.rows; ++row)
    decoder.row(packed + row * layout.row_bytes, scales, zeros, scale_type, row * stride,
                static_cast<TypeOf<kDtype>*>(out) + row * layout.cols);
}

template <Dtype kDtype>
void dispatch(const AffineLayout& layout, const std::uint8_t* packed, const void* scales, const void* zeros,
              Dtype scale_type, void* out) {
  switch (zero_of(layout, zeros)) {
    case Zero::none:
      return rows_to<kDtype, Zero::none>(layout, packed, scales, zeros, scale_type, out);
    case Zero::point:
      return rows_to<kDtype, Zero::point>(layout, packed, scales, zeros, scale_type, out);
    case Zero::offset:
      return rows_to<kDtype, Zero::offset>(layout, packed, scales, zeros, scale_type, out);
  }
}

}  // namespace

void affine_dequantize(const AffineLayout& layout, const std::uint8_t* packed, const void* scales, const void* zeros,
                       Dtype scale_type, void* out, Dtype type) {
  switch (type) {
    case Dtype::f32:
      return dispatch<Dtype::f32>(layout, packed, scales, zeros, scale_type, out);
    case Dtype::f16:
      return dispatch<Dtype::f16>(layout, packed, scales, zeros, scale_type, out);
    case Dtype::bf16:
      return dispatch<Dtype::bf16>(layout, packed, scales, zeros, scale_type, out);
    case Dtype::f64:
      return;
  }
}

}  // namespace ingot::INGOT_ISA
