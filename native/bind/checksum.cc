#include "bind/bind.h"
#include "bind/buffer.h"
#include "core/crc32c.h"
#include "core/fnv.h"

void bind_checksum(nb::module_& m) {
  define(
      m, "crc32c",
      [](nb::handle data, std::uint32_t value) {
        const ingot::bind::Bytes bytes(data);
        nb::gil_scoped_release release;
        return ingot::crc32c(value, bytes.data(), bytes.size());
      },
      nb::arg("data"), nb::arg("value") = 0, "Continue a CRC-32C over a C-contiguous buffer.");
  define(
      m, "crc32c_by_table",
      [](nb::handle data, std::uint32_t value) {
        const ingot::bind::Bytes bytes(data);
        nb::gil_scoped_release release;
        return ingot::crc32c_by_table(value, bytes.data(), bytes.size());
      },
      nb::arg("data"), nb::arg("value") = 0, "The same without the processor's instruction; for tests.");
  define(
      m, "fnv1a64",
      [](nb::handle data) {
        const ingot::bind::Bytes bytes(data);
        return ingot::fnv1a64(bytes.data(), bytes.size());
      },
      nb::arg("data"), "FNV-1a-64 of a C-contiguous buffer.");
}
