#include <nanobind/ndarray.h>

#include "bind/bind.h"
#include "core/crc32c.h"

namespace {

// Holds a buffer export for the time of a call that runs without the GIL.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace

void bind_checksum(nb::module_& m) {
  m.def(
      "crc32c",
      [](nb::handle data, std::uint32_t value) {
        Bytes bytes(data);
        nb::gil_scoped_release release;
        return ingot::crc32c(value, bytes.data(), bytes.size());
      },
      nb::arg("data"), nb::arg("value") = 0, "Continue a CRC-32C over a C-contiguous buffer.");
}
