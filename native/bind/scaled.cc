#include "core/scaled.h"

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using ingot::Dtype;
using ingot::ScaledValues;

ScaledValues values_of(std::string_view name) {
  if (name == "table") return ScaledValues::table;
  if (name == "f8_e4m3fn") return ScaledValues::e4m3;
  if (name == "f8_e5m2") return ScaledValues::e5m2;
  if (name == "i8") return ScaledValues::i8;
  throw nb::value_error("expected values table, f8_e4m3fn, f8_e5m2 or i8");
}

void decode(const InBytes& packed, int bits, bool high_first, std::string_view values,
            const std::optional<In<float>>& table, const InArray& scales, const std::optional<In<float>>& scale_table,
            std::size_t cols, std::size_t group, std::size_t phase, const OutArray& out, std::string_view dtype) {
  const Dtype type = float_type(dtype);
  const ScaledValues element = values_of(values);
  require(type != Dtype::f64 && out.ndim() == 1, "expected a flat target f32, f16 or bf16");
  require_elements(out, type, "expected an aligned output of the named type");
  require(bits >= 1 && bits <= 8 && (element == ScaledValues::table || bits == 8),
          "expected 1 to 8 bits, 8 for numbers");
  require(!high_first || bits == 4, "expected 4 bits where the high ones come first");
  require((element == ScaledValues::table) == table.has_value() && (!table || table->size() == std::size_t{1} << bits),
          "expected a table of 2^bits entries, or none beside numbers");
  const std::size_t n = out.size();
  std::size_t total = 0, last = 0, needed = 0;
  require(!__builtin_mul_overflow(n, static_cast<std::size_t>(bits), &total) &&
              packed.size() == total / 8 + (total % 8 != 0),
          "expected as many bytes as the codes fill");
  require(cols >= 1 && group >= 1 && phase < cols && !__builtin_add_overflow(phase, n, &last), "expected groups of columns");
  const std::size_t per_row = cols / group + (cols % group != 0);
  if (n > 0) {
    require(!__builtin_mul_overflow((last - 1) / cols, per_row, &needed), "expected groups of columns");
    needed += (last - 1) % cols / group + 1;
  }
  require(scales.ndim() == 1 && scales.size() >= needed, "expected a scale for every group");
  require(scales.dtype() == (scale_table ? nb::dtype<std::uint8_t>() : nb::dtype<float>()),
          "expected scales in f32, or bytes and their table");
  require(!scale_table || scale_table->size() == 256, "expected 256 scales in the table");
  const ingot::ScaledLayout at{cols,
                               group,
                               phase,
                               bits,
                               high_first,
                               element,
                               table ? table->data() : nullptr,
                               scale_table ? nullptr : static_cast<const float*>(scales.data()),
                               scale_table ? static_cast<const std::uint8_t*>(scales.data()) : nullptr,
                               scale_table ? scale_table->data() : nullptr};
  nb::gil_scoped_release release;
  INGOT_KERNEL(scaled_decode)(at, packed.data(), n, out.data(), type);
}

}  // namespace

// No input may be converted, because the function would silently get a copy.
void bind_scaled(nb::module_& m) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto maybe = [](const char* name) { return nb::arg(name).noconvert().none(); };
  define(m, "scaled_decode", &decode, array("packed"), nb::arg("bits"), nb::arg("high_first"), nb::arg("values"),
         maybe("table"), array("scales"), maybe("scale_table"), nb::arg("cols"), nb::arg("group"), nb::arg("phase"),
         array("out"), nb::arg("dtype"),
         "Decode codes to scale * value, rounded once; rows of cols columns with a scale per group, from column phase on.");
}
