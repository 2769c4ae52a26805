#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "kernels/affine_add.h"

namespace {

using ingot::AffineChoice;
using ingot::AffineLayout;
using ingot::Dtype;

constexpr std::size_t kMost = std::size_t{1} << 56;  // keeps products with bits and element sizes below 2^63

// The columns, groups and codes of a matrix; the arrays determine the rows.
struct Layout {
  std::size_t cols, group;
  int bits;
  bool is_signed, msb, per_tensor;
  std::size_t row_bytes;
  bool offset;

  Layout(std::size_t cols, std::size_t group, int bits, bool is_signed, bool msb, bool per_tensor, std::size_t row_bytes,
         bool offset)
      : cols(cols), group(group), bits(bits), is_signed(is_signed), msb(msb), per_tensor(per_tensor), row_bytes(row_bytes),
        offset(offset) {
    require(bits >= 1 && bits <= 8, "expected 1 to 8 bits");
    require(cols <= kMost && row_bytes <= kMost && group >= 1, "expected sizes in range and at least one column per group");
    require(row_bytes >= (cols * static_cast<std::size_t>(bits) + 7) / 8, "expected rows long enough for their codes");
    require(!per_tensor || group >= cols, "expected one group per row where one scale serves the tensor");
  }

  AffineLayout with(std::size_t rows) const {
    return {rows, cols, group, row_bytes, bits, is_signed, msb, per_tensor, offset};
  }
};

template <class Packed, class Scales, class Zeros>
void check(const Layout& layout, std::size_t rows, const Packed& packed, const Scales& scales, const Zeros& zeros,
           Dtype scale_type) {
  require(scale_type != Dtype::f64, "expected scales of type f32, f16 or bf16");
  require_elements(scales, scale_type, "expected aligned scales of the named type");
  const std::size_t groups = layout.cols / layout.group + (layout.cols % layout.group != 0);
  std::size_t bytes = 0, count = 0;
  require(!__builtin_mul_overflow(rows, layout.row_bytes, &bytes) && packed.size() == bytes,
          "expected rows * row_bytes packed bytes");
  require(!__builtin_mul_overflow(rows, groups, &count), "expected fewer groups");
  require(scales.size() == (layout.per_tensor ? 1 : count), "expected one scale per group");
  if (zeros) {
    require_elements(*zeros, scale_type, "expected aligned zeros of the scales' type");
    require(zeros->size() == scales.size(), "expected one zero per scale");
  }
}

void dequantize(const InBytes& packed, const InArray& scales, const std::optional<InArray>& zeros, const OutArray& out,
                const Layout& layout, std::string_view scale_dtype, std::string_view dtype) {
  const Dtype scale_type = float_type(scale_dtype), type = float_type(dtype);
  require(type != Dtype::f64, "expected a target f32, f16 or bf16");
  require(out.ndim() == 2 && out.shape(1) == layout.cols, "expected an output of rows x cols");
  require_elements(out, type, "expected an aligned output of the named type");
  check(layout, out.shape(0), packed, scales, zeros, scale_type);
  const AffineLayout native_layout = layout.with(out.shape(0));
  nb::gil_scoped_release release;
  INGOT_KERNEL(affine_dequantize)
  (native_layout, packed.data(), scales.data(), zeros ? zeros->data() : nullptr, scale_type, out.data(), type);
}

void add(const InBytes& packed, const InArray& scales, const std::optional<InArray>& zeros, const InArray& base,
         const OutArray& out, const Layout& layout, std::string_view scale_dtype, std::string_view dtype) {
  const Dtype scale_type = float_type(scale_dtype), type = float_type(dtype);
  require(type != Dtype::f64, "expected a target f32, f16 or bf16");
  require(out.ndim() == 2 && out.shape(1) == layout.cols, "expected an output of rows x cols");
  require(base.ndim() == 2 && base.shape(0) == out.shape(0) && base.shape(1) == out.shape(1), "expected a base of rows x cols");
  require_elements(base, type, "expected an aligned base of the named type");
  require_elements(out, type, "expected an aligned output of the named type");
  const auto* from = static_cast<const std::uint8_t*>(base.data());
  const auto* to = static_cast<const std::uint8_t*>(out.data());
  require(from == to || from + base.nbytes() <= to || to + out.nbytes() <= from, "expected a base that is the output or apart from it");
  check(layout, out.shape(0), packed, scales, zeros, scale_type);
  const AffineLayout native_layout = layout.with(out.shape(0));
  nb::gil_scoped_release release;
  INGOT_KERNEL(affine_add)
  (native_layout, packed.data(), scales.data(), zeros ? zeros->data() : nullptr, scale_type, base.data(), out.data(),
   type);
}

AffineChoice choice(std::string_view method, int bits, bool is_signed, bool symmetric, Dtype scale_type) {
  require(method == "range" || method == "mse" || method == "given", "expected a method range, mse or given");
  require(bits >= (symmetric ? 2 : 1) && bits <= 8, "expected 1 to 8 bits, 2 at least for symmetric codes");
  require(is_signed || !symmetric, "expected signed codes where they are symmetric");
  const float shift = is_signed && !symmetric ? static_cast<float>(1 << (bits - 1)) : 0.0f;
  return {symmetric, method == "mse", method == "given", scale_type, shift};
}

std::tuple<int, std::size_t> quantize(const InArray& values, std::string_view dtype, const OutBytes& packed,
                                      const OutArray& scales, const std::optional<OutArray>& zeros,
                                      const Layout& layout, std::string_view scale_dtype, std::string_view method,
                                      int zero_point) {
  const Dtype scale_type = float_type(scale_dtype), type = float_type(dtype);
  require(values.ndim() == 2 && values.shape(1) == layout.cols, "expected values of rows x cols");
  require_elements(values, type, "expected aligned values of the named type");
  require(zero_point >= -1 && zero_point < 1 << layout.bits && (zero_point < 0 || (!layout.is_signed && !zeros)),
          "expected either a constant zero point of unsigned codes or an array of zeros, not both");
  AffineChoice how = choice(method, layout.bits, layout.is_signed || zero_point >= 0, !zeros.has_value(), scale_type);
  how.offset = layout.offset;
  how.zero_point = zero_point;
  require(zero_point < 0 || (zero_point > 0 && zero_point < (1 << layout.bits) - 1), "expected codes on both sides of zero");
  require(!how.offset || (zeros && !layout.is_signed && !how.provided),
          "expected zeros and unsigned codes to choose offsets");
  require(how.provided || !layout.per_tensor, "expected a given scale where one serves the tensor");
  check(layout, values.shape(0), packed, scales, zeros, scale_type);
  const AffineLayout native_layout = layout.with(values.shape(0));
  nb::gil_scoped_release release;
  const ingot::AffineStatus status = INGOT_KERNEL(affine_quantize)(
      native_layout, how, values.data(), type, packed.data(), scales.data(), zeros ? zeros->data() : nullptr);
  return {status.code, status.index};
}

std::tuple<float, float, std::size_t> range(const InArray& values, std::string_view dtype) {
  const Dtype type = float_type(dtype);
  require_elements(values, type, "expected aligned values of the named type");
  nb::gil_scoped_release release;
  const ingot::AffineRange found = INGOT_KERNEL(affine_range)(values.data(), type, values.size());
  return {found.low, found.high, found.bad};
}

using Floats = Out<float>;
using Doubles = Out<double>;

void candidates(float low, float high, int bits, bool is_signed, bool symmetric, std::string_view scale_dtype,
                const Floats& scales, const Floats& zeros) {
  require(scales.size() == ingot::kCandidates && zeros.size() == ingot::kCandidates, "expected room for all candidates");
  const AffineChoice how = choice("mse", bits, is_signed, symmetric, float_type(scale_dtype));
  INGOT_KERNEL(affine_candidates)(low, high, bits, how, scales.data(), zeros.data());
}

void errors(const InArray& values, std::string_view dtype, int bits, bool is_signed, bool symmetric,
            const Floats& scales, const Floats& zeros, const Doubles& totals) {
  const Dtype type = float_type(dtype);
  require(values.ndim() == 2, "expected values of rows x cols");
  require_elements(values, type, "expected aligned values of the named type");
  require(scales.size() <= ingot::kCandidates && zeros.size() == scales.size() && totals.size() == scales.size(),
          "expected one zero and one total per scale");
  const AffineLayout layout{values.shape(0), values.shape(1), 1, 0, bits, is_signed, false, true};
  const AffineChoice how = choice("given", bits, is_signed, symmetric, Dtype::f32);
  nb::gil_scoped_release release;
  INGOT_KERNEL(affine_errors)
  (layout, how, values.data(), type, scales.data(), zeros.data(), static_cast<int>(scales.size()), totals.data());
}

}  // namespace

