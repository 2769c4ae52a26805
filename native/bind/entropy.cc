#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "bind/scratch.h"
#include "core/dispatch.h"

namespace {

using Sizes = Out<std::uint32_t>;
using InSizes = In<std::uint32_t>;
using ingot::EntropyShape;

// Checks that `array` has aligned unsigned elements of 1, 2, 4 or 8 bytes, and that `sizes` has one element per chunk.
template <class Array>
EntropyShape shape_of(const Array& array, std::size_t chunk, std::size_t sizes) {
  const std::size_t width = array.itemsize();
  require(array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt) &&
              (width == 1 || width == 2 || width == 4 || width == 8),
          "expected elements as unsigned integers");
  require(chunk >= 1 && chunk <= ingot::kEntropyMaxChunk, "expected a chunk of 1 to 2^20 elements");
  require(sizes == (array.size() + chunk - 1) / chunk, "expected one size per chunk");
  return {width, array.size(), chunk};
}

std::size_t encode(const InArray& values, std::size_t chunk, bool max, bool joint, const OutBytes& out, const Sizes& sizes) {
  const EntropyShape shape = shape_of(values, chunk, sizes.size());
  require(!joint || shape.width == 2 || shape.width == 4, "expected elements of 2 or 4 bytes for joint symbols");
  require(out.size() >= shape.width * (shape.count + sizes.size()), "expected room for every plane as it is");
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::entropy_scratch(shape.width, shape.chunk));
  return INGOT_KERNEL(entropy_encode)(values.data(), shape, {max, joint}, out.data(), sizes.data(), scratch.data());
}

std::tuple<int, std::size_t> decode(const InBytes& planes, const InSizes& sizes, std::size_t chunk, const OutArray& out) {
  const EntropyShape shape = shape_of(out, chunk, sizes.size());
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::entropy_scratch(shape.width, shape.chunk));
  std::size_t bad = 0;
  const ingot::EntropyStatus status =
      INGOT_KERNEL(entropy_decode)(planes.data(), planes.size(), sizes.data(), shape, out.data(), scratch.data(), &bad);
  return {static_cast<int>(status), bad};
}

}  // namespace

void bind_entropy(nb::module_& m) {
  define(m, "entropy_encode", &encode, nb::arg("values"), nb::arg("chunk"), nb::arg("max"), nb::arg("joint"), nb::arg("out"),
        nb::arg("sizes"), "Encode elements, seen as unsigned integers, chunk by chunk; returns the bytes written to out.");
  define(m, "entropy_decode", &decode, nb::arg("planes"), nb::arg("sizes"), nb::arg("chunk"), nb::arg("out"),
        "Decode whole chunks. Returns (0, chunks), or a reason and the chunk: 1 layout, 2 table, 3 stream.");
}
