// Tiles of the triple-bitmap encoding of bf16 matrices (spec/tca_tbe.md): what encoder and decoder share.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/bits.h"
#include "kernels/neon.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The vector code needs byte-wise compress and expand (VBMI2), which some AVX-512 processors lack: it has a target
// attribute, and the processor is checked at run time.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define INGOT_TCA_VECTOR 1
// GCC 12 takes the undefined vectors inside of its own intrinsics for a mistake (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define INGOT_VBMI2 __attribute__((target("avx512vbmi2,popcnt,bmi2")))
#endif

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kSide = 64;               // rows and columns of a global tile
constexpr std::size_t kWords = 64;              // small tiles of a global tile, one word per bitmap each
constexpr std::size_t kStripe = 16;             // rows of a median tile, which is as wide as a global tile
constexpr std::size_t kStripeWords = 16;        // small tiles of a median tile
constexpr std::size_t kHighUnit = 16;           // high bytes of a global tile are padded to a multiple of this
constexpr std::size_t kFallbackUnit = 8;        // fallback elements are padded likewise
constexpr std::size_t kElements = kSide * kSide;

// One median tile, row by row.
struct alignas(64) Stripe {
  std::uint16_t values[kStripe * kSide];
};

// The offset of the small tile of word `word` in its stripe: groups of 16 x 16 along the columns; within a group the
// tiles (row 0, column 0), (8, 0), (0, 8), (8, 8).
inline std::size_t word_offset(std::size_t word) {
  return (word & 1) * 8 * kSide + (word >> 2) * 16 + (word >> 1 & 1) * 8;
}

inline std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

inline std::size_t count_ones(std::uint64_t word) {
#if defined(__POPCNT__) || !defined(__x86_64__)
  return static_cast<std::size_t>(__builtin_popcountll(word));
#else
  word -= word >> 1 & 0x5555555555555555ull;
  word = (word & 0x3333333333333333ull) + (word >> 2 & 0x3333333333333333ull);
  return static_cast<std::size_t>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
#endif
}

// words[m] has bit i of m as byte i.
struct Spread {
  std::uint64_t words[256];
  constexpr Spread() : words() {
    for (std::uint64_t m = 0; m < 256; ++m)
      for (int i = 0; i < 8; ++i) words[m] |= (m >> i & 1) << (8 * i);
  }
};
constexpr Spread kSpread;

inline void store_word(std::uint64_t word, std::uint8_t* out) {
  word = little(word);
  std::memcpy(out, &word, 8);
}

#if defined(INGOT_TCA_VECTOR)
inline bool has_vbmi2() { return __builtin_cpu_supports("avx512vbmi2"); }
#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
