// Checked access to the caller's arrays. Python has verified every size; the cheap checks here turn a mistake into an
// exception instead of an out-of-bounds write.
#pragma once
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "bind/bind.h"
#include "core/dtype.h"

// An array that a function writes to. It is never converted, because the result would go to a temporary copy. A wrong
// order, element type, or an array that is not writable is a TypeError.
template <class... Traits>
struct Written : nb::ndarray<Traits...> {
  Written() = default;
  explicit Written(const nb::ndarray<Traits...>& array) : nb::ndarray<Traits...>(array) {}
};

template <class... Traits>
struct nanobind::detail::type_caster<Written<Traits...>> {
  using Inner = make_caster<ndarray<Traits...>>;
  NB_TYPE_CASTER(Written<Traits...>, Inner::Name)

  template <class Flags>
  bool from_python(handle source, Flags flags, cleanup_list* cleanup) noexcept {
    Inner inner;
    if (!inner.from_python(source, static_cast<Flags>(flags & ~static_cast<Flags>(cast_flags::convert)), cleanup)) return false;
    value = Written<Traits...>(inner.value);
    return true;
  }
};

// An input array of one dimension and one element type.
template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = Written<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using InArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using OutArray = Written<nb::c_contig, nb::device::cpu>;
using InBytes = In<std::uint8_t>;
using OutBytes = Out<std::uint8_t>;

inline void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

// Every array is aligned to its elements, for every function.
template <class Array>
struct SoundArray {
  static void require(const Array& array) {
    ::require(array.size() == 0 || reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() == 0,
              "expected arrays aligned to their elements");
  }
};
template <class... Traits>
struct Sound<nb::ndarray<Traits...>> : SoundArray<nb::ndarray<Traits...>> {};
template <class... Traits>
struct Sound<Written<Traits...>> : SoundArray<Written<Traits...>> {};
template <class Array>
struct Sound<std::optional<Array>> {
  static void require(const std::optional<Array>& array) {
    if (array) Sound<Array>::require(*array);
  }
};

// Resolves Ingot's canonical name of a float type.
inline ingot::Dtype float_type(std::string_view name) {
  if (name == "f32") return ingot::Dtype::f32;
  if (name == "f16") return ingot::Dtype::f16;
  if (name == "bf16") return ingot::Dtype::bf16;
  if (name == "f64") return ingot::Dtype::f64;
  throw nb::value_error("expected an element type f32, f16, bf16 or f64");
}

// Checks that an array holds elements of `type`, where f16 and bf16 come as uint16.
template <class Array>
void require_elements(const Array& array, ingot::Dtype type, const char* message) {
  const nb::dlpack::dtype found = array.dtype();
  const nb::dlpack::dtype wanted = type == ingot::Dtype::f32   ? nb::dtype<float>()
                                   : type == ingot::Dtype::f64 ? nb::dtype<double>()
                                                               : nb::dtype<std::uint16_t>();
  require(found == wanted, message);
}
