#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

std::tuple<bool, bool, bool> gather(const InBytes& records, std::uint64_t key, int column, const OutArray& out,
                                    std::string_view dtype) {
  const ingot::Dtype type = float_type(dtype);
  require(type != ingot::Dtype::f64, "expected a target f32, f16 or bf16");
  require_elements(out, type, "expected an aligned output of the named type");
  require(column == 0 || column == 1, "expected column 0 or 1");
  require(records.size() % 16 == 0 && records.size() / 16 == out.size(), "expected 16 bytes for every element out");
  nb::gil_scoped_release release;
  const ingot::RecordsSeen seen = INGOT_KERNEL(gather_column)(records.data(), out.size(), key, column, out.data(), type);
  return {seen.one_key, seen.other_filled, seen.exact};
}

}  // namespace

void bind_records(nb::module_& m) {
  define(m, "gather_column", &gather, nb::arg("records"), nb::arg("key"), nb::arg("column"), nb::arg("out"), nb::arg("dtype"),
        "Gather one of the two f32 columns of records that begin with a 64-bit key; returns (every key is `key`, the other "
        "column holds something but zero, every value is one of `dtype`).");
}
