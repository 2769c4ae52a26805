#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using Words = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::tuple<bool, bool> gather(const InBytes& records, std::uint64_t key, int column, const Words& out) {
  require(column == 0 || column == 1, "expected column 0 or 1");
  require(records.size() % 16 == 0 && records.size() / 16 == out.size(), "expected 16 bytes for every element out");
  nb::gil_scoped_release release;
  const ingot::RecordsSeen seen = INGOT_KERNEL(gather_column)(records.data(), out.size(), key, column, out.data());
  return {seen.one_key, seen.other_filled};
}

}  // namespace

void bind_records(nb::module_& m) {
  m.def("gather_column", &gather, nb::arg("records"), nb::arg("key"), nb::arg("column"), nb::arg("out"),
        "Gather one of two 32-bit columns of records that begin with a 64-bit key; returns (every key is `key`, the other "
        "column holds something but zero).");
}
