#include "core/heap.h"

#include <cstdlib>  // defines the macros that identify the C library

#if defined(__GLIBC__) || defined(_WIN32)
#include <malloc.h>
#elif defined(__APPLE__)
#include <malloc/malloc.h>
#endif

namespace ingot {

void release_freed() {
#if defined(__GLIBC__)
  malloc_trim(0);
#elif defined(__APPLE__)
  malloc_zone_pressure_relief(nullptr, 0);
#elif defined(_WIN32)
  _heapmin();
#endif
}

}  // namespace ingot
