// out = round(base + w) with w = s * (q - z) or s * q + z: each step rounded to f32, then once to the element type;
// spec/affine.md, "Adding". One pass: unpack a chunk of codes, then each group in registers. `out` may be `base`.
#include "kernels/gcc_headers.h"
#include "kernels/affine_add.h"

#include "kernels/affine_value.h"
#include "kernels/bits.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512BW__)
// Sixteen bf16 sums at a time; returns how many of the `n` were done.
template <Zero kZero>
std::size_t add_vectors(const std::uint8_t* codes, std::size_t n, float scale, float zero, int half,
                        const std::uint16_t* base, std::uint16_t* out) {
  const __m512 scales = _mm512_set1_ps(scale), zeros = _mm512_set1_ps(zero);
  const __m512i halves = _mm512_set1_epi32(half);
  const __m512i below = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x00400000);
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i wide_codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    __m512 q = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_xor_si512(wide_codes, halves), halves));
    if (kZero == Zero::point) q = _mm512_sub_ps(q, zeros);
    const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + i));
    const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(from), 16));
    q = _mm512_mul_ps(scales, q);
    if (kZero == Zero::offset) q = _mm512_add_ps(q, zeros);
    const __m512 sum = _mm512_add_ps(q, wide);
    const __m512i bits = _mm512_castps_si512(sum);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, below), lsb);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), bits, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  return i;
}
#elif defined(__AVX2__)
// Eight bf16 sums at a time; returns how many of the `n` were done.
template <Zero kZero>
std::size_t add_vectors(const std::uint8_t* codes, std::size_t n, float scale, float zero, int half,
                        const std::uint16_t* base, std::uint16_t* out) {
  const __m256 scales = _mm256_set1_ps(scale), zeros = _mm256_set1_ps(zero);
  const __m256i halves = _mm256_set1_epi32(half);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i wide_codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    __m256 q = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(wide_codes, halves), halves));
    if (kZero == Zero::point) q = _mm256_sub_ps(q, zeros);
    const __m256 wide = load_eight<Dtype::bf16>(base + i);
    q = _mm256_mul_ps(scales, q);
    if (kZero == Zero::offset) q = _mm256_add_ps(q, zeros);
    const __m256 sum = _mm256_add_ps(q, wide);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), store_eight<Dtype::bf16>(sum));
  }
  return i;
}
#else
template <Zero kZero>
std::size_t add_vectors(const std::uint8_t*, std::size_t, float, float, int, const std::uint16_t*, std::uint16_t*) {
  return 0;
}
#endif

// Sums of `n` values; `base` and `out` are the same array or do not overlap.
template <Dtype kDtype, Zero kZero>
void add_run(const std::uint8_t* __restrict codes, std::size_t n, float scale, float zero, int half,
             const TypeOf<kDtype>* base, TypeOf<kDtype>* out) {
  const auto sum = [=](std::uint8_t code, float from) {
    const float q = number_of(code, half);
    return scaled<kZero>(q, scale, zero) + from;
  };
  std::size_t i = 0;
  if constexpr (kDtype == Dtype::bf16) i = add_vectors<kZero>(codes, n, scale, zero, half, base, out);
  if constexpr (kDtype != Dtype::f32) {  // widen, add, round: three loops of vectors over a block in cache
    constexpr std::size_t block = 64;
    alignas(64) float sums[block];
    for (; i < n; i += block) {
      const std::size_t count = n - i < block ? n - i : block;
      load_block<kDtype>(base + i, count, sums);
      for (std::size_t k = 0; k < count; ++k) sums[k] = sum(codes[i + k], sums[k]);
      store_block<kDtype>(sums, count, out + i);
    }
  } else {
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (; i < n; ++i) out[i] = sum(codes[i], base[i]);
  }
}

struct Scaling {
  const void* scales;
  const void* zeros;
  Dtype type;
};

template <Dtype kDtype, Zero kZero>
void add_rows(const AffineLayout& layout, const std::uint8_t* packed, const Scaling& scaling,
              const TypeOf<kDtype>* base, TypeOf<kDtype>* out) {
  const Unpack unpack = layout.msb ? unpacker<true>(layout.bits) : unpacker<false>(layout.bits);
  const std::size_t group = layout.group < layout.cols ? layout.group : layout.cols;
  const std::size_t stride = layout.per_tensor ? 0 : layout.cols / layout.group + (layout.cols % layout.group != 0);
  const int half = half_of(layout);
  Codes unpacked;
  alignas(64) float scales[kChunk + 1], zeros[kChunk + 1];
  for (std::size_t row = 0; row < layout.rows; ++row) {
    const std::uint8_t* in = packed + row * layout.row_bytes;
    const std::size_t element = row * layout.cols;
    for (std::size_t start = 0; start < layout.cols; start += kChunk) {
      const std::size_t end = layout.cols - start < kChunk ? layout.cols : start + kChunk;
      const std::uint8_t* codes = in + start;
      if (layout.bits != 8) {
        unpack(in + start / 8 * layout.bits, end - start, unpacked);
        codes = unpacked.bytes();
      }
      const std::size_t first = start / group, count = (end - 1) / group + 1 - first;
      widen(scaling.scales, scaling.type, row * stride + first, count, scales);
      if (kZero != Zero::none) widen(scaling.zeros, scaling.type, row * stride + first, count, zeros);
      for (std::size_t i = 0, from = start; i < count; ++i) {
        const std::size_t group_end = (first + i + 1) * group, until = group_end < end ? group_end : end;
        add_run<kDtype, kZero>(codes + (from - start), until - from, scales[i],
                                        kZero != Zero::none ? zeros[i] : 0, half, base + element + from,
                                        out + element + from);
        from = until;
      }
    }
  }
}

template <Dtype kDtype>
void dispatch(const AffineLayout& layout, const std::uint8_t* packed, const Scaling& scaling, const void* base,
              void* out) {
  const auto* from = static_cast<const TypeOf<kDtype>*>(base);
  auto* to = static_cast<TypeOf<kDtype>*>(out);
  switch (zero_of(layout, scaling.zeros)) {
    case Zero::none:
      return add_rows<kDtype, Zero::none>(layout, packed, scaling, from, to);
    case Zero::point:
      return add_rows<kDtype, Zero::point>(layout, packed, scaling, from, to);
    case Zero::offset:
      return add_rows<kDtype, Zero::offset>(layout, packed, scaling, from, to);
  }
}

}  // namespace

void affine_add(const AffineLayout& layout, const std::uint8_t* packed, const void* scales, const void* zeros,
                Dtype scale_type, const void* base, void* out, Dtype type) {
  const Scaling scaling{scales, zeros, scale_type};
  switch (type) {
    case Dtype::f32:
      return dispatch<Dtype::f32>(layout, packed, scaling, base, out);
    case Dtype::f16:
      return dispatch<Dtype::f16>(layout, packed, scaling, base, out);
    case Dtype::bf16:
      return dispatch<Dtype::bf16>(layout, packed, scaling, base, out);
    case Dtype::f64:
      return;
  }
}

}  // namespace ingot::INGOT_ISA
