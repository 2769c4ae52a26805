// Encodes float32 differences: 4-bit codes of all but the largest.
#include <bit>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/wdelta_differences.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kCodes = 4096;  // values that wait to be packed

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
      // At 1.5 * 2^23 a unit of f32 is 1: adding it rounds to nearest even and leaves the integer in the low bits.
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

void int4_encode(const Differences& differences, const float* before, const std::int64_t* skipped, std::size_t count,
                 const Int4Grid& grid, std::uint8_t* packed) {
  NibblePacker packer(grid, packed);
  if (before) packer.add(before, 1);
  std::size_t next = 0;
  by_blocks(differences, 0, differences.count, [&](std::size_t start, std::size_t n, const float* values) {
    std::size_t index = 0;
    for (; next < count; ++next) {
      const std::size_t end = static_cast<std::size_t>(skipped[next]) - start;
      if (end >= n) break;
      packer.add(values + index, end - index);
      index = end + 1;
    }
    packer.add(values + index, n - index);
  });
  packer.finish();
}

}  // namespace ingot::INGOT_ISA
