// Encoding of float32 differences: 4-bit codes of all but the largest, signs with row sums.
#include <bit>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/wdelta_differences.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr std::size_t kCodes = 4096;  // values that wait to be packed

std::uint32_t magnitude(float x) { return std::bit_cast<std::uint32_t>(x) & kMagnitude; }

std::uint32_t largest_magnitude(const float* in, std::size_t n) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t m = magnitude(in[i]);
    most = m > most ? m : most;
  }
  return most;
}

// NumPy's pairwise sum of magnitudes (numpy/_core/src/umath/loops_utils.h describes it): blocks of 128 in eight running
// sums, halves of a multiple of eight above that. The mean of a row must round to the same float16 everywhere.
float pairwise(const float* in, std::size_t n) {
  if (n < 8) {
    float sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += std::bit_cast<float>(magnitude(in[i]));
    return sum;
  }
  if (n > 128) {
    const std::size_t half = n / 2 - n / 2 % 8;
    return pairwise(in, half) + pairwise(in + half, n - half);
  }
  float sums[8];
  for (std::size_t j = 0; j < 8; ++j) sums[j] = std::bit_cast<float>(magnitude(in[j]));
  const std::size_t whole = n - n % 8;
  for (std::size_t i = 8; i < whole; i += 8)
    for (std::size_t j = 0; j < 8; ++j) sums[j] += std::bit_cast<float>(magnitude(in[i + j]));
  float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (std::size_t i = whole; i < n; ++i) sum += std::bit_cast<float>(magnitude(in[i]));
  return sum;
}

#if defined(__AVX2__)
constexpr struct Reversed {
  std::uint8_t of[256];
  constexpr Reversed() : of() {
    for (int i = 0; i < 256; ++i)
      for (int bit = 0; bit < 8; ++bit) of[i] = static_cast<std::uint8_t>(of[i] | ((i >> bit & 1) << (7 - bit)));
  }
} kReversed;
#endif

// One bit per value, set unless it is below zero, the first value in the highest bit; the last byte is filled with 0.
void pack_signs(const float* in, std::size_t n, std::uint8_t* out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(in + i), _mm256_setzero_ps(), _CMP_GE_OQ);
    out[i / 8] = kReversed.of[_mm256_movemask_ps(positive)];
  }
#endif
  for (; i < n; i += 8) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < 8 && i + j < n; ++j) byte |= unsigned{in[i + j] >= 0} << (7 - j);
    out[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// Collects values and packs their codes two per byte, the first in the high bits.
class NibblePacker {
 public:
  NibblePacker(const Int4Grid& grid, std::uint8_t* out) : grid_(grid), out_(out) {}

  void add(const float* in, std::size_t n) {
    while (n) {
      const std::size_t room = kCodes - filled_, count = n < room ? n : room;
      std::memcpy(values_ + filled_, in, count * sizeof *in);
      filled_ += count;
      in += count;
      n -= count;
      if (filled_ == kCodes) flush();
    }
  }

  void finish() {
    if (filled_ % 2) values_[filled_++] = grid_.low;  // code 0
    flush();
  }

 private:
  void flush() {
    for (std::size_t i = 0; i < filled_; ++i) {
      float x = (values_[i] - grid_.low) / grid_.divisor * grid_.factor;
      x = x > 0 ? x : 0;
      x = x < 15 ? x : 15;
      // Where a unit of f32 is 1, adding rounds to nearest even and leaves the integer in the low bits.
      codes_[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(x + 0x1.8p23f) & 15u);
    }
    for (std::size_t i = 0; i < filled_ / 2; ++i)
      out_[i] = static_cast<std::uint8_t>(codes_[2 * i] << 4 | codes_[2 * i + 1]);
    out_ += filled_ / 2;
    filled_ = 0;
  }

  const Int4Grid grid_;
  std::uint8_t* out_;
  std::size_t filled_ = 0;
  alignas(64) float values_[kCodes];
  alignas(64) std::uint8_t codes_[kCodes];
};

}  // namespace

void int4_encode(const Differences& of, const float* before, const std::int64_t* skipped, std::size_t count,
                 const Int4Grid& grid, std::uint8_t* packed) {
  NibblePacker packer(grid, packed);
  if (before) packer.add(before, 1);
  std::size_t next = 0;
  by_blocks(of, 0, of.count, [&](std::size_t start, std::size_t n, const float* values) {
    std::size_t at = 0;
    for (; next < count; ++next) {
      const std::size_t end = static_cast<std::size_t>(skipped[next]) - start;
      if (end >= n) break;
      packer.add(values + at, end - at);
      at = end + 1;
    }
    packer.add(values + at, n - at);
  });
  packer.finish();
}

std::size_t sign_encode(const float* in, std::size_t rows, std::size_t cols, float* sums, std::uint8_t* bits) {
  const std::size_t n = rows * cols;
  std::size_t packed = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    const float* start = in + row * cols;
    if (largest_magnitude(start, cols) >= kInfinity)
      for (std::size_t i = 0; i < cols; ++i)
        if (!is_finite(start[i])) return row * cols + i;
    sums[row] = pairwise(start, cols);
    const std::size_t end = row + 1 < rows ? (row + 1) * cols / 8 * 8 : n;
    pack_signs(in + packed, end - packed, bits + packed / 8);
    packed = end;
  }
  return n;
}

}  // namespace ingot::INGOT_ISA
