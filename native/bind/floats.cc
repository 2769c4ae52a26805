#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

void cast(const InArray& values, std::string_view dtype, const OutArray& out, std::string_view target) {
  const ingot::Dtype from = float_type(dtype), to = float_type(target);
  require_elements(values, from, "expected aligned values of the named type");
  require_elements(out, to, "expected an aligned output of the named type");
  require(values.size() == out.size(), "expected as many elements out as in");
  nb::gil_scoped_release release;
  INGOT_KERNEL(cast)(values.data(), from, values.size(), out.data(), to);
}

void require_pair(const InArray& reference, ingot::Dtype one, const InArray& other, ingot::Dtype two) {
  require_elements(reference, one, "expected aligned values of the named type");
  require_elements(other, two, "expected aligned values of the named type");
  require(reference.size() == other.size(), "expected as many elements in either array");
}

std::tuple<std::size_t, double, double, double, double, double, std::size_t, std::size_t> pair_stats(
    const InArray& reference, std::string_view dtype, const InArray& other, std::string_view other_dtype) {
  const ingot::Dtype one = float_type(dtype), two = float_type(other_dtype);
  require_pair(reference, one, other, two);
  nb::gil_scoped_release release;
  const ingot::PairStats found = INGOT_KERNEL(pair_stats)(reference.data(), one, other.data(), two, reference.size());
  return {found.finite, found.squared_error, found.squared_reference, found.squared_other,
          found.dot,    found.max_abs,       found.incomparable,               found.different};
}

double pair_error(const InArray& reference, std::string_view dtype, const InArray& other, std::string_view other_dtype) {
  const ingot::Dtype one = float_type(dtype), two = float_type(other_dtype);
  require_pair(reference, one, other, two);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(pair_error)(reference.data(), one, other.data(), two, reference.size());
}

}  // namespace

void bind_floats(nb::module_& m) {
  define(m, "cast", &cast, nb::arg("values"), nb::arg("dtype"), nb::arg("out"), nb::arg("target"),
        "Cast between f32, f16, bf16 and f64, rounded once to nearest even; a NaN stays one.");
  define(m, "pair_stats", &pair_stats, nb::arg("reference"), nb::arg("dtype"), nb::arg("other"), nb::arg("other_dtype"),
        "Return (finite pairs, sum (r-x)^2, sum r^2, sum x^2, sum r*x, max |r-x|, odd pairs, different pairs).");
  define(m, "pair_error", &pair_error, nb::arg("reference"), nb::arg("dtype"), nb::arg("other"), nb::arg("other_dtype"),
        "Return the sum (r-x)^2 of pair_stats alone.");
}
