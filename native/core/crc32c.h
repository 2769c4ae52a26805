// CRC-32C (Castagnoli), RFC 3720 appendix B.4.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Continues `crc` (0 for the first call) over `size` bytes, with the processor's instruction if it exists.
std::uint32_t crc32c(std::uint32_t crc, const std::uint8_t* data, std::size_t size);

// Returns whether this processor has that instruction: SSE 4.2 on x86-64, FEAT_CRC32 on arm64.
bool crc32c_has_instruction();

// The same with tables, on any processor.
std::uint32_t crc32c_by_table(std::uint32_t crc, const std::uint8_t* data, std::size_t size);

// Combines the CRC of A, the CRC of B and the number of bytes of B to the CRC of A followed by B.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size);

}  // namespace ingot
