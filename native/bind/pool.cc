#include "core/pool.h"

#include <cstdint>

#include "bind/bind.h"

namespace {

void share_team(std::uintptr_t address) { ingot::share_team(reinterpret_cast<ingot::Team>(address)); }

}  // namespace

void bind_pool(nb::module_& m) {
  define(m, "share_team", &share_team, nb::arg("address"),
         "Do tasks by the OpenMP threads of the function GOMP_parallel at an address, or for 0 by threads of the module's own.");
}
