// Differences of elements of two bytes, many of them at a time: symbols and open bits to words. Once per instruction set, with AVX-512.
#pragma once
#include "kernels/delta.h"
#include "kernels/entropy_rans_read.h"
#include "kernels/register_tables.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// Bits that symbols leave open, one after the other, lowest first. Reads stay inside of the bytes whatever is asked for; what was
// asked for is compared with what there is at the end.
struct OpenBits {
  const Byte* p;  // at least eight bytes
  std::size_t size;
  std::size_t at;

  // Whether the next `bits` bits are there, and eight bytes behind each of them.
  bool has(std::size_t bits) const { return (at + bits) / 8 + 8 <= size; }

  // The next 57 bits or more. `kThere`: they were asked for.
  template <bool kThere>
  std::uint64_t ahead() const {
    const std::size_t byte = kThere ? at >> 3 : least(at >> 3, size < 8 ? 0 : size - 8);
    return load_le<std::uint64_t>(p + byte) >> ((at - 8 * byte) & 63);
  }

  template <bool kThere>
  std::uint64_t next(unsigned count) {
    const std::uint64_t word = ahead<kThere>();
    at += count;
    return word & ~(~std::uint64_t{0} << count);
  }

  // Whether the last bit was in the last byte, and unused bits are 0.
  bool ended() const {
    const std::size_t unused = 8 * size - at;
    return at <= 8 * size && unused < 8 && (unused == 0 || p[size - 1] >> (8 - unused) == 0);
  }
};

#if defined(__AVX512BW__)
constexpr std::size_t kLanes = 32;  // words of a register

// What classes mean: how many bits one leaves open, which these are, and its least magnitude. Beside that the constants of a loop that is
// not to know them: compilers would make those they know anew in every turn, in units that have enough to do.
template <class Kind>
struct ClassLanes {
  __m512i count, open, least;
  __m512i down = _mm512_set1_epi16(kDownCode), turns = _mm512_set1_epi16(kTurnsCode), sign = _mm512_set1_epi16(-0x8000);
  __m512i fifteen = _mm512_set1_epi16(15), sixteen = _mm512_set1_epi16(16), all = _mm512_set1_epi16(-1);
  __m512i fourth = _mm512_set1_epi64(0x0001000100010001);

  ClassLanes() {
    alignas(64) std::uint16_t of[3][kLanes] = {};
    for (std::size_t found = 0; found < kClasses<Kind>; ++found) {
      of[0][found] = static_cast<std::uint16_t>(open_bits<Kind>(2 * found));
      of[1][found] = static_cast<std::uint16_t>((1u << of[0][found]) - 1);
      of[2][found] = static_cast<std::uint16_t>(least_difference<Kind>(2 * found) >> Kind::kLow);
    }
    count = _mm512_load_si512(of[0]);
    open = _mm512_load_si512(of[1]);
    least = _mm512_load_si512(of[2]);
  }

  // Sums of each number and those before it: of four by multiplying, then of what lies in 8, 16 and 32 bytes before.
  __m512i running_sums(__m512i numbers) const {
    const __m512i eighth = _mm512_set4_epi32(0x07060706, 0x07060706, -1, -1);
    const __m512i half = _mm512_inserti64x4(_mm512_set1_epi16(7), _mm256_set1_epi16(23), 1);
    __m512i sums = _mm512_mullo_epi64(numbers, fourth);
    sums = _mm512_add_epi16(sums, _mm512_shuffle_epi8(sums, eighth));
    sums = _mm512_add_epi16(sums, _mm512_maskz_permutexvar_epi16(0xff00ff00, half, sums));
    return _mm512_add_epi16(sums, _mm512_maskz_permutexvar_epi16(0xffff0000, fifteen, sums));
  }
};

constexpr std::size_t kOpenAhead = sizeof(__m512i) + 2;  // bytes that apply_thirty_two looks at

// Applies 32 elements by their codes, above which other bits may lie. Where the open bits of each begin is summed up, and these, which
// are 416 at most, are taken from one look ahead of 64 bytes.
template <class Kind>
inline __m512i apply_thirty_two(__m512i codes, const ClassLanes<Kind>& with, const Byte* bits, std::size_t& at, __m512i old) {
  const __mmask32 down = _mm512_test_epi16_mask(codes, with.down);
  const __m512i count = _mm512_permutexvar_epi16(codes, with.count), behind = with.running_sums(count);
  const __m512i first = _mm512_add_epi16(_mm512_sub_epi16(behind, count), _mm512_set1_epi16(static_cast<short>(at & 7)));
  const Byte* const p = bits + (at >> 3);
  at += static_cast<std::size_t>(_mm_extract_epi16(_mm512_extracti32x4_epi32(behind, 3), 7));
  const __m512i word = _mm512_srli_epi16(first, 4), skip = _mm512_and_si512(first, with.fifteen);
  const __m512i low = _mm512_srlv_epi16(_mm512_permutexvar_epi16(word, _mm512_loadu_si512(p)), skip);
  const __m512i next = _mm512_permutexvar_epi16(word, _mm512_loadu_si512(p + 2));
  const __m512i high = _mm512_sllv_epi16(next, _mm512_sub_epi16(with.sixteen, skip));
  const __m512i open = _mm512_permutexvar_epi16(codes, with.open), least = _mm512_permutexvar_epi16(codes, with.least);
  const __m512i magnitude = _mm512_or_si512(least, _mm512_and_si512(open, _mm512_or_si512(low, high)));
  const __m512i change = _mm512_mask_sub_epi16(magnitude, down, with.all, magnitude);
  const __m512i sum = _mm512_add_epi16(old, change);
  if constexpr (Kind::kLow == 1) return sum;
  const __mmask32 turns = _mm512_test_epi16_mask(codes, with.turns);
  const __m512i signs = _mm512_mask_sub_epi16(old, turns, old, with.sign);
  return _mm512_or_si512(_mm512_andnot_si512(with.sign, sum), _mm512_and_si512(with.sign, signs));
}

