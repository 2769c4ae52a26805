#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "core/isa.h"

void bind_isa(nb::module_& m) {
  define(m, "isa", [] { return std::string(ingot::isa_name(ingot::current_isa())); },
        "Name of the instruction set in use: baseline, v3 or v4.");
  define(
      m, "best_isa",
      [](std::uint32_t leaf1_ecx, std::uint32_t leaf7_ebx, std::uint32_t extended_ecx, std::uint32_t xcr0) {
        return std::string(ingot::isa_name(ingot::best_isa({leaf1_ecx, leaf7_ebx, extended_ecx, xcr0})));
      },
      nb::arg("leaf1_ecx"), nb::arg("leaf7_ebx"), nb::arg("extended_ecx"), nb::arg("xcr0"),
      "Name of the instruction set for a processor that says so of itself; for tests.");
  define(m, "available_isas", &ingot::available_isas, "Instruction sets that this processor can run.");
  define(
      m, "set_isa",
      [](const std::string& name) {
        if (!ingot::select_isa(name)) throw nb::value_error("this processor cannot run that instruction set");
      },
      nb::arg("name"), "Run the kernels with another instruction set; for tests, not while kernels run.");
}
