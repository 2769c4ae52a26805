#include "core/affine_zeros.h"

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using ingot::Dtype;
using ingot::Numbers;

// The element type of scales: f32, f16 or bf16.
Dtype scale_type(std::string_view name) {
  const Dtype type = float_type(name);
  require(type != Dtype::f64, "expected an element type f32, f16 or bf16");
  return type;
}

Numbers numbers(const InArray& values, Dtype type, std::size_t count) {
  require_elements(values, type, "expected numbers of the named type");
  require(values.size() == count, "expected as many elements out as in");
  return {values.data(), type};
}

std::size_t elements(const OutArray& out, Dtype type) {
  require_elements(out, type, "expected an output of the named type");
  return out.size();
}

bool offsets(const InArray& scales, const InArray& points, const OutArray& out, std::string_view dtype) {
  const Dtype type = scale_type(dtype);
  const std::size_t n = elements(out, type);
  const Numbers steps = numbers(scales, type, n), zeros = numbers(points, type, n);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_offsets)(steps, zeros, n, out.data());
}

bool points(const InArray& scales, const InArray& shifts, float low, float high, const OutArray& out,
            std::string_view dtype) {
  const Dtype type = scale_type(dtype);
  const std::size_t n = elements(out, type);
  const Numbers steps = numbers(scales, type, n), zeros = numbers(shifts, type, n);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_points)(steps, zeros, n, low, high, out.data());
}

bool shift(const InArray& points, std::string_view dtype, double delta, const OutArray& out, std::string_view target) {
  const Dtype type = scale_type(target);
  const std::size_t n = elements(out, type);
  const Numbers zeros = numbers(points, scale_type(dtype), n);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_shift)(zeros, n, delta, out.data(), type);
}

bool equal(const InArray& values, std::string_view dtype, float target) {
  const Numbers in = numbers(values, scale_type(dtype), values.size());
  const std::size_t n = values.size();
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_equal)(in, n, target);
}

bool integers(const InArray& values, std::string_view dtype, float low, float high, const OutBytes& out) {
  require(low >= -128 && high <= 255, "expected a range of numbers that a byte holds");
  const Numbers in = numbers(values, scale_type(dtype), out.size());
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_integers)(in, out.size(), low, high, out.data());
}

void from_integers(const InBytes& integers, bool is_signed, const OutArray& out, std::string_view dtype) {
  const Dtype type = scale_type(dtype);
  require(elements(out, type) == integers.size(), "expected as many elements out as in");
  nb::gil_scoped_release release;
  INGOT_KERNEL(affine_numbers)(integers.data(), is_signed, integers.size(), out.data(), type);
}

bool same(const InArray& values, std::string_view dtype, const OutArray& out, std::string_view target) {
  const Dtype type = scale_type(target);
  const std::size_t n = elements(out, type);
  const Numbers in = numbers(values, scale_type(dtype), n);
  nb::gil_scoped_release release;
  return INGOT_KERNEL(affine_same)(in, n, out.data(), type);
}

}  // namespace

void bind_affine_zeros(nb::module_& m) {
  define(m, "affine_offsets", &offsets, nb::arg("scales"), nb::arg("points"), nb::arg("out"), nb::arg("dtype"),
         "-scales * points; False where a value s * (q - z) would become another number, q up to 255.");
  define(m, "affine_points", &points, nb::arg("scales"), nb::arg("offsets"), nb::arg("low"), nb::arg("high"),
         nb::arg("out"), nb::arg("dtype"),
         "Integers from low to high that affine_offsets takes to these offsets; False where there are none.");
  define(m, "affine_shift", &shift, nb::arg("points"), nb::arg("dtype"), nb::arg("delta"), nb::arg("out"),
         nb::arg("target"), "points + delta; False unless each sum is exact in the target's type.");
  define(m, "affine_equal", &equal, nb::arg("values"), nb::arg("dtype"), nb::arg("wanted"),
         "Whether every value is the one wanted.");
  define(m, "affine_integers", &integers, nb::arg("values"), nb::arg("dtype"), nb::arg("low"), nb::arg("high"),
         nb::arg("out"), "Values as bytes; False unless each is an integer from low to high.");
  define(m, "affine_numbers", &from_integers, nb::arg("integers"), nb::arg("signed"), nb::arg("out"),
         nb::arg("dtype"), "Bytes as floats.");
  define(m, "affine_same", &same, nb::arg("values"), nb::arg("dtype"), nb::arg("out"), nb::arg("target"),
         "Cast; False unless each number is the same, or NaN.");
}
