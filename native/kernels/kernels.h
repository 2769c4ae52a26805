// Declarations of all kernels, once per instruction set: ingot::baseline::…, ingot::v3::…, ingot::v4::….
#pragma once
#include <cstddef>
#include <cstdint>

#define INGOT_DECLARE_KERNELS(isa) \
  namespace ingot::isa {           \
  int kernel_set();                \
  }

INGOT_DECLARE_KERNELS(baseline)
INGOT_DECLARE_KERNELS(v3)
INGOT_DECLARE_KERNELS(v4)
