#include "kernels/delta_add.h"

#include "bind/differences.h"
#include "bind/positions.h"

namespace {

using Floats = In<float>;
using OutFloats = Out<float>;
using OutPositions = Out<std::int64_t>;
using Back = std::optional<OutArray>;
using ingot::Addition;

Addition addition(const InArray& base, const OutArray& out, const Back& back, bool less, std::string_view dtype) {
  const ingot::Dtype type = float_type(dtype);
  require(type != ingot::Dtype::f64, "expected elements of f32, f16 or bf16");
  require_elements(base, type, "expected an aligned base of the named type");
  require_elements(out, type, "expected an aligned output of the named type");
  require(base.size() == out.size(), "expected as many elements in base and output");
  require(static_cast<const void*>(base.data()) == out.data() || apart(base, out), "expected a base that is the output or apart from it");
  if (back) {
    require_elements(*back, type, "expected an aligned way back of the named type");
    require(back->size() == out.size() && !less, "expected as many elements on the way back, of an addition");
    require(out.size() == 0 || (apart(base, *back) && apart(out, *back)), "expected a way back apart from base and output");
  }
  return {base.data(), out.data(), back ? back->data() : nullptr, out.size(), type, less};
}

void int4_add(const InBytes& packed, std::size_t first, const Floats& table, const Positions& positions, const Floats& values,
              bool gaps, const InArray& base, const OutArray& out, const Back& back, bool less, std::string_view dtype) {
  require(table.size() == 16, "expected sixteen values");
  const Addition sum = addition(base, out, back, less, dtype);
  const Followed sorted(positions, out.size());
  const ingot::Placed outliers = sorted.with(values);
  const std::size_t codes = out.size() - (gaps ? positions.size() : 0);
  require(first < 2 && (first + codes + 1) / 2 <= packed.size(), "expected a code for every other element");
  nb::gil_scoped_release release;
  INGOT_KERNEL(int4_add)(packed.data(), first, table.data(), outliers, gaps, sum);
}

void sign_add(const InBytes& bits, std::size_t first, const Floats& scales, const InArray& base, const OutArray& out,
              const Back& back, bool less, std::string_view dtype) {
  const Addition sum = addition(base, out, back, less, dtype);
  const std::size_t rows = scales.size(), cols = rows ? out.size() / rows : 0;
  require(rows * cols == out.size(), "expected rows of one length");
  require(first < 8 && (first + out.size() + 7) / 8 <= bits.size(), "expected a bit for every element");
  nb::gil_scoped_release release;
  INGOT_KERNEL(sign_add)(bits.data(), first, scales.data(), cols, sum);
}

void placed_add(const Positions& positions, std::int64_t origin, const Floats& values, const InArray& base,
                const OutArray& out, const Back& back, bool less, std::string_view dtype) {
  const Addition sum = addition(base, out, back, less, dtype);
  const Followed sorted(positions, out.size(), origin);
  const ingot::Placed where = sorted.with(values);
  nb::gil_scoped_release release;
  INGOT_KERNEL(placed_add)(where, sum);
}

void differences(const InArray& tuned, const InArray& base, const OutFloats& out, std::string_view dtype) {
  const ingot::Differences of = differences_in(tuned, base, dtype);
  require(of.count == out.size(), "expected as many elements in all three");
  require(out.size() == 0 || (apart(tuned, out) && apart(base, out)), "expected an output apart from both");
  nb::gil_scoped_release release;
  INGOT_KERNEL(differences)(of, out.data());
}

std::size_t changed_words(const InArray& old, const InArray& fresh, const OutPositions& gaps, const OutArray& steps) {
  const std::size_t width = old.itemsize();
  require(width == 1 || width == 2 || width == 4 || width == 8, "expected elements of 1, 2, 4 or 8 bytes");
  require(old.size() == fresh.size() && fresh.itemsize() == width, "expected as many elements of one size in both");
  require(steps.itemsize() == width && steps.size() == gaps.size(), "expected a step of that size for every gap");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(changed_words)(old.data(), fresh.data(), old.size(), static_cast<int>(width), gaps.data(), steps.data(),
                                     gaps.size());
}

}  // namespace

void bind_delta_add(nb::module_& m) {
  define(m, "int4_add", &int4_add, nb::arg("packed"), nb::arg("first"), nb::arg("table"), nb::arg("positions"), nb::arg("values"),
        nb::arg("gaps"), nb::arg("base"), nb::arg("out"), nb::arg("back").none(), nb::arg("less"), nb::arg("dtype"),
        "Add what int4_decode gives in f32 to a base (or subtract it), round once; `back` gets the output less it.");
  define(m, "sign_add", &sign_add, nb::arg("bits"), nb::arg("first"), nb::arg("scales"), nb::arg("base"), nb::arg("out"),
        nb::arg("back").none(), nb::arg("less"), nb::arg("dtype"), "As int4_add, of what sign_decode gives.");
  define(m, "placed_add", &placed_add, nb::arg("positions"), nb::arg("origin"), nb::arg("values"), nb::arg("base"),
        nb::arg("out"), nb::arg("back").none(), nb::arg("less"), nb::arg("dtype"),
        "As int4_add, of values at ascending positions, of which `origin` is that of the first element, and 0 elsewhere.");
  define(m, "differences", &differences, nb::arg("tuned"), nb::arg("base"), nb::arg("out"), nb::arg("dtype"),
        "Write tuned - base, computed in f32.");
  define(m, "changed_words", &changed_words, nb::arg("old"), nb::arg("fresh"), nb::arg("gaps"), nb::arg("steps"),
        "Write gaps between the positions of elements whose bits differ (the first from -1), and fresh - old as integers "
        "modulo 2^width; returns how many there are, or more than there is room for.");
}
