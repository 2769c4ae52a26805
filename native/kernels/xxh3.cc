// Stripes of 64 bytes into the eight lanes of XXH3.
#include <cstring>

#include "core/xxh3_secret.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

// Files do not align blobs for us; the type lets the compiler know that while it vectorizes.
using Word = std::uint64_t __attribute__((aligned(1), may_alias));

}  // namespace

std::size_t xxh3_stripes(std::uint64_t* lanes, const std::uint8_t* data, std::size_t count, std::size_t stripe) {
  std::uint64_t held[8];
  std::memcpy(held, lanes, sizeof held);
  for (; count != 0; --count, data += 64) {
    const Word* words = reinterpret_cast<const Word*>(data);
    const Word* secret = reinterpret_cast<const Word*>(kXxh3Secret + 8 * stripe);
    __builtin_prefetch(data + 512);
    for (std::size_t lane = 0; lane < 8; ++lane) {
      const std::uint64_t key = words[lane] ^ secret[lane];
      held[lane] += words[lane ^ 1] + (key & 0xffffffffu) * (key >> 32);
    }
    if (++stripe == kXxh3Stripes) {
      const Word* last = reinterpret_cast<const Word*>(kXxh3Secret + 128);
      for (std::size_t lane = 0; lane < 8; ++lane)
        held[lane] = (held[lane] ^ held[lane] >> 47 ^ last[lane]) * 0x9E3779B1u;
      stripe = 0;
    }
  }
  std::memcpy(lanes, held, sizeof held);
  return stripe;
}

}  // namespace ingot::INGOT_ISA
