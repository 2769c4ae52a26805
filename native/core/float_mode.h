// The floating-point mode that the kernels require: subnormals are kept, rounding is to nearest even. A caller's thread
// may have another mode (torch.set_flush_denormal, libraries built with -ffast-math), which would silently change
// weights.
#pragma once
#include <cstdint>

namespace ingot {

// Sets that mode during its lifetime, then restores the thread's mode. It takes a few nanoseconds.
class DefaultFloats {
 public:
  DefaultFloats() : saved_(get()) {
    if ((saved_ & kMode) != kDefault) set((saved_ & ~kMode) | kDefault);
  }
  ~DefaultFloats() {
    if ((saved_ & kMode) != kDefault) set(saved_);
  }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
#if defined(__x86_64__)
  // MXCSR (Intel SDM volume 1, section 10.2.3): flush to zero, rounding, exceptions masked, denormals are zero.
  static constexpr std::uint32_t kMode = 0xffc0, kDefault = 0x1f80;
  static std::uint32_t get() { return __builtin_ia32_stmxcsr(); }
  static void set(std::uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }
  const std::uint32_t saved_;
#elif defined(__aarch64__)
  // FPCR (Arm ARM, C5.2.8): DN, FZ, rounding, FZ16, traps; AH, FIZ and NEP in the low bits.
  static constexpr std::uint64_t kMode = 0x07c89f07, kDefault = 0;
  static std::uint64_t get() {
    std::uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  const std::uint64_t saved_;
#else
  static constexpr std::uint32_t kMode = 0, kDefault = 0;
  static std::uint32_t get() { return 0; }
  static void set(std::uint32_t) {}
  const std::uint32_t saved_;
#endif
};

}  // namespace ingot
