// Definitions that the encoder and the applier of delta_exact share, once per instruction set: differences, their symbols,
// constants of the layout. spec/delta_exact.md defines it.
#pragma once
#include <bit>
#include <type_traits>

#include "core/delta.h"
#include "kernels/entropy.h"
#include "kernels/entropy_planes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr Byte kSame = 0, kWhole = 1, kSparse = 2, kDense = 3, kDenseRans = 4;  // modes of a chunk
constexpr Byte kPlaneRaw = 0, kPlaneConstant = 1, kPlaneHuffman = 2;
constexpr std::size_t kBlock = kSixBlock;  // elements of a dense chunk that are processed at a time
constexpr std::size_t kDeltaScale = std::size_t{1} << kDeltaScaleBits;
constexpr std::size_t kFarGap = 255;  // marks a gap of 255 unchanged elements without a change

// The difference of two words, and its inverse. `Float`: words are sign and magnitude. In the rotated word, the
// magnitude is above the sign. In the difference, the difference of magnitudes (W - 1 bits as zigzag) is above a bit
// for the change of the sign.
template <class W>
struct Float {
  using Word = W;
  static constexpr int kLow = 2;  // bits below the magnitude: sign of the difference, change of the value's sign
  static constexpr int kBits = 8 * sizeof(Word) - 2;  // bits of its magnitude

  static Word turned(Word word) { return rotated_left(word); }
  static Word difference(Word base, Word tuned) {
    using Signed = std::make_signed_t<Word>;
    const Word a = rotated_left(base), b = rotated_left(tuned), one = 1, even = static_cast<Word>(~one);
    const Word change = static_cast<Word>((b & even) - (a & even));
    const Word sign = static_cast<Word>(static_cast<Signed>(change) >> (8 * sizeof(Word) - 1));
    return static_cast<Word>((static_cast<Word>(change << 1) ^ (sign & even)) | ((a ^ b) & one));
  }
  static Word applied(Word base, Word difference) {
    const Word a = rotated_left(base), one = 1, zigzag = static_cast<Word>(difference >> 1);
    const Word change = static_cast<Word>((zigzag >> 1) ^ (Word{0} - (zigzag & one)));
    const Word magnitude = static_cast<Word>((a >> 1) + change);
    return rotated_right(static_cast<Word>(static_cast<Word>(magnitude << 1) | ((a ^ difference) & one)));
  }
};

// Words are integers: their difference modulo 2^W, as zigzag.
template <class W>
struct Integer {
  using Word = W;
  static constexpr int kLow = 1;
  static constexpr int kBits = 8 * sizeof(Word) - 1;

  static Word turned(Word word) { return word; }
  static Word difference(Word base, Word tuned) {
    using Signed = std::make_signed_t<Word>;
    const Word change = static_cast<Word>(tuned - base);
    const Word sign = static_cast<Word>(static_cast<Signed>(change) >> (8 * sizeof(Word) - 1));
    return static_cast<Word>(static_cast<Word>(change << 1) ^ sign);
  }
  static Word applied(Word base, Word difference) {
    const Word ones = 1;
    return static_cast<Word>(base + ((difference >> 1) ^ (Word{0} - (difference & ones))));
  }
};

// Calls run(Kind{}) with the arithmetic of the elements.
template <class Run>
inline auto with_kind(const DeltaElement& element, Run run) {
  switch (element.width * 2 + element.signed_magnitude) {
    case 2: return run(Integer<std::uint8_t>{});
    case 3: return run(Float<std::uint8_t>{});
    case 4: return run(Integer<std::uint16_t>{});
    case 5: return run(Float<std::uint16_t>{});
    case 8: return run(Integer<std::uint32_t>{});
    case 9: return run(Float<std::uint32_t>{});
    case 16: return run(Integer<std::uint64_t>{});
    default: return run(Float<std::uint64_t>{});
  }
}

// The magnitude of a difference is split into a class and open bits: 0 and 1 are classes 0 and 1; from 2 on, the class
// is twice the position of the highest bit plus the bit below it, and all lower bits are open.
template <class Element>
constexpr std::size_t kClasses = 2 * static_cast<std::size_t>(Element::kBits);

// Symbols are classes with the sign as lowest bit; those that keep the sign of the value come first.
template <class Element>
constexpr std::size_t kSymbolsOf = kClasses<Element> * (std::size_t{1} << Element::kLow);
static_assert(kSymbolsOf<Float<std::uint64_t>> <= kDeltaSymbols && kDeltaSymbols <= kMostDistinct);

