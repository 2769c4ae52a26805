#include "core/heap.h"

#include "bind/bind.h"

namespace {

void release() {
  nb::gil_scoped_release released;
  ingot::release_freed();
}

}  // namespace

void bind_heap(nb::module_& m) {
  define(m, "release_freed", &release, "Give memory that was freed, and that the C library keeps, back to the system.");
}