// Applies elements, 32 at a time, as long as there are bits ahead; returns how many.
template <class Kind>
inline std::size_t apply_lanes(const std::uint16_t* codes, OpenBits& open, std::size_t n, const std::uint16_t* base, std::uint16_t* out) {
  const ClassLanes<Kind> classes;
  std::size_t i = 0, at = open.at;
  for (; i + kLanes <= n && (at >> 3) + kOpenAhead <= open.size; i += kLanes)
    _mm512_storeu_si512(
        out + i, apply_thirty_two<Kind>(_mm512_loadu_si512(codes + i), classes, open.p, at, _mm512_loadu_si512(base + i)));
  open.at = at;
  return i;
}

// Where the table of each bin begins. `kNear`: the bins at which tables change are so near that two registers hold all from the first
// one on; else eight do.
template <bool kNear>
struct ContextLanes {
  static constexpr std::size_t kParts = kNear ? 2 : 8;
  __m512i part[kParts], first;

  // `at` is for all bins; those below `start` and those from start + 63 on are as their neighbours.
  ContextLanes(const std::uint16_t* at, std::size_t start) : first(_mm512_set1_epi16(static_cast<short>(start))) {
    for (std::size_t k = 0; k < kParts; ++k) part[k] = _mm512_loadu_si512(at + start + kLanes * k);
  }
  __m512i find(__m512i bins) const {
    if constexpr (kNear) {
      const __m512i near = _mm512_min_epu16(_mm512_subs_epu16(bins, first), _mm512_set1_epi16(63));
      return _mm512_permutex2var_epi16(part[0], near, part[1]);
    } else {
      return look_up_wide(part, bins);
    }
  }
};

template <class Kind, bool kNear>
struct Lanes {
  ContextLanes<kNear> contexts;
  ClassLanes<Kind> classes;
};

// Decodes symbols by rANS and applies them at once, 32 at a time, as long as no end is near; returns how many.
template <class Kind, bool kNear>
[[gnu::noinline]] std::size_t apply_rounds(RansStream& s, const std::uint32_t* slots, const Lanes<Kind, kNear>& lanes, int shift,
                                           OpenBits& open, std::size_t have, const std::uint16_t* base, std::uint16_t* out) {
  static_assert(kRansLanes == kLanes);
  const ContextLanes<kNear> contexts = lanes.contexts;
  const ClassLanes<Kind> classes = lanes.classes;
  __m512i low = _mm512_load_si512(s.states), high = _mm512_load_si512(s.states + 16);
  const __m512i choose = _mm512_set1_epi16(static_cast<short>((Kind::kLow == 2 ? 0x7fff : 0xffff) & 255 << shift));
  const __m512i slot = _mm512_set1_epi32(kDeltaScale - 1);
  const __m128i shifts = _mm_cvtsi32_si128(shift);
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16,
                                        14, 12, 10, 8, 6, 4, 2, 0);
  constexpr std::size_t margin = kOpenAhead + 2 * (kLanes * Kind::kBits / 8);
  __m512i codes = _mm512_setzero_si512(), held = codes;  // decoded in the turn before, which leaves processors more to do at once
  std::size_t i = 0, at = open.at;
  bool ahead = true;
  const auto apply = [&] { _mm512_storeu_si512(out + i - kLanes, apply_thirty_two<Kind>(codes, classes, open.p, at, held)); };
  while (const std::size_t rounds = ahead ? s.rounds(have - i) : 0) {
    const Byte* p = s.p;
    std::size_t k = 0;
    for (; k < rounds && (ahead = (at >> 3) + margin <= open.size); ++k, i += kLanes) {
      const __m512i old = _mm512_loadu_si512(base + i);
      const __m512i tables = contexts.find(_mm512_srl_epi16(_mm512_and_si512(old, choose), shifts));
      const __m512i one = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(tables));
      const __m512i below = look_up(slots, _mm512_or_si512(_mm512_and_si512(low, slot), one));
      low = next_states<kDeltaScaleBits>(low, below, p);
      const __m512i two = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(tables, 1));
      const __m512i above = look_up(slots, _mm512_or_si512(_mm512_and_si512(high, slot), two));
      high = next_states<kDeltaScaleBits>(high, above, p);
      if (i) apply();
      codes = _mm512_permutex2var_epi16(below, even, above);
      held = old;
    }
    s.p = p;
    s.at += k * kLanes;
  }
  if (i) apply();
  _mm512_store_si512(s.states, low);
  _mm512_store_si512(s.states + 16, high);
  open.at = at;
  return i;
}
#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