// The class of a magnitude. Up to 32 bits, it is the exponent and the first mantissa bit of a float, which compilers
// vectorize.
template <class Wide>
inline std::uint32_t class_of(Wide magnitude) {
  if constexpr (sizeof(Wide) == 8) {
    if (magnitude < 2) return static_cast<std::uint32_t>(magnitude);
    const int below = static_cast<int>(std::bit_width(magnitude)) - 1;
    return static_cast<std::uint32_t>(2 * below) + static_cast<std::uint32_t>(magnitude >> (below - 1) & 1);
  } else {
    const Wide cut = magnitude >> 24 ? magnitude & ~Wide{255} : magnitude;  // a float has 24 bits: nothing may round up
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(cut)));
    return magnitude < 2 ? magnitude : (bits >> 22) - 254;
  }
}

template <class Element>
inline std::uint32_t symbol_of(typename Element::Word difference) {
  using Wide = std::conditional_t<sizeof(typename Element::Word) == 8, std::uint64_t, std::uint32_t>;
  const std::uint32_t result = class_of<Wide>(static_cast<Wide>(difference) >> Element::kLow);
  const std::uint32_t sign = static_cast<std::uint32_t>(difference >> (Element::kLow - 1) & 1);
  const std::uint32_t turns = Element::kLow == 2 ? static_cast<std::uint32_t>(difference & 1) : 0;
  return turns * 2 * static_cast<std::uint32_t>(kClasses<Element>) + 2 * result + sign;
}

// The number of open bits of a symbol.
template <class Element>
inline unsigned open_bits(std::size_t symbol) {
  const std::size_t result = symbol % (2 * kClasses<Element>) >> 1;
  return result < 2 ? 0 : static_cast<unsigned>(result / 2 - 1);
}

// The difference of a symbol if its open bits are 0.
template <class Element>
inline typename Element::Word least_difference(std::size_t symbol) {
  using Word = typename Element::Word;
  const std::size_t result = symbol % (2 * kClasses<Element>) >> 1;
  const Word magnitude =
      static_cast<Word>(result < 2 ? result : (Word{2} | Word(result & 1)) << open_bits<Element>(symbol));
  const Word low = static_cast<Word>((symbol & 1) << (Element::kLow - 1) | (symbol >= 2 * kClasses<Element>));
  return static_cast<Word>(static_cast<Word>(magnitude << Element::kLow) | low);
}

// The decoder's representation of symbols. For elements of two bytes: the class, which is below 32, then a bit each for
// direction and sign. Table look-ups in registers ignore the bits above the class.
constexpr std::uint32_t kDownCode = 32, kTurnsCode = 64;
template <class Element>
constexpr std::uint32_t code_of(std::size_t symbol) {
  if constexpr (sizeof(typename Element::Word) != 2) return static_cast<std::uint32_t>(symbol);
  static_assert(sizeof(typename Element::Word) != 2 || kClasses<Element> <= kDownCode);
  const std::size_t result = symbol % (2 * kClasses<Element>) >> 1;
  return static_cast<std::uint32_t>(result) + (symbol & 1 ? kDownCode : 0) +
         (symbol >= 2 * kClasses<Element> ? kTurnsCode : 0);
}

// The number that selects the context: eight bits of the base from `shift` on, without a float's sign.
template <class Element>
inline Byte bin_of(typename Element::Word base, int shift) {
  return static_cast<Byte>(Element::turned(base) >> (shift + Element::kLow - 1));
}

// An array in scratch memory, aligned and apart from its neighbours.
template <class T>
inline T* take(Byte*& scratch, std::size_t count) {
  const std::size_t index = reinterpret_cast<std::uintptr_t>(scratch) % kDeltaMargin;
  Byte* const start = scratch + (kDeltaMargin - index);
  scratch = start + count * sizeof(T);
  return reinterpret_cast<T*>(start);
}

inline std::size_t load_u24(const Byte* p) { return p[0] | std::size_t{p[1]} << 8 | std::size_t{p[2]} << 16; }

inline void store_u24(Byte* p, std::size_t value) {
  for (int i = 0; i < 3; ++i) p[i] = static_cast<Byte>(value >> (8 * i));
}

}  // namespace
}  // namespace ingot::INGOT_ISA
