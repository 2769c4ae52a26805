#include "core/isa.h"

#include <atomic>
#include <initializer_list>

#if defined(INGOT_HAS_V4)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace ingot {
namespace {

constexpr std::uint32_t bits(std::initializer_list<int> positions) {
  std::uint32_t word = 0;
  for (const int position : positions) word |= std::uint32_t{1} << position;
  return word;
}

// The levels x86-64-v3 and -v4 of the x86-64 psABI 1.0 (table 3.1), with all lower levels: compilers may use all of it.
constexpr int kSse3 = 0, kSsse3 = 9, kFma = 12, kCx16 = 13, kSse41 = 19, kSse42 = 20, kMovbe = 22, kPopcnt = 23,
              kOsxsave = 27, kAvx = 28, kF16c = 29;                                      // leaf 1, ECX
constexpr int kBmi1 = 3, kAvx2 = 5, kBmi2 = 8, kF = 16, kDq = 17, kCd = 28, kBw = 30, kVl = 31;  // leaf 7, EBX
constexpr int kLahf = 0, kLzcnt = 5;                                                     // leaf 0x80000001, ECX
constexpr int kXmm = 1, kYmm = 2, kMasks = 5, kUpper = 6, kMoreZmm = 7;                  // XCR0
constexpr CpuWords kV3 = {
    bits({kSse3, kSsse3, kFma, kCx16, kSse41, kSse42, kMovbe, kPopcnt, kOsxsave, kAvx, kF16c}),
    bits({kBmi1, kAvx2, kBmi2}), bits({kLahf, kLzcnt}), bits({kXmm, kYmm})};
[[maybe_unused]] constexpr CpuWords kV4 = {kV3.leaf1_ecx, kV3.leaf7_ebx | bits({kF, kDq, kCd, kBw, kVl}),
                                           kV3.extended_ecx, kV3.xcr0 | bits({kMasks, kUpper, kMoreZmm})};

[[maybe_unused]] bool holds(const CpuWords& all, const CpuWords& required) {
  return !(required.leaf1_ecx & ~all.leaf1_ecx) && !(required.leaf7_ebx & ~all.leaf7_ebx) &&
         !(required.extended_ecx & ~all.extended_ecx) && !(required.xcr0 & ~all.xcr0);
}

CpuWords cpu_words() {
  CpuWords words{};
#if defined(INGOT_HAS_V4)
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) words.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) words.leaf7_ebx = b;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) words.extended_ecx = c;
  if (words.leaf1_ecx & bits({kOsxsave})) asm volatile("xgetbv" : "=a"(words.xcr0), "=d"(d) : "c"(0));
#endif
  return words;
}

Isa best() {
  static const Isa best = best_isa(cpu_words());
  return best;
}

bool has(Isa isa) { return isa <= best(); }

std::atomic<Isa>& slot() {
  static std::atomic<Isa> value{best()};
  return value;
}

}  // namespace

Isa best_isa([[maybe_unused]] const CpuWords& words) {
#if defined(INGOT_HAS_V4)
  if (holds(words, kV4)) return Isa::v4;
  if (holds(words, kV3)) return Isa::v3;
#endif
  return Isa::baseline;
}

bool has_tiles() {
#if defined(INGOT_HAS_V4) && defined(__linux__)
  static const bool result = [] {
    constexpr std::uint32_t required = bits({22, 24}), state = bits({17, 18});  // leaf 7, EDX: bf16 and tiles; XCR0
    constexpr int kRequest = 0x1023, kTileData = 18;                          // ARCH_REQ_XCOMP_PERM, Linux 5.16
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & required) != required) return false;
    return (cpu_words().xcr0 & state) == state && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return result;
#else
  return false;
#endif
}

bool has_pair_dots([[maybe_unused]] Isa isa) {
#if defined(INGOT_HAS_V4)
  static const bool result = [] {
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    return has(Isa::v4) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bits({5}));  // leaf 7, sub-leaf 1, EAX
  }();
  return result && isa == Isa::v4;
#else
  return false;
#endif
}

bool has_dots([[maybe_unused]] Isa isa) {
#if defined(INGOT_HAS_V4)
  static const bool result = [] {
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    return has(Isa::v4) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bits({11}));  // leaf 7, ECX
  }();
  return result && isa == Isa::v4;
#elif defined(__aarch64__) && defined(__linux__)
  static const bool result = (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP
  return result;
#elif defined(__aarch64__) && defined(_WIN32)
  static const bool result = IsProcessorFeaturePresent(43) != 0;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
  return result;
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;  // every Mac has it
#else
  return false;
#endif
}

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
