// Converts the codes of ggml's blocks to rows, lowest bits first, with their scales, and back (spec/gguf.md,
// "Repacking"). A block's low fields are its first elements, its high fields the later ones; in a row neighbours are
// adjacent.
#include <cstring>

#include "kernels/bits.h"
#include "kernels/floats.h"
#include "kernels/ggml_types.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr bool has_fifth(Ggml type) { return type == Ggml::q5_0 || type == Ggml::q5_1; }

// In the machine's byte order, for NumPy.
inline void put_f32(float value, Byte* bytes) { std::memcpy(bytes, &value, 4); }

// Eight codes are the bytes of a word, the first in the lowest.
template <std::size_t kBytes = 8>
inline std::uint64_t load(const Byte* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, kBytes);
  return little(word);
}

template <std::size_t kBytes = 8>
inline void store(std::uint64_t word, Byte* bytes) {
  word = little(word);
  std::memcpy(bytes, &word, kBytes);
}

constexpr std::uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0f, kOnes = 0x0101010101010101;

// The bits of a byte as bytes that are 0 or 1, and back.
inline std::uint64_t spread1(Byte bits) {
  const std::uint64_t local = (bits * kOnes) & 0x8040201008040201;  // byte k keeps bit k
  return (local + 0x7f7f7f7f7f7f7f7f) >> 7 & kOnes;
}

inline Byte join1(std::uint64_t bytes) { return static_cast<Byte>((bytes & kOnes) * 0x0102040810204080 >> 56); }

using Eight = std::uint8_t __attribute__((vector_size(8)));
using Sixteen = std::uint8_t __attribute__((vector_size(16)));

template <class T>
inline T bytes_at(const Byte* cursor) {
  T bytes;
  std::memcpy(&bytes, cursor, sizeof bytes);
  return bytes;
}

// A byte of a block has one code of the first half of the row and one of the second; a byte of a row has two
// neighbours.
inline void fours_to_row(const Byte* __restrict q, Byte* __restrict row) {
  const Sixteen bytes = bytes_at<Sixteen>(q);
  const Eight even = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 8, 10, 12, 14);
  const Eight parity = __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 9, 11, 13, 15);
  const Eight low = (even & 0x0f) | (parity << 4), high = (even >> 4) | (parity & 0xf0);
  std::memcpy(row, &low, 8);
  std::memcpy(row + 8, &high, 8);
}

inline void fours_from_row(const Byte* __restrict row, Byte* __restrict q) {
  const Eight low = bytes_at<Eight>(row), high = bytes_at<Eight>(row + 8);
  const Eight even = (low & 0x0f) | (high << 4), odd = (low >> 4) | (high & 0xf0);
  const Sixteen bytes = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  std::memcpy(q, &bytes, 16);
}

// Eight codes of 5 bits are 5 bytes of a row.
inline void fives_to_row(const Byte* __restrict high, const Byte* __restrict q, Byte* __restrict row) {
  for (int run = 0; run < 4; ++run) {
    const std::uint64_t nibbles = load(q + run % 2 * 8) >> run / 2 * 4 & kLowNibbles;
    const std::uint64_t bits = gather<5>(nibbles | spread1(high[run]) << 4);
    store<5>(bits, row + 5 * run);
  }
}

inline void fives_from_row(const Byte* __restrict row, Byte* __restrict high, Byte* __restrict q) {
  std::uint64_t codes[4];
  for (int run = 0; run < 4; ++run) {
    codes[run] = spread<5>(load<5>(row + 5 * run));
    high[run] = join1(codes[run] >> 4);
  }
  for (int part = 0; part < 2; ++part) {
    const std::uint64_t word = (codes[part] & kLowNibbles) | (codes[2 + part] & kLowNibbles) << 4;
    store(word, q + 8 * part);
  }
}

// Eight codes of a byte each become as many bytes of a row as a code has bits.
template <int kBits>
inline void bytes_to_row(const Byte* __restrict codes, int count, Byte* __restrict row) {
  for (int run = 0; run < count / 8; ++run) store<kBits>(gather<kBits>(load(codes + 8 * run)), row + kBits * run);
}

