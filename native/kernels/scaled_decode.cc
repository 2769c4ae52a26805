// Decodes codes to scale * value (core/scaled.h): one product in f32, then one rounding to the target. For tables of up
// to 16 entries, the sixteen products of a group are kept in a register and selected by shuffles.
#include "kernels/gcc_headers.h"
#include "core/scaled.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/bits.h"
#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/scaled_look_up.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 64;

// Two codes per byte, the first in the high bits.
void unpack_high(const std::uint8_t* __restrict in, std::size_t n, std::uint8_t* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t word = static_cast<std::uint16_t>(in[i] >> 4 | (in[i] & 15) << 8);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap16(word);
    std::memcpy(out + 2 * i, &word, 2);
  }
}

// out[i] = scale * value of codes[i], for codes of any kind.
template <Dtype kDtype, ScaledValues kValues>
void convert(const std::uint8_t* __restrict codes, std::size_t n, float scale, const float* __restrict table,
             TypeOf<kDtype>* __restrict out) {
#if defined(__AVX512BW__) || defined(INGOT_NEON)
  if constexpr (kValues == ScaledValues::e4m3) {
    const std::size_t done = convert_e4m3<kDtype>(codes, n, scale, out);
    codes += done;
    out += done;
    n -= done;
  }
#endif
  if constexpr (kDtype == Dtype::f32) {
    for (std::size_t i = 0; i < n; ++i) out[i] = scale * value_of<kValues>(codes[i], table);
    return;
  }
  alignas(64) float block[kBlock];
  std::size_t start = 0;
  for (; start + kBlock <= n; start += kBlock) {
    for (std::size_t i = 0; i < kBlock; ++i) block[i] = scale * value_of<kValues>(codes[start + i], table);
    store_block<kDtype>(block, kBlock, out + start);
  }
  for (std::size_t i = start; i < n; ++i) block[i - start] = scale * value_of<kValues>(codes[i], table);
  store_block<kDtype>(block, n - start, out + start);
}

// Decodes one run of codes that share a scale.
template <Dtype kDtype>
using Convert = void (*)(const std::uint8_t*, std::size_t, float, const float*, TypeOf<kDtype>*);

template <Dtype kDtype>
Convert<kDtype> converter(const ScaledLayout& layout) {
  switch (layout.values) {
    case ScaledValues::e4m3:
      return convert<kDtype, ScaledValues::e4m3>;
    case ScaledValues::e5m2:
      return convert<kDtype, ScaledValues::e5m2>;
    case ScaledValues::i8:
      return convert<kDtype, ScaledValues::i8>;
    case ScaledValues::table:
      break;
  }
  return layout.bits <= 4 && layout.group >= 8 ? look_up<kDtype> : convert<kDtype, ScaledValues::table>;
}

// Divides the codes into runs; `place` is the position of a run in its row.
template <Dtype kDtype>
class Runs {
 public:
  explicit Runs(const ScaledLayout& layout) : make_(converter<kDtype>(layout)) {
    if (layout.table != nullptr) std::copy_n(layout.table, std::size_t{1} << layout.bits, table_);
#if defined(__AVX512BW__)
    shared_ = layout.values == ScaledValues::e4m3 && layout.group >= kLeastShared;
#endif
  }

  void operator()(const std::uint8_t* codes, std::size_t n, float scale, [[maybe_unused]] std::size_t position,
                  TypeOf<kDtype>* out) {
#if defined(__AVX512BW__)
    if constexpr (kDtype == Dtype::bf16 || kDtype == Dtype::f16)
      if (shared_ && position < kPlaces) {
        Products& products = products_[position];
        const bool equal = products.scale == scale;  // not if it is NaN
        // Computed for the row above: more rows of the block may follow.
        if (equal && std::signbit(products.scale) == std::signbit(scale)) {
          if (!products.is_filled) convert_e4m3<kDtype>(kEvery.codes, 128, scale, products.bits);
          products.is_filled = true;
          return look_up_e4m3(codes, n, products, out);
        }
        products.scale = scale;
        products.is_filled = false;
      }
#endif
    make_(codes, n, scale, table_, out);
  }

 private:
  Convert<kDtype> make_;
  alignas(64) float table_[256] = {};  // with fewer than 16 entries the others are unused
#if defined(__AVX512BW__)
  static constexpr std::size_t kPlaces = 64, kLeastShared = 64;
  struct Every {
    std::uint8_t codes[128];
    constexpr Every() : codes{} {
      for (int code = 0; code < 128; ++code) codes[code] = static_cast<std::uint8_t>(code);
    }
  };
  static constexpr Every kEvery = {};
  bool shared_;
  Products products_[kPlaces];
#endif
};

template <Dtype kDtype>
void decode(const ScaledLayout& layout, const std::uint8_t* packed, std::size_t n, TypeOf<kDtype>* out) {
  Runs<kDtype> make(layout);
  const Unpack unpack = unpacker<false>(layout.bits);
  Codes buffer;
  std::size_t index = layout.phase / layout.group,
              // The current group, and its remaining columns.
              row_left = layout.cols - layout.phase;
  std::size_t position = index;                                               // position of the group in its row
  std::size_t remaining = std::min(layout.group - layout.phase % layout.group, row_left);
  for (std::size_t start = 0; start < n; start += kChunk) {
    const std::size_t count = std::min(kChunk, n - start);
    const std::uint8_t* codes = packed + start / 8 * static_cast<std::size_t>(layout.bits);
    if (layout.high_first) {
      unpack_high(codes, (count + 1) / 2, buffer.bytes());
    } else if (layout.bits < 8) {
      unpack(codes, count, buffer);
    }
    if (layout.bits < 8) codes = buffer.bytes();
    for (std::size_t done = 0; done < count;) {
      const std::size_t batch = std::min(remaining, count - done);
      const float scale =
          layout.scales != nullptr ? layout.scales[index] : layout.scale_table[layout.scale_bytes[index]];
      make(codes + done, batch, scale, position, out + start + done);
      done += batch;
      remaining -= batch;
      row_left -= batch;
      if (remaining == 0) {
        ++index;
        ++position;
        if (row_left == 0) {
          row_left = layout.cols;
          position = 0;
        }
        remaining = std::min(layout.group, row_left);
      }
    }
  }
}

}  // namespace

void scaled_decode(const ScaledLayout& layout, const std::uint8_t* packed, std::size_t n, void* out, Dtype type) {
  switch (type) {
    case Dtype::f32:
      return decode<Dtype::f32>(layout, packed, n, static_cast<float*>(out));
    case Dtype::f16:
      return decode<Dtype::f16>(layout, packed, n, static_cast<std::uint16_t*>(out));
    case Dtype::bf16:
      return decode<Dtype::bf16>(layout, packed, n, static_cast<std::uint16_t*>(out));
    case Dtype::f64:
      return;
  }
}

}  // namespace ingot::INGOT_ISA
