// Functions for kernels on arm64, which always has NEON: lookups in tables in registers.
#pragma once

#if defined(__aarch64__) && !defined(__AARCH64EB__)
#define INGOT_NEON 1
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ingot::INGOT_ISA {
namespace {

// A table of 16 * kParts entries of two or four bytes: one or more registers for each byte of an entry.
template <class T, int kParts>
class ByteTables {
 public:
  // A table of `count` entries; entries beyond them are 0.
  explicit ByteTables(const T* entries, std::size_t count = kEntries) {
    alignas(16) T all[kEntries] = {};
    if (count < kEntries) {
      std::memcpy(all, entries, count * sizeof(T));
      entries = all;
    }
    for (int part = 0; part < kParts; ++part) {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(entries + 16 * part);
      if constexpr (sizeof(T) == 2) {
        const uint8x16x2_t two = vld2q_u8(bytes);
        for (int byte = 0; byte < 2; ++byte) planes_[byte][part] = two.val[byte];
      } else {
        const uint8x16x4_t four = vld4q_u8(bytes);
        for (int byte = 0; byte < 4; ++byte) planes_[byte][part] = four.val[byte];
      }
    }
  }

  // The entries at sixteen indices.
  void store(uint8x16_t at, T* out) const {
    auto* to = reinterpret_cast<std::uint8_t*>(out);
    // Variables, because these stores are macros in Clang, and commas in braces would separate arguments.
    if constexpr (sizeof(T) == 2) {
      const uint8x16x2_t two{{look(0, at), look(1, at)}};
      vst2q_u8(to, two);
    } else {
      const uint8x16x4_t four{{look(0, at), look(1, at), look(2, at), look(3, at)}};
      vst4q_u8(to, four);
    }
  }

  // Looks up complete groups of sixteen of `n` codes, one per byte; returns the number of processed codes.
  std::size_t store_all(const std::uint8_t* codes, std::size_t n, T* out) const {
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) store(vld1q_u8(codes + i), out + i);
    return i;
  }

 private:
  static_assert((sizeof(T) == 2 || sizeof(T) == 4) && (kParts == 1 || kParts == 4));
  static constexpr std::size_t kEntries = 16 * kParts;

  uint8x16_t look(int byte, uint8x16_t at) const {
    const auto& base = planes_[byte];
    if constexpr (kParts == 1) return vqtbl1q_u8(base[0], at);
    if constexpr (kParts == 4) return vqtbl4q_u8(uint8x16x4_t{{base[0], base[1], base[2], base[3]}}, at);
  }

  uint8x16_t planes_[sizeof(T)][kParts];
};

// For each byte of a mask: the source of each of eight elements among the selected ones, or none (`spread`); the
// selected elements, contiguously (`kept`); their number.
struct MaskBytes {
  std::uint8_t spread[256][8], kept[256][8], count[256];
  constexpr MaskBytes() : spread(), kept(), count() {
    for (int mask = 0; mask < 256; ++mask) {
      std::uint8_t result = 0;
      for (std::uint8_t i = 0; i < 8; ++i) {
        const bool is = mask >> i & 1;
        spread[mask][i] = is ? result : 0xff;
        if (is) kept[mask][result++] = i;
      }
      count[mask] = result;
    }
  }
};
constexpr MaskBytes kMaskBytes;

// The bytes of two-byte elements at eight indices; an index of 255 stays nowhere.
inline uint8x16_t pairs_at(uint8x8_t at) {
  const uint8x8_t first = vqadd_u8(at, at), second = vqadd_u8(first, vdup_n_u8(1));
  const uint8x16_t both = vcombine_u8(first, second);
  return vqtbl1q_u8(both, uint8x16_t{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15});
}

// Eight elements of one, two or four bytes, at indices among the eight at `from`; 0 for an index of 255.
inline void store_at(const std::uint8_t* from, uint8x8_t at, std::uint8_t* out) {
  vst1_u8(out, vtbl1_u8(vld1_u8(from), at));
}

inline void store_at(const std::uint16_t* from, uint8x8_t at, std::uint16_t* out) {
  vst1q_u16(out, vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(vld1q_u16(from)), pairs_at(at))));
}

inline void store_at(const std::uint32_t* from, uint8x8_t at, std::uint32_t* out) {
  const uint8x16x2_t all{{vreinterpretq_u8_u32(vld1q_u32(from)), vreinterpretq_u8_u32(vld1q_u32(from + 4))}};
  const uint8x16_t base = vqshlq_n_u8(vcombine_u8(at, at), 2);
  for (int half = 0; half < 2; ++half) {
    const std::uint8_t begin = static_cast<std::uint8_t>(4 * half);
    const uint8x16_t each = vqtbl1q_u8(base, vaddq_u8(uint8x16_t{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, vdupq_n_u8(begin)));
    const uint8x16_t byte = vqaddq_u8(each, uint8x16_t{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3});
    vst1q_u32(out + 4 * half, vreinterpretq_u32_u8(vqtbl2q_u8(all, byte)));
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
