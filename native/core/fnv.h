// FNV-1a with 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/): ids of short keys.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

inline std::uint64_t fnv1a64(const std::uint8_t* data, std::size_t size) {
  std::uint64_t value = 0xCBF29CE484222325u;
  for (std::size_t i = 0; i < size; ++i) value = (value ^ data[i]) * 0x100000001B3u;
  return value;
}

}  // namespace ingot
