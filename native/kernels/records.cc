// One column of records of 16 bytes (a 64-bit key and two 32-bit words), gathered while the keys are compared.
#include <cstring>

#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {

RecordsSeen gather_column(const std::uint8_t* records, std::size_t n, std::uint64_t key, int column, std::uint32_t* out) {
  // Files do not align records; the type lets the compiler know that while it vectorizes.
  using Word = std::uint32_t __attribute__((aligned(1), may_alias));
  const Word* words = reinterpret_cast<const Word*>(records);
  const std::uint32_t low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  std::uint32_t other_key = 0, other_column = 0;
  for (std::size_t i = 0; i < n; ++i) {
    other_key |= (words[4 * i] ^ low) | (words[4 * i + 1] ^ high);
    other_column |= words[4 * i + 3 - column];
    out[i] = words[4 * i + 2 + column];
  }
  return {other_key == 0, (other_column & 0x7fffffffu) != 0};
}

}  // namespace ingot::INGOT_ISA
