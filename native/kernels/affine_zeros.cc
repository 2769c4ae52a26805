// Conversion of zero points, offsets and scales of the affine family between their representations. Each function
// returns whether every number keeps its value; if one does not, the output is meaningless.
#include <bit>
#include <cstdint>

#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 256;
struct Block {
  alignas(64) float x[kBlock];
};

constexpr float kMostZero = 255;
// Limit for scales: multiplied by a code or the difference of two, the result is still finite in f32.
constexpr float kMostScale = 0x1p118f;
// Bits of an f32 after the first 11 of its significand: if they are 0, the product with an integer of 9 bits is exact.
constexpr std::uint32_t kMoreBits = 0x1fff;
// Limit above which a double cannot represent every integer together with every fraction of an f32.
constexpr double kMostShifted = 0x1p40;

void load(const Numbers& in, std::size_t start, std::size_t n, Block& out) {
  switch (in.type) {
    case Dtype::f16:
      return load_block<Dtype::f16>(static_cast<const std::uint16_t*>(in.data) + start, n, out.x);
    case Dtype::bf16:
      return load_block<Dtype::bf16>(static_cast<const std::uint16_t*>(in.data) + start, n, out.x);
    default:
      return load_block<Dtype::f32>(static_cast<const float*>(in.data) + start, n, out.x);
  }
}

void store(const Block& in, void* out, Dtype type, std::size_t start, std::size_t n) {
  switch (type) {
    case Dtype::f16:
      return store_block<Dtype::f16>(in.x, n, static_cast<std::uint16_t*>(out) + start);
    case Dtype::bf16:
      return store_block<Dtype::bf16>(in.x, n, static_cast<std::uint16_t*>(out) + start);
    default:
      return store_block<Dtype::f32>(in.x, n, static_cast<float*>(out) + start);
  }
}

// Calls `block(start, count)` for blocks of `n` numbers until a call returns false.
template <class Body>
bool every(std::size_t n, Body body) {
  for (std::size_t start = 0; start < n; start += kBlock)
    if (!body(start, n - start < kBlock ? n - start : kBlock)) return false;
  return true;
}

// Rounds to the nearest integer, ties to even, for small magnitudes; a zero keeps its sign.
inline float rounded(float x) {
  constexpr float kUnits = 0x1.8p23f;
  const float near = (x + kUnits) - kUnits;
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(x) & 0x80000000u;
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(near) & 0x7fffffffu) | sign);
}

inline float magnitude(float x) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu); }

// Returns whether the products of a scale with integers up to kMostZero are representable in f32.
inline bool few_bits(float scale) {
  const bool is_few = !(std::bit_cast<std::uint32_t>(scale) & kMoreBits), small = magnitude(scale) < kMostScale;
  return is_few & small;
}

}  // namespace

bool affine_offsets(const Numbers& scales, const Numbers& points, std::size_t n, void* out) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block scale, point, product, back;
    load(scales, start, count, scale);
    load(points, start, count, point);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float z = point.x[i], s = scale.x[i];
      product.x[i] = -s * z;
      const bool is_few = few_bits(s), small = magnitude(z) <= kMostZero, whole = rounded(z) == z;
      bad |= !(is_few & small & whole);
    }
    if (bad) return false;
    store(product, out, scales.type, start, count);
    load({out, scales.type}, start, count, back);
    for (std::size_t i = 0; i < count; ++i) bad |= !(back.x[i] == product.x[i]);
    return !bad;
  });
}

bool affine_points(const Numbers& scales, const Numbers& offsets, std::size_t n, float low, float high, void* out) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block scale, offset, point;
    load(scales, start, count, scale);
    load(offsets, start, count, offset);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float s = scale.x[i], o = offset.x[i], z = s == 0 ? 0 : rounded(-o / s);
      point.x[i] = z;
      bad |= !(few_bits(s) & (z >= low) & (z <= high) & (-s * z == o));
    }
    if (bad) return false;
    store(point, out, scales.type, start, count);
    return true;
  });
}

bool affine_shift(const Numbers& points, std::size_t n, double delta, void* out, Dtype type) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block point, moved, back;
    double sums[kBlock];
    load(points, start, count, point);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double z = static_cast<double>(point.x[i]);
      sums[i] = z + delta;
      moved.x[i] = static_cast<float>(sums[i]);
      bad |= !((z <= kMostShifted) & (z >= -kMostShifted) & (sums[i] - delta == z));
    }
    if (bad) return false;
    store(moved, out, type, start, count);
    load({out, type}, start, count, back);
    for (std::size_t i = 0; i < count; ++i) bad |= !(static_cast<double>(back.x[i]) == sums[i]);
    return !bad;
  });
}

bool affine_equal(const Numbers& numbers, std::size_t n, float target) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block result;
    load(numbers, start, count, result);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i) bad |= !(result.x[i] == target);
    return !bad;
  });
}

bool affine_integers(const Numbers& numbers, std::size_t n, float low, float high, std::uint8_t* out) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block result;
    load(numbers, start, count, result);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = result.x[i];
      bad |= !((x >= low) & (x <= high) & (rounded(x) == x));
    }
    if (bad) return false;
    for (std::size_t i = 0; i < count; ++i) out[start + i] = static_cast<std::uint8_t>(static_cast<int>(result.x[i]));
    return true;
  });
}

void affine_numbers(const std::uint8_t* integers, bool is_signed, std::size_t n, void* out, Dtype type) {
  every(n, [&](std::size_t start, std::size_t count) {
    Block numbers;
    const std::uint8_t flip = is_signed ? 0x80 : 0, *in = integers + start;
    for (std::size_t i = 0; i < count; ++i) numbers.x[i] = static_cast<float>((in[i] ^ flip) - flip);
    store(numbers, out, type, start, count);
    return true;
  });
}

bool affine_same(const Numbers& numbers, std::size_t n, void* out, Dtype type) {
  return every(n, [&](std::size_t start, std::size_t count) {
    Block number, back;
    load(numbers, start, count, number);
    store(number, out, type, start, count);
    load({out, type}, start, count, back);
    unsigned bad = 0;
    for (std::size_t i = 0; i < count; ++i)
      bad |= !((back.x[i] == number.x[i]) | (number.x[i] != number.x[i]));
    return !bad;
  });
}

}  // namespace ingot::INGOT_ISA
