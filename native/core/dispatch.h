// Calls a kernel of the active instruction set: INGOT_KERNEL(cast)(in, from, n, out, to).
#pragma once
#include "core/isa.h"
#include "kernels/kernels.h"

#if defined(INGOT_HAS_V4)
#define INGOT_KERNEL(name)                                                      \
  (ingot::current_isa() == ingot::Isa::v4   ? &ingot::v4::name                  \
   : ingot::current_isa() == ingot::Isa::v3 ? &ingot::v3::name                  \
                                            : &ingot::baseline::name)
#else
#define INGOT_KERNEL(name) (&ingot::baseline::name)
#endif