// Types with a header of scales (and minima) of at most f16, which stay unchanged, followed by codes.
template <Ggml kType>
void apart(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict minima) {
  constexpr std::size_t kScales = kOf<kType>.scales, kMinima = kOf<kType>.minima;
  std::memcpy(scales, b, kScales);
  if constexpr (kMinima != 0) std::memcpy(minima, b + kScales, kMinima);
  const Byte* q = b + kScales + kMinima;
  if constexpr (kType == Ggml::q8_0 || kType == Ggml::q2_0)
    std::memcpy(row, q, kOf<kType>.bytes - kScales);
  else if constexpr (has_fifth(kType))
    fives_to_row(q, q + 4, row);
  else
    fours_to_row(q, row);
}

template <Ggml kType>
void together(const Byte* __restrict row, const Byte* __restrict scales, const Byte* __restrict minima,
              Byte* __restrict b) {
  constexpr std::size_t kScales = kOf<kType>.scales, kMinima = kOf<kType>.minima;
  std::memcpy(b, scales, kScales);
  if constexpr (kMinima != 0) std::memcpy(b + kScales, minima, kMinima);
  Byte* q = b + kScales + kMinima;
  if constexpr (kType == Ggml::q8_0)
    std::memcpy(q, row, 32);
  else if constexpr (has_fifth(kType))
    fives_from_row(row, q, q + 4);
  else
    fours_from_row(row, q);
}

// Runs of 8 bytes: low nibbles, then high ones.
template <>
void apart<Ggml::nvfp4>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict) {
  std::memcpy(scales, b, 4);
  for (int k = 0; k < 4; ++k) {
    const std::uint64_t word = load(b + 4 + 8 * k);
    store<4>(gather<4>(word & kLowNibbles), row + 8 * k);
    store<4>(gather<4>(word >> 4 & kLowNibbles), row + 8 * k + 4);
  }
}

template <>
void together<Ggml::nvfp4>(const Byte* __restrict row, const Byte* __restrict scales, const Byte* __restrict,
                           Byte* __restrict b) {
  std::memcpy(b, scales, 4);
  for (int k = 0; k < 4; ++k) {
    const Byte* from = row + 8 * k;
    store(spread<4>(load<4>(from)) | spread<4>(load<4>(from + 4)) << 4, b + 4 + 8 * k);
  }
}

// Types whose scales are products that f32 represents exactly: `scale * code`, or `scale * code + minimum`.
template <>
void apart<Ggml::q2_k>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales,
                       Byte* __restrict minima) {
  const float d = f16_at(b + 80), dmin = f16_at(b + 82);
  Byte codes[256];
  for (int k = 0; k < 16; ++k) {
    put_f32(d * static_cast<float>(b[k] & 15), scales + 4 * k);
    put_f32(-(dmin * static_cast<float>(b[k] >> 4)), minima + 4 * k);
    const Byte* q = b + 16 + k / 8 * 32 + k % 2 * 16;
    for (int j = 0; j < 16; ++j) codes[16 * k + j] = q[j] >> (k % 8 / 2 * 2) & 3;
  }
  bytes_to_row<2>(codes, 256, row);
}

template <>
void apart<Ggml::q3_k>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict) {
  const float d = f16_at(b + 108);
  Byte codes[256];
  for (int k = 0; k < 16; ++k) {
    put_f32(d * static_cast<float>(q3_k_scale(b, k)), scales + 4 * k);
    const Byte *q = b + 32 + k / 8 * 32 + k % 2 * 16, *top = b + k % 2 * 16;
    for (int j = 0; j < 16; ++j)
      codes[16 * k + j] = static_cast<Byte>((q[j] >> (k % 8 / 2 * 2) & 3) | (top[j] >> (k / 2) & 1) << 2);
  }
  bytes_to_row<3>(codes, 256, row);
}

// The scales and minima of Q4_K and Q5_K.
inline void scaled(const Byte* b, Byte* __restrict scales, Byte* __restrict minima) {
  const float d = f16_at(b), dmin = f16_at(b + 2);
  for (int k = 0; k < 8; ++k) {
    int scale = 0, minimum = 0;
    six_bits(b, k, scale, minimum);
    put_f32(d * static_cast<float>(scale), scales + 4 * k);
    put_f32(-(dmin * static_cast<float>(minimum)), minima + 4 * k);
  }
}

