// Processes many differences of elements of two bytes at a time: combines symbols and open bits to words. Once per
// instruction set, with AVX-512.
#pragma once
#include "kernels/delta.h"
#include "kernels/entropy_rans_read.h"
#include "kernels/register_tables.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_ISA {
namespace {

// A stream of the open bits of symbols, lowest first. Reads stay within the bytes; at the end, the number of requested
// bits is compared with the number of stored bits.
struct OpenBits {
  const Byte* p;  // at least eight bytes
  std::size_t size;
  std::size_t position;

  // Returns whether the next `bits` bits are stored, with eight bytes after each of them.
  bool has(std::size_t bits) const { return (position + bits) / 8 + 8 <= size; }

  // Returns the next 57 bits or more. `kThere`: the caller has checked that they are stored.
  template <bool kThere>
  std::uint64_t ahead() const {
    const std::size_t byte = kThere ? position >> 3 : min_of(position >> 3, size < 8 ? 0 : size - 8);
    return load_le<std::uint64_t>(p + byte) >> ((position - 8 * byte) & 63);
  }

  template <bool kThere>
  std::uint64_t next(unsigned count) {
    const std::uint64_t word = ahead<kThere>();
    position += count;
    return word & ~(~std::uint64_t{0} << count);
  }

  // Returns whether the last bit was in the last byte, and the unused bits are 0.
  bool ended() const {
    const std::size_t unused = 8 * size - position;
    return position <= 8 * size && unused < 8 && (unused == 0 || p[size - 1] >> (8 - unused) == 0);
  }
};

#if defined(__AVX512BW__)
constexpr std::size_t kLanes = 32;  // words of a register

// Tables by class: the number of open bits, their mask, and the smallest magnitude. They also contain loop constants,
// which are loaded at run time, because compilers would recompute known constants in every iteration, in execution
// units that are busy.
template <class Element>
struct ClassLanes {
  __m512i count, open, least;
  __m512i down = _mm512_set1_epi16(kDownCode), turns = _mm512_set1_epi16(kTurnsCode), sign = _mm512_set1_epi16(-0x8000);
  __m512i fifteen = _mm512_set1_epi16(15), sixteen = _mm512_set1_epi16(16), all = _mm512_set1_epi16(-1);
  __m512i fourth = _mm512_set1_epi64(0x0001000100010001);

  ClassLanes() {
    alignas(64) std::uint16_t entries[3][kLanes] = {};
    for (std::size_t result = 0; result < kClasses<Element>; ++result) {
      entries[0][result] = static_cast<std::uint16_t>(open_bits<Element>(2 * result));
      entries[1][result] = static_cast<std::uint16_t>((1u << entries[0][result]) - 1);
      entries[2][result] = static_cast<std::uint16_t>(least_difference<Element>(2 * result) >> Element::kLow);
    }
    count = _mm512_load_si512(entries[0]);
    open = _mm512_load_si512(entries[1]);
    least = _mm512_load_si512(entries[2]);
  }

  // Prefix sums: of four numbers by multiplication, then over 8, 16 and 32 bytes.
  __m512i running_sums(__m512i numbers) const {
    const __m512i eighth = _mm512_set4_epi32(0x07060706, 0x07060706, -1, -1);
    const __m512i half = _mm512_inserti64x4(_mm512_set1_epi16(7), _mm256_set1_epi16(23), 1);
    __m512i sums = _mm512_mullo_epi64(numbers, fourth);
    sums = _mm512_add_epi16(sums, _mm512_shuffle_epi8(sums, eighth));
    sums = _mm512_add_epi16(sums, _mm512_maskz_permutexvar_epi16(0xff00ff00, half, sums));
    return _mm512_add_epi16(sums, _mm512_maskz_permutexvar_epi16(0xffff0000, fifteen, sums));
  }
};

constexpr std::size_t kOpenAhead = sizeof(__m512i) + 2;  // bytes that apply_thirty_two may read

// Applies 32 elements by their codes; bits above a code are ignored. The offsets of the open bits are summed up, and the
// bits, 416 at most, are taken from a single read of 64 bytes.
template <class Element>
inline __m512i apply_thirty_two(__m512i codes, const ClassLanes<Element>& with, const Byte* bits, std::size_t& position,
                                __m512i old) {
  const __mmask32 down = _mm512_test_epi16_mask(codes, with.down);
  const __m512i count = _mm512_permutexvar_epi16(codes, with.count), behind = with.running_sums(count);
  const __m512i first =
      _mm512_add_epi16(_mm512_sub_epi16(behind, count), _mm512_set1_epi16(static_cast<short>(position & 7)));
  const Byte* const p = bits + (position >> 3);
  position += static_cast<std::size_t>(_mm_extract_epi16(_mm512_extracti32x4_epi32(behind, 3), 7));
  const __m512i word = _mm512_srli_epi16(first, 4), skip = _mm512_and_si512(first, with.fifteen);
  const __m512i low = _mm512_srlv_epi16(_mm512_permutexvar_epi16(word, _mm512_loadu_si512(p)), skip);
  const __m512i next = _mm512_permutexvar_epi16(word, _mm512_loadu_si512(p + 2));
  const __m512i high = _mm512_sllv_epi16(next, _mm512_sub_epi16(with.sixteen, skip));
  const __m512i open = _mm512_permutexvar_epi16(codes, with.open), least = _mm512_permutexvar_epi16(codes, with.least);
  const __m512i magnitude = _mm512_or_si512(least, _mm512_and_si512(open, _mm512_or_si512(low, high)));
  const __m512i change = _mm512_mask_sub_epi16(magnitude, down, with.all, magnitude);
  const __m512i sum = _mm512_add_epi16(old, change);
  if constexpr (Element::kLow == 1) return sum;
  const __mmask32 turns = _mm512_test_epi16_mask(codes, with.turns);
  const __m512i signs = _mm512_mask_sub_epi16(old, turns, old, with.sign);
  return _mm512_or_si512(_mm512_andnot_si512(with.sign, sum), _mm512_and_si512(with.sign, signs));
}

// Applies elements, 32 at a time, as long as enough bits remain; returns their number.
template <class Element>
inline std::size_t apply_lanes(const std::uint16_t* codes, OpenBits& open, std::size_t n, const std::uint16_t* base, std::uint16_t* out) {
  const ClassLanes<Element> classes;
  std::size_t i = 0, position = open.position;
  for (; i + kLanes <= n && (position >> 3) + kOpenAhead <= open.size; i += kLanes)
    _mm512_storeu_si512(out + i, apply_thirty_two<Element>(_mm512_loadu_si512(codes + i), classes, open.p, position,
                                                           _mm512_loadu_si512(base + i)));
  open.position = position;
  return i;
}

// Looks up the first table entry of each bin. `kNear`: the bins at which tables change are so close together that two
// registers hold all entries from the first change on; otherwise eight registers do.
template <bool kNear>
struct ContextLanes {
  static constexpr std::size_t kParts = kNear ? 2 : 8;
  __m512i part[kParts], first;

