#include "core/isa.h"

#include <atomic>

namespace ingot {
namespace {

bool has(Isa isa) {
#if defined(INGOT_HAS_V4)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::baseline:
      return true;
    case Isa::v3:  // x86-64-v3 as the psABI lists it, as far as compiled code here may use it
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
             __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt");
    case Isa::v4:
      return has(Isa::v3) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return isa == Isa::baseline;
#endif
}

Isa best() { return has(Isa::v4) ? Isa::v4 : has(Isa::v3) ? Isa::v3 : Isa::baseline; }

std::atomic<Isa>& slot() {
  static std::atomic<Isa> value{best()};
  return value;
}

}  // namespace

Isa current_isa() { return slot().load(std::memory_order_relaxed); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::v3:
      return "v3";
    case Isa::v4:
      return "v4";
    default:
      return "baseline";
  }
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (Isa isa : {Isa::baseline, Isa::v3, Isa::v4})
    if (has(isa)) names.emplace_back(isa_name(isa));
  return names;
}

bool select_isa(const std::string& name) {
  for (Isa isa : {Isa::baseline, Isa::v3, Isa::v4})
    if (name == isa_name(isa) && has(isa)) {
      slot().store(isa);
      return true;
    }
  return false;
}

}  // namespace ingot