template <>
void apart<Ggml::q4_k>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales,
                       Byte* __restrict minima) {
  scaled(b, scales, minima);
  Byte codes[256];
  for (int k = 0; k < 8; ++k)
    for (int j = 0; j < 32; ++j) codes[32 * k + j] = b[16 + k / 2 * 32 + j] >> (k % 2 * 4) & 15;
  bytes_to_row<4>(codes, 256, row);
}

template <>
void apart<Ggml::q5_k>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales,
                       Byte* __restrict minima) {
  scaled(b, scales, minima);
  Byte codes[256];
  for (int k = 0; k < 8; ++k)
    for (int j = 0; j < 32; ++j)
      codes[32 * k + j] = static_cast<Byte>((b[48 + k / 2 * 32 + j] >> (k % 2 * 4) & 15) | (b[16 + j] >> k & 1) << 4);
  bytes_to_row<5>(codes, 256, row);
}

template <>
void apart<Ggml::q6_k>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict) {
  const float d = f16_at(b + 208);
  Byte codes[256];
  for (int k = 0; k < 16; ++k) {
    put_f32(d * static_cast<float>(static_cast<std::int8_t>(b[192 + k])), scales + 4 * k);
    const Byte *q = b + k / 8 * 64 + k % 4 * 16, *top = b + 128 + k / 8 * 32 + k % 2 * 16;
    for (int j = 0; j < 16; ++j)
      codes[16 * k + j] =
          static_cast<Byte>((q[j] >> (k % 8 / 4 * 4) & 15) | (top[j] >> (k % 8 / 2 * 2) & 3) << 4);
  }
  bytes_to_row<6>(codes, 256, row);
}

template <>
void apart<Ggml::iq4_xs>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict) {
  const float d = f16_at(b);
  for (int k = 0; k < 8; ++k) {
    put_f32(d * static_cast<float>(iq4_xs_scale(b, k)), scales + 4 * k);
    fours_to_row(b + 8 + 16 * k, row + 16 * k);
  }
}

template <>
void apart<Ggml::tq2_0>(const Byte* __restrict b, Byte* __restrict row, Byte* __restrict scales, Byte* __restrict) {
  std::memcpy(scales, b + 64, 2);
  Byte codes[256];
  for (int k = 0; k < 8; ++k)
    for (int j = 0; j < 32; ++j) codes[32 * k + j] = b[k / 4 * 32 + j] >> 2 * (k % 4) & 3;
  bytes_to_row<2>(codes, 256, row);
}

// The offsets of block `i`: of the complete block and of each of its parts.
template <Ggml kType>
struct Offsets {
  explicit Offsets(std::size_t i)
      : block(i * kOf<kType>.bytes),
        row(i * (kOf<kType>.elements * kOf<kType>.bits / 8)),
        scales(i * kOf<kType>.scales),
        minima(i * kOf<kType>.minima) {}
  std::size_t block, row, scales, minima;
};

}  // namespace

void ggml_unpack(Ggml type, const std::uint8_t* in, std::size_t count, std::uint8_t* codes, std::uint8_t* scales,
                 std::uint8_t* minima) {
  with_type(type, [=]<Ggml kType>() requires(kOf<kType>.bits != 0) {
    for (std::size_t i = 0; i < count; ++i) {
      const Offsets<kType> index(i);
      apart<kType>(in + index.block, codes + index.row, scales + index.scales, minima + index.minima);
    }
  });
}

void ggml_pack(Ggml type, const std::uint8_t* codes, const std::uint8_t* scales, const std::uint8_t* minima,
               std::size_t count, std::uint8_t* out) {
  with_type(type, [=]<Ggml kType>() requires(kOf<kType>.packed) {
    for (std::size_t i = 0; i < count; ++i) {
      const Offsets<kType> index(i);
      together<kType>(codes + index.row, scales + index.scales, minima + index.minima, out + index.block);
    }
  });
}

}  // namespace ingot::INGOT_ISA
