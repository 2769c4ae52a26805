#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

#include "bind/bind.h"
#include "core/mapping.h"

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
        void* const start = ingot::map_file(descriptor, offset, size, writable);
        if (start == nullptr) {
#if defined(_WIN32)
          PyErr_SetFromWindowsErr(0);  // of GetLastError
#else
          PyErr_SetFromErrno(PyExc_OSError);
#endif
          throw nb::python_error();
        }
        auto* const pages = new Pages{start, size};
        const nb::capsule owner(pages, [](void* matrix) noexcept {
          const auto* const gone = static_cast<Pages*>(matrix);
          ingot::unmap_file(gone->start, gone->size);
          delete gone;
        });
        if (writable) return nb::cast(Bytes(start, {size}, owner));
        return nb::cast(ConstBytes(start, {size}, owner));
      },
      nb::arg("descriptor"), nb::arg("offset"), nb::arg("size"), nb::arg("writable"),
      "Map bytes of an open file, read-only or copy-on-write; the offset is a multiple of the page size.");
}