  // `at` has an entry for every bin; bins below `start`, and from start + 63 on, have the entries of their neighbours.
  ContextLanes(const std::uint16_t* position, std::size_t start) : first(_mm512_set1_epi16(static_cast<short>(start))) {
    for (std::size_t k = 0; k < kParts; ++k) part[k] = _mm512_loadu_si512(position + start + kLanes * k);
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

template <class Element, bool kNear>
struct Lanes {
  ContextLanes<kNear> contexts;
  ClassLanes<Element> classes;
};

// Decodes symbols with rANS and applies them, 32 at a time, until an end is near; returns their number.
template <class Element, bool kNear>
[[gnu::noinline]] std::size_t apply_rounds(RansStream& s, const std::uint32_t* slots,
                                           const Lanes<Element, kNear>& lanes, int shift, OpenBits& open,
                                           std::size_t have, const std::uint16_t* base, std::uint16_t* out) {
  static_assert(kRansLanes == kLanes);
  const ContextLanes<kNear> contexts = lanes.contexts;
  const ClassLanes<Element> classes = lanes.classes;
  __m512i low = _mm512_load_si512(s.states), high = _mm512_load_si512(s.states + 16);
  const __m512i choose = _mm512_set1_epi16(static_cast<short>((Element::kLow == 2 ? 0x7fff : 0xffff) & 255 << shift));
  const __m512i slot = _mm512_set1_epi32(kDeltaScale - 1);
  const __m128i shifts = _mm_cvtsi32_si128(shift);
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16,
                                        14, 12, 10, 8, 6, 4, 2, 0);
  constexpr std::size_t margin = kOpenAhead + 2 * (kLanes * Element::kBits / 8);
  // Decoded in the previous iteration, so that the processor has independent work.
  __m512i codes = _mm512_setzero_si512(), held = codes;
  std::size_t i = 0, position = open.position;
  bool ahead = true;
  const auto apply = [&] {
    _mm512_storeu_si512(out + i - kLanes, apply_thirty_two<Element>(codes, classes, open.p, position, held));
  };
  while (const std::size_t rounds = ahead ? s.rounds(have - i) : 0) {
    const Byte* p = s.p;
    std::size_t k = 0;
    for (; k < rounds && (ahead = (position >> 3) + margin <= open.size); ++k, i += kLanes) {
      const __m512i old = _mm512_loadu_si512(base + i);
      const __m512i tables = contexts.find(_mm512_srl_epi16(_mm512_and_si512(old, choose), shifts));
      const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(tables));
      const __m512i below = look_up(slots, _mm512_or_si512(_mm512_and_si512(low, slot), first));
      low = next_states<kDeltaScaleBits>(low, below, p);
      const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(tables, 1));
      const __m512i above = look_up(slots, _mm512_or_si512(_mm512_and_si512(high, slot), second));
      high = next_states<kDeltaScaleBits>(high, above, p);
      if (i) apply();
      codes = _mm512_permutex2var_epi16(below, even, above);
      held = old;
    }
    s.p = p;
    s.decoded += k * kLanes;
  }
  if (i) apply();
  _mm512_store_si512(s.states, low);
  _mm512_store_si512(s.states + 16, high);
  open.position = position;
  return i;
}
#endif

}  // namespace
}  // namespace ingot::INGOT_ISA
