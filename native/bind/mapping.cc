#include <nanobind/ndarray.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "bind/bind.h"

#ifndef MAP_NORESERVE  // a hint that some systems do without
#define MAP_NORESERVE 0
#endif

namespace {

struct Pages {
  void* start;
  std::size_t size;
};

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
using ConstBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

}  // namespace

// Python's own mmap keeps a duplicate of the descriptor for as long as the mapping lives; this one needs none.
void bind_mapping(nb::module_& m) {
  m.def(
      "map_file",
      [](int descriptor, std::uint64_t offset, std::size_t size, bool writable) -> nb::object {
        const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        void* const start =
            mmap(nullptr, size, protection, MAP_PRIVATE | MAP_NORESERVE, descriptor, static_cast<off_t>(offset));
        if (start == MAP_FAILED) {
          PyErr_SetFromErrno(PyExc_OSError);
          throw nb::python_error();
        }
        auto* const pages = new Pages{start, size};
        const nb::capsule owner(pages, [](void* held) noexcept {
          const auto* const gone = static_cast<Pages*>(held);
          munmap(gone->start, gone->size);
          delete gone;
        });
        if (writable) return nb::cast(Bytes(start, {size}, owner));
        return nb::cast(ConstBytes(start, {size}, owner));
      },
      nb::arg("descriptor"), nb::arg("offset"), nb::arg("size"), nb::arg("writable"),
      "Map bytes of an open file, read-only or copy-on-write; the offset is a multiple of the page size.");
}
