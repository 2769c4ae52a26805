#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using Matrix = nb::ndarray<const std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutMatrix = Written<std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kSide = 64, kWords = 64, kElements = kSide * kSide;
constexpr std::size_t kSlack = 64;  // bytes that the encoder may write after the end

// The global tiles of a matrix that is in memory, so no sum overflows.
std::size_t tiles_of(std::size_t rows, std::size_t cols) {
  return ((rows + kSide - 1) / kSide) * ((cols + kSide - 1) / kSide);
}

template <class Counts, class Bitmap>
void check(std::size_t tiles, const Counts& counts, const Bitmap& first, const Bitmap& second, const Bitmap& three) {
  require(counts.size() == 2 * tiles, "expected two counts per tile");
  require(first.size() == kWords * tiles && second.size() == kWords * tiles && three.size() == kWords * tiles,
          "expected 64 words per tile in each bitmap");
}

std::tuple<std::size_t, std::size_t> encode(const Matrix& values, int start, const Out<std::uint16_t>& counts,
                                            const Out<std::uint64_t>& one, const Out<std::uint64_t>& two,
                                            const Out<std::uint64_t>& three, const Out<std::uint8_t>& high,
                                            const Out<std::uint16_t>& fallback) {
  require(start >= -1 && start <= 248, "expected a window from -1 to 248");
  const std::size_t rows = values.shape(0), cols = values.shape(1), tiles = values.size() ? tiles_of(rows, cols) : 0;
  check(tiles, counts, one, two, three);
  require(high.size() >= tiles * kElements + kSlack, "expected room for every value, and 64 bytes, in high");
  require(fallback.size() >= tiles * kElements + kSlack / 2, "expected room for every value, and 32, in fallback");
  const ingot::TcaParts parts{counts.data(), {one.data(), two.data(), three.data()}, high.data(), fallback.data()};
  if (tiles == 0) return {0, 0};
  nb::gil_scoped_release release;
  const ingot::TcaSizes sizes = INGOT_KERNEL(tca_tbe_encode)(values.data(), rows, cols, start, parts);
  return {sizes.high, sizes.fallback};
}

std::size_t decode(const In<std::uint16_t>& counts, const In<std::uint64_t>& first,
                   const In<std::uint64_t>& second, const In<std::uint64_t>& three,
                   const In<std::uint8_t>& high, const In<std::uint16_t>& fallback, int start,
                   const OutMatrix& out) {
  require(start >= -1 && start <= 248, "expected a window from -1 to 248");
  const std::size_t rows = out.shape(0), cols = out.shape(1), tiles = out.size() ? tiles_of(rows, cols) : 0;
  check(tiles, counts, first, second, three);
  const ingot::TcaConst parts{counts.data(), {first.data(), second.data(), three.data()}, high.data(), fallback.data()};
  if (tiles == 0) return 0;
  nb::gil_scoped_release release;
  return INGOT_KERNEL(tca_tbe_decode)(parts, {high.size(), fallback.size()}, start, out.data(), rows, cols);
}

void exponents(const In<std::uint16_t>& values, const Out<std::uint64_t>& counts) {
  require(counts.size() == 256, "expected 256 counts");
  nb::gil_scoped_release release;
  INGOT_KERNEL(bf16_exponents)(values.data(), values.size(), counts.data());
}

}  // namespace

void bind_tca_tbe(nb::module_& m) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };  // refuse words of other types
  define(m, "tca_tbe_encode", &encode, array("values"), nb::arg("start"), array("counts"), array("bitmap1"),
        array("bitmap2"), array("bitmap3"), array("high"), array("fallback"),
        "Encode whole rows of tiles; returns how many high bytes and fallback elements there are.");
  define(m, "tca_tbe_decode", &decode, array("counts"), array("bitmap1"), array("bitmap2"), array("bitmap3"),
        array("high"), array("fallback"), nb::arg("start"), array("out"),
        "Decode whole rows of tiles; returns how many tiles were decoded: less than there are where counts do not fit.");
  define(m, "bf16_exponents", &exponents, array("values"), array("counts"),
        "Add to counts[e] how many bf16 values have the exponent e.");
}
