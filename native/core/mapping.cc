#include "core/mapping.h"

#if defined(_WIN32)

#ifndef NOMINMAX  // MinGW's C++ library sets it
#define NOMINMAX
#endif
#define WIN32_LEAN_AND_MEAN
#include <io.h>
#include <windows.h>

namespace ingot {

void* map_file(int descriptor, std::uint64_t offset, std::size_t size, bool writable) {
  const auto file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
  const HANDLE mapping = CreateFileMappingW(file, nullptr, writable ? PAGE_WRITECOPY : PAGE_READONLY, 0, 0, nullptr);
  if (mapping == nullptr) return nullptr;
  void* const start = MapViewOfFile(mapping, writable ? FILE_MAP_COPY : FILE_MAP_READ, static_cast<DWORD>(offset >> 32),
                                    static_cast<DWORD>(offset), size);
  const DWORD refused = GetLastError();
  CloseHandle(mapping);  // the view keeps it open
  SetLastError(refused);
  return start;
}

void unmap_file(void* start, std::size_t) { UnmapViewOfFile(start); }

}  // namespace ingot

#else

#include <sys/mman.h>

#ifndef MAP_NORESERVE  // a hint that some systems do not support
#define MAP_NORESERVE 0
#endif

namespace ingot {

void* map_file(int descriptor, std::uint64_t offset, std::size_t size, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const start = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_NORESERVE, descriptor, static_cast<off_t>(offset));
  return start == MAP_FAILED ? nullptr : start;
}

void unmap_file(void* start, std::size_t size) { munmap(start, size); }

}  // namespace ingot

#endif
