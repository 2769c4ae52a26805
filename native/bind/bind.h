// One registration function per topic; module.cc calls them all.
#pragma once
#include <nanobind/nanobind.h>

#include <utility>

#include "core/float_mode.h"

namespace nb = nanobind;

// Checks of an argument of any function; bind/arrays.h has the checks of arrays.
template <class T>
struct Sound {
  static void require(const T&) {}
};

// A function, or method, as Python calls it: its arguments checked, in the kernels' floating-point mode.
template <class R, class... Args>
auto guarded(R (*function)(Args...)) {
  return [function](Args... args) -> R {
    (Sound<std::remove_cvref_t<Args>>::require(args), ...);
    const ingot::DefaultFloats mode;
    return function(std::forward<Args>(args)...);
  };
}

template <class Self, class R, class... Args>
auto guarded(R (Self::*method)(Args...) const) {
  return [method](const Self& self, Args... args) -> R {
    (Sound<std::remove_cvref_t<Args>>::require(args), ...);
    const ingot::DefaultFloats mode;
    return (self.*method)(std::forward<Args>(args)...);
  };
}

// Registers a function of the module. All functions are registered here, so that none lacks the guard.
template <class Function, class... Extra>
void define(nb::module_& m, const char* name, Function&& function, const Extra&... extra) {
  m.def(name, guarded(+function), extra...);
}

void bind_affine(nb::module_& m);
void bind_affine_matmul(nb::module_& m);
void bind_affine_zeros(nb::module_& m);
void bind_cbor(nb::module_& m);
void bind_cbor_encode(nb::module_& m);
void bind_checksum(nb::module_& m);
void bind_delta(nb::module_& m);
void bind_delta_add(nb::module_& m);
void bind_entropy(nb::module_& m);
void bind_floats(nb::module_& m);
void bind_ggml(nb::module_& m);
void bind_heap(nb::module_& m);
void bind_isa(nb::module_& m);
void bind_kv_cache(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_mapping(nb::module_& m);
void bind_palette(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_records(nb::module_& m);
void bind_rounding(nb::module_& m);
void bind_scaled(nb::module_& m);
void bind_spans(nb::module_& m);
void bind_symbols(nb::module_& m);
void bind_table(nb::module_& m);
void bind_tca_tbe(nb::module_& m);
void bind_trellis(nb::module_& m);
void bind_wdelta(nb::module_& m);
void bind_words(nb::module_& m);
