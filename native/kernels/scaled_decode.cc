// Codes to scale * value (core/scaled.h): one product in f32, then one rounding to the target. Tables of up to 16 entries
// stay in a register: sixteen products a group, then shuffles.
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

// Two codes a byte, the first one in the high bits.
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

// What one run of codes that share a scale becomes.
template <Dtype kDtype>
using Convert = void (*)(const std::uint8_t*, std::size_t, float, const float*, TypeOf<kDtype>*);

template <Dtype kDtype>
Convert<kDtype> converter(const ScaledLayout& at) {
  switch (at.values) {
    case ScaledValues::e4m3:
      return convert<kDtype, ScaledValues::e4m3>;
    case ScaledValues::e5m2:
      return convert<kDtype, ScaledValues::e5m2>;
    case ScaledValues::i8:
      return convert<kDtype, ScaledValues::i8>;
    case ScaledValues::table:
      break;
  }
  return at.bits <= 4 && at.group >= 8 ? look_up<kDtype> : convert<kDtype, ScaledValues::table>;
}

// Makes runs of codes; `place` is the number of a run in its row.
template <Dtype kDtype>
class Runs {
 public:
  explicit Runs(const ScaledLayout& at) : make_(converter<kDtype>(at)) {
    if (at.table != nullptr) std::copy_n(at.table, std::size_t{1} << at.bits, table_);
#if defined(__AVX512BW__)
    shared_ = at.values == ScaledValues::e4m3 && at.group >= kLeastShared;
#endif
  }

  void operator()(const std::uint8_t* codes, std::size_t n, float scale, [[maybe_unused]] std::size_t place,
                  TypeOf<kDtype>* out) {
#if defined(__AVX512BW__)
    if constexpr (kDtype == Dtype::bf16 || kDtype == Dtype::f16)
      if (shared_ && place < kPlaces) {
        Products& products = products_[place];
        const bool equal = products.scale == scale;  // never where one is NaN
        if (equal && std::signbit(products.scale) == std::signbit(scale)) {  // seen in the row above: more rows of the block may follow
          if (!products.made) convert_e4m3<kDtype>(kEvery.codes, 128, scale, products.bits);
          products.made = true;
          return look_up_e4m3(codes, n, products, out);
        }
        products.scale = scale;
        products.made = false;
      }
#endif
    make_(codes, n, scale, table_, out);
  }

 private:
  Convert<kDtype> make_;
  alignas(64) float table_[256] = {};  // of fewer than 16 entries the rest is unused
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
void decode(const ScaledLayout& at, const std::uint8_t* packed, std::size_t n, TypeOf<kDtype>* out) {
  Runs<kDtype> make(at);
  const Unpack unpack = unpacker<false>(at.bits);
  Codes buffer;
  std::size_t index = at.phase / at.group, row_left = at.cols - at.phase;  // the present group, and columns left
  std::size_t place = index;                                               // of the group in its row
  std::size_t left = std::min(at.group - at.phase % at.group, row_left);
  for (std::size_t start = 0; start < n; start += kChunk) {
    const std::size_t count = std::min(kChunk, n - start);
    const std::uint8_t* codes = packed + start / 8 * static_cast<std::size_t>(at.bits);
    if (at.high_first) {
      unpack_high(codes, (count + 1) / 2, buffer.bytes());
    } else if (at.bits < 8) {
      unpack(codes, count, buffer);
    }
    if (at.bits < 8) codes = buffer.bytes();
    for (std::size_t done = 0; done < count;) {
      const std::size_t some = std::min(left, count - done);
      const float scale = at.scales != nullptr ? at.scales[index] : at.scale_table[at.scale_bytes[index]];
      make(codes + done, some, scale, place, out + start + done);
      done += some;
      left -= some;
      row_left -= some;
      if (left == 0) {
        ++index;
        ++place;
        if (row_left == 0) {
          row_left = at.cols;
          place = 0;
        }
        left = std::min(at.group, row_left);
      }
    }
  }
}

}  // namespace

void scaled_decode(const ScaledLayout& at, const std::uint8_t* packed, std::size_t n, void* out, Dtype type) {
  switch (type) {
    case Dtype::f32:
      return decode<Dtype::f32>(at, packed, n, static_cast<float*>(out));
    case Dtype::f16:
      return decode<Dtype::f16>(at, packed, n, static_cast<std::uint16_t*>(out));
    case Dtype::bf16:
      return decode<Dtype::bf16>(at, packed, n, static_cast<std::uint16_t*>(out));
    case Dtype::f64:
      return;
  }
}

}  // namespace ingot::INGOT_ISA
