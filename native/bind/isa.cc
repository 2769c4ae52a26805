#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "core/isa.h"

void bind_isa(nb::module_& m) {
  m.def("isa", [] { return std::string(ingot::isa_name(ingot::current_isa())); },
        "Name of the instruction set in use: baseline, v3 or v4.");
  m.def("available_isas", &ingot::available_isas, "Instruction sets that this processor can run.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (!ingot::select_isa(name)) throw nb::value_error("this processor cannot run that instruction set");
      },
      nb::arg("name"), "Run the kernels with another instruction set; for tests, not while kernels run.");
}