void bind_affine(nb::module_& m) {
  m.attr("AFFINE_CANDIDATES") = ingot::kCandidates;
  nb::class_<Layout>(m, "AffineLayout", "How the codes of a matrix lie in memory; raises ValueError where that cannot be.")
      .def(nb::init<std::size_t, std::size_t, int, bool, bool, bool, std::size_t, bool>(), nb::kw_only(), nb::arg("cols"),
           nb::arg("group"), nb::arg("bits"), nb::arg("signed"), nb::arg("msb"), nb::arg("per_tensor"), nb::arg("row_bytes"),
           nb::arg("offset") = false);
  define(m, "affine_dequantize", &dequantize, nb::arg("packed"), nb::arg("scales"), nb::arg("zeros").none(), nb::arg("out"),
        nb::arg("layout"), nb::arg("scale_dtype"), nb::arg("dtype"), "Decode whole rows: w = s * (q - z), or s * q + z, rounded once.");
  define(m, "affine_add", &add, nb::arg("packed"), nb::arg("scales"), nb::arg("zeros").none(), nb::arg("base"), nb::arg("out"),
        nb::arg("layout"), nb::arg("scale_dtype"), nb::arg("dtype"),
        "Decode whole rows and add them to base: product and sum rounded to f32, then once to the type. out may be base.");
  define(m, "affine_quantize", &quantize, nb::arg("values"), nb::arg("dtype"), nb::arg("packed"), nb::arg("scales"),
        nb::arg("zeros").none(), nb::arg("layout"), nb::arg("scale_dtype"), nb::arg("method"),
        nb::arg("zero_point") = -1,
        "Quantize whole rows. Returns (0, 0), (1, index of a value that is not finite) or (2, index of the first value of a "
        "group whose scale overflows its type).");
  define(m, "affine_range", &range, nb::arg("values"), nb::arg("dtype"),
        "Minimum and maximum of the values and 0, and the index of the first that is not finite (or the size).");
  define(m, "affine_candidates", &candidates, nb::arg("low"), nb::arg("high"), nb::arg("bits"), nb::arg("signed"),
        nb::arg("symmetric"), nb::arg("scale_dtype"), nb::arg("scales"), nb::arg("zeros"),
        "Fill in the candidates of the MSE search for a range.");
  define(m, "affine_errors", &errors, nb::arg("values"), nb::arg("dtype"), nb::arg("bits"), nb::arg("signed"),
        nb::arg("symmetric"), nb::arg("scales"), nb::arg("zeros"), nb::arg("totals"),
        "Add each candidate's squared error over whole rows to totals, row by row.");
}
