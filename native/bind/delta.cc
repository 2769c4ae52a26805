#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/arrays.h"
#include "bind/scratch.h"
#include "core/delta.h"
#include "core/dispatch.h"

namespace {

using Sizes = Out<std::uint32_t>;
using InSizes = In<std::uint32_t>;
using ingot::DeltaShape;

// Checks that both arrays have the same number of aligned unsigned elements of one width, and that there is one size
// per chunk.
template <class Second>
DeltaShape shape_of(const InArray& base, const Second& other, std::size_t chunk, bool floats, int shift, std::size_t sizes) {
  const std::size_t width = base.itemsize();
  require(base.dtype() == other.dtype() && base.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt) &&
              (width == 1 || width == 2 || width == 4 || width == 8),
          "expected elements of both as unsigned integers of one type");
  require(base.size() == other.size(), "expected as many elements in both");
  require(chunk >= 1 && chunk <= ingot::kDeltaMaxChunk, "expected a chunk of 1 to 2^20 elements");
  require(sizes == (base.size() + chunk - 1) / chunk, "expected one size per chunk");
  require(shift >= 0 && shift < static_cast<int>(8 * width) - 1, "expected a shift inside of an element");
  const std::size_t remainder = base.size() % chunk;
  return {{width, floats, shift}, base.size(), chunk, remainder ? remainder : chunk};
}

std::size_t encode(const InArray& base, const InArray& tuned, std::size_t chunk, bool floats, int shift, const OutBytes& out,
                   const Sizes& sizes) {
  const DeltaShape shape = shape_of(base, tuned, chunk, floats, shift, sizes.size());
  require(out.size() >= shape.element.width * shape.count + sizes.size(), "expected room for every chunk as it is");
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::delta_encode_scratch(shape.element.width, chunk));
  return INGOT_KERNEL(delta_encode)(base.data(), tuned.data(), shape, out.data(), sizes.data(), scratch.data());
}

std::tuple<int, std::size_t> apply(const InBytes& planes, const InSizes& sizes, std::size_t chunk, std::size_t last, bool floats,
                                   int shift, const InArray& base, const OutArray& out) {
  DeltaShape shape = shape_of(base, out, chunk, floats, shift, sizes.size());
  require(shape.count == 0 || (last <= chunk && last >= shape.last), "expected the elements of the last chunk");
  shape.last = last;
  const auto from = reinterpret_cast<std::uintptr_t>(base.data()), to = reinterpret_cast<std::uintptr_t>(out.data());
  const std::uintptr_t bytes = shape.count * shape.element.width;
  require(from == to || from + bytes <= to || to + bytes <= from, "expected the base itself or another array as output");
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::delta_apply_scratch(shape.element.width, chunk));
  std::size_t bad = 0;
  const ingot::EntropyStatus status = INGOT_KERNEL(delta_apply)(planes.data(), planes.size(), sizes.data(), shape, base.data(),
                                                                out.data(), scratch.data(), &bad);
  return {static_cast<int>(status), bad};
}

}  // namespace

void bind_delta(nb::module_& m) {
  define(m, "delta_encode", &encode, nb::arg("base"), nb::arg("tuned"), nb::arg("chunk"), nb::arg("floats"), nb::arg("shift"),
        nb::arg("out"), nb::arg("sizes"),
        "Encode what turns a base into a fine-tune, both seen as unsigned integers; returns the bytes written to out.");
  define(m, "delta_apply", &apply, nb::arg("planes"), nb::arg("sizes"), nb::arg("chunk"), nb::arg("last"), nb::arg("floats"),
        nb::arg("shift"), nb::arg("base"), nb::arg("out"),
        "Apply chunks to a base; of the last chunk's `last` elements those that `base` holds. Returns (0, chunks), or a reason "
        "and the chunk: 1 layout, 2 table, 3 stream.");
}
