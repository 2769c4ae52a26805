// One registration function per topic; module.cc calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_affine(nb::module_& m);
void bind_affine_matmul(nb::module_& m);
void bind_cbor(nb::module_& m);
void bind_cbor_encode(nb::module_& m);
void bind_checksum(nb::module_& m);
void bind_delta(nb::module_& m);
void bind_delta_add(nb::module_& m);
void bind_entropy(nb::module_& m);
void bind_floats(nb::module_& m);
void bind_isa(nb::module_& m);
void bind_palette(nb::module_& m);
void bind_records(nb::module_& m);
void bind_tca_tbe(nb::module_& m);
void bind_wdelta(nb::module_& m);
