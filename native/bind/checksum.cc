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
  define(m, "crc32c_has_instruction", &ingot::crc32c_has_instruction,
         "Return whether the processor has an instruction for CRC-32C that `crc32c` uses.");
  define(
      m, "crc32c_combine",
      [](std::uint32_t first, std::uint32_t second, std::uint64_t second_size) {
        return ingot::crc32c_combine(first, second, second_size);
      },
      nb::arg("first"), nb::arg("second"), nb::arg("second_size"),
      "The CRC-32C of A followed by B, from that of each and the bytes of B.");
  define(
      m, "fnv1a64",
      [](nb::handle data) {
        const ingot::bind::Bytes bytes(data);
        return ingot::fnv1a64(bytes.data(), bytes.size());
      },
      nb::arg("data"), "FNV-1a-64 of a C-contiguous buffer.");
}
