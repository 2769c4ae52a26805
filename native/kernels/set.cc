#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
int kernel_set() { return 0; }
}  // namespace ingot::INGOT_ISA
