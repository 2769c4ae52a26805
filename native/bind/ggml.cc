#include "core/ggml.h"

#include <nanobind/stl/tuple.h>

#include <iterator>
#include <tuple>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "kernels/ggml_encode.h"

namespace {

std::size_t index_of(std::string_view type) {
  std::size_t index = 0;
  while (index < std::size(ingot::kGgmlBlocks) && ingot::kGgmlBlocks[index].name != type) ++index;
  require(index < std::size(ingot::kGgmlBlocks), "expected a type of block");
  return index;
}

void decode(std::string_view type, const InBytes& blocks, const std::optional<In<float>>& grid, const Out<float>& out) {
  const std::size_t index = index_of(type);
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(out.size() % block.elements == 0 && blocks.size() % block.bytes == 0 &&
              blocks.size() / block.bytes == out.size() / block.elements,
          "expected whole blocks, and as many elements out");
  require((grid ? grid->size() : 0) == block.grid, "expected the grid of the type, or none");
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_decode)(static_cast<ingot::Ggml>(index), blocks.data(), out.size() / block.elements,
                            grid ? grid->data() : nullptr, out.data());
}

// Checks the sizes of `count` blocks of integers in both forms.
template <class Blocks, class Codes, class Numbers>
std::size_t integers(std::string_view type, const Blocks& blocks, const Codes& codes, const Numbers& scales,
                     const std::optional<Numbers>& minima) {
  const std::size_t index = index_of(type), count = scales.size();
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(block.bits != 0, "expected a type of block that is integers with scales");
  require(blocks.size() % block.bytes == 0 && blocks.size() / block.bytes == count, "expected a scale for each block");
  require(codes.size() % (4 * block.bits) == 0 && codes.size() / (4 * block.bits) == count,
          "expected 32 codes for each block");
  require((minima ? minima->size() : 0) == (block.minimum ? count : 0), "expected the minima of the type, or none");
  return index;
}

void unpack(std::string_view type, const InBytes& blocks, const OutBytes& codes, const Out<std::uint16_t>& scales,
            const std::optional<Out<std::uint16_t>>& minima) {
  const std::size_t index = integers(type, blocks, codes, scales, minima);
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_unpack)(static_cast<ingot::Ggml>(index), blocks.data(), scales.size(), codes.data(), scales.data(),
                            minima ? minima->data() : nullptr);
}

void pack(std::string_view type, const InBytes& codes, const In<std::uint16_t>& scales,
          const std::optional<In<std::uint16_t>>& minima, const OutBytes& blocks) {
  const std::size_t index = integers(type, blocks, codes, scales, minima);
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_pack)(static_cast<ingot::Ggml>(index), codes.data(), scales.data(),
                          minima ? minima->data() : nullptr, scales.size(), blocks.data());
}

std::tuple<int, std::size_t> encode(std::string_view type, const InArray& values, std::string_view dtype,
                                    const std::optional<In<float>>& importance, bool search, const OutBytes& blocks) {
  const std::size_t index = index_of(type);
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  const ingot::Dtype kind = float_type(dtype);
  require(values.ndim() == 2, "expected values of rows x cols");
  require_elements(values, kind, "expected aligned values of the named type");
  const std::size_t cols = values.shape(1);
  require(cols % block.elements == 0 && blocks.size() % block.bytes == 0 &&
              blocks.size() / block.bytes == values.size() / block.elements,
          "expected rows of whole blocks, and as many blocks out");
  require(!importance || (search && importance->size() == cols), "expected a search, and one importance per column");
  const ingot::GgmlSource from{values.data(), kind, values.size() / block.elements, cols,
                               importance ? importance->data() : nullptr, search};
  ingot::GgmlStatus status{};
  {
    nb::gil_scoped_release release;
    status = INGOT_KERNEL(ggml_encode)(static_cast<ingot::Ggml>(index), from, blocks.data());
  }
  require(status.kind != ingot::GgmlStatus::no_encoder, "expected a type of block that is encoded in this way");
  return {status.kind, status.index};
}

}  // namespace

void bind_ggml(nb::module_& m) {
  define(m, "ggml_decode", &decode, nb::arg("type"), nb::arg("blocks"), nb::arg("grid").none(), nb::arg("out"),
         "Decode ggml's blocks to f32; `grid` is what the indices of types iq1, iq2 and iq3 point into.");
  define(m, "ggml_unpack", &unpack, nb::arg("type"), nb::arg("blocks"), nb::arg("codes"), nb::arg("scales"),
         nb::arg("minima").none(),
         "Take blocks of types q4_0 to q8_0 apart: rows of codes, the lowest bits first, and the bits of f16 scales.");
  define(m, "ggml_pack", &pack, nb::arg("type"), nb::arg("codes"), nb::arg("scales"), nb::arg("minima").none(),
         nb::arg("blocks"), "Put blocks of types q4_0 to q8_0 together; undoes `ggml_unpack`.");
  define(m, "ggml_encode", &encode, nb::arg("type"), nb::arg("values"), nb::arg("dtype"), nb::arg("importance").none(),
         nb::arg("search"), nb::arg("blocks"),
         "Encode rows of whole blocks: scales by search, or as the package gguf has them. Returns (0, 0), (1, index of a value "
         "that is not finite) or (2, index of the first value of a block for whose scale f16 has no room).");
}
