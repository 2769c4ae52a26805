// Bytes of an open file as memory, by the system's own calls.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// Maps bytes of an open file, read-only or copy-on-write; the offset is a multiple of the system's granularity. Returns
// null if the system refuses; errno, on Windows GetLastError, has the reason.
void* map_file(int descriptor, std::uint64_t offset, std::size_t size, bool writable);

void unmap_file(void* start, std::size_t size);

}  // namespace ingot
