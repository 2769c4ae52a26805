// Many small parts that lie in one buffer: their digests, and the order of their positions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ingot {

// Returns whether the bytes have the CRC-32C that `digest` spells as "crc32c:0x" and 8 digits; false for other spellings
// and algorithms, which the caller compares itself.
bool proves(std::string_view digest, const std::uint8_t* data, std::size_t size);

// Whether `count` little-endian positions, of 64 bits and anywhere in memory, ascend from 0 on and end below `limit`.
bool ascend(const std::uint8_t* positions, std::size_t count, std::int64_t limit);

// Whether `count` little-endian values of f32, anywhere in memory, are neither infinite nor NaN.
bool finite(const std::uint8_t* values, std::size_t count);

}  // namespace ingot
