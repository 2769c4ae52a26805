// Checked access to the caller's arrays. Every size was proven in Python; it is checked again here, cheaply, so that a
// mistake is an exception and never a stray write.
#pragma once
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <string_view>

#include "bind/bind.h"
#include "core/dtype.h"

using InArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using OutArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using InBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

// Resolves Ingot's canonical name of a float type.
inline ingot::Dtype float_type(std::string_view name) {
  if (name == "f32") return ingot::Dtype::f32;
  if (name == "f16") return ingot::Dtype::f16;
  if (name == "bf16") return ingot::Dtype::bf16;
  if (name == "f64") return ingot::Dtype::f64;
  throw nb::value_error("expected an element type f32, f16, bf16 or f64");
}

// Checks that an array holds elements of `type`, where f16 and bf16 come as uint16, and that they are aligned.
template <class Array>
void require_elements(const Array& array, ingot::Dtype type, const char* what) {
  const nb::dlpack::dtype found = array.dtype();
  const nb::dlpack::dtype wanted = type == ingot::Dtype::f32   ? nb::dtype<float>()
                                   : type == ingot::Dtype::f64 ? nb::dtype<double>()
                                                               : nb::dtype<std::uint16_t>();
  require(found == wanted, what);
  require(array.size() == 0 || reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() == 0, what);
}
