#include "core/ggml.h"

#include <nanobind/stl/tuple.h>

#include <iterator>
#include <tuple>
#include <utility>

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

bool decode(std::string_view type, const InBytes& blocks, const std::optional<In<std::int8_t>>& grid, const OutArray& out,
            std::string_view dtype) {
  const ingot::Dtype kind = float_type(dtype);
  require(kind != ingot::Dtype::f64, "expected a target f32, f16 or bf16");
  require(out.ndim() == 1, "expected an output of one dimension");
  require_elements(out, kind, "expected an aligned output of the named type");
  const std::size_t index = index_of(type);
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(out.size() % block.elements == 0 && blocks.size() % block.bytes == 0 &&
              blocks.size() / block.bytes == out.size() / block.elements,
          "expected whole blocks, and as many elements out");
  require((grid ? grid->size() : 0) == block.grid, "expected the grid of the type, or none");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(ggml_decode)(static_cast<ingot::Ggml>(index), blocks.data(), out.size() / block.elements,
                                   grid ? grid->data() : nullptr, {out.data(), kind});
}

// Checks the sizes of packed and unpacked blocks; returns the type and the number of blocks.
template <class Minima>
std::pair<std::size_t, std::size_t> apart(std::string_view type, std::size_t blocks, std::size_t codes,
                                          std::size_t scales, const std::optional<Minima>& minima) {
  const std::size_t index = index_of(type);
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(block.bits != 0, "expected a type of block that is codes with scales");
  require(blocks % block.bytes == 0, "expected whole blocks");
  const std::size_t count = blocks / block.bytes, row = block.elements * block.bits / 8;
  require(codes % row == 0 && codes / row == count, "expected the codes of each block");
  require(scales % block.scales == 0 && scales / block.scales == count, "expected the scales of each block");
  require(minima.has_value() == (block.minima != 0) && (!minima || minima->size() == count * block.minima),
          "expected the minima of each block, or none");
  return {index, count};
}

void unpack(std::string_view type, const InBytes& blocks, const OutBytes& codes, const OutBytes& scales,
            const std::optional<OutBytes>& minima) {
  const auto [index, count] = apart(type, blocks.size(), codes.size(), scales.size(), minima);
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_unpack)(static_cast<ingot::Ggml>(index), blocks.data(), count, codes.data(), scales.data(),
                            minima ? minima->data() : nullptr);
}

void pack(std::string_view type, const InBytes& codes, const InBytes& scales, const std::optional<InBytes>& minima,
          const OutBytes& blocks) {
  const auto [index, count] = apart(type, blocks.size(), codes.size(), scales.size(), minima);
  require(ingot::kGgmlBlocks[index].packed, "expected a type of block that is put together");
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_pack)(static_cast<ingot::Ggml>(index), codes.data(), scales.data(),
                          minima ? minima->data() : nullptr, count, blocks.data());
}

void compose(std::string_view type, const InBytes& codes, const In<std::uint16_t>& d,
             const std::optional<In<std::uint16_t>>& smallest, const std::optional<In<float>>& steps,
             const std::optional<In<float>>& minimums, const OutBytes& blocks) {
  const std::size_t index = index_of(type);
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(blocks.size() % block.bytes == 0, "expected whole blocks");
  const std::size_t count = blocks.size() / block.bytes, groups = block.packed ? 0 : block.scales / sizeof(float);
  require(codes.size() % block.elements == 0 && codes.size() / block.elements == count, "expected a code for each element");
  require(d.size() == count && (!smallest || smallest->size() == count),
          "expected a scale, and a minimum, for each block");
  require(smallest.has_value() == (block.minima != 0), "expected minima of types that have them");
  require(steps.has_value() == (groups != 0) && (!steps || steps->size() == count * groups), "expected an integer for each group");
  require(minimums.has_value() == (groups != 0 && block.minima != 0) && (!minimums || minimums->size() == count * groups),
          "expected a minimum for each group");
  const auto data = [](const auto& array) { return array ? array->data() : nullptr; };
  const ingot::GgmlNumbers from{d.data(), data(smallest), data(steps), data(minimums), codes.data()};
  bool is_known = false;
  {
    nb::gil_scoped_release release;
    is_known = INGOT_KERNEL(ggml_compose)(static_cast<ingot::Ggml>(index), from, count, blocks.data());
  }
  require(is_known, "expected a type of block that is put together");
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
  require(status.code != ingot::GgmlStatus::no_encoder, "expected a type of block that is encoded in this way");
  return {status.code, status.index};
}

}  // namespace

void bind_ggml(nb::module_& m) {
  define(m, "ggml_decode", &decode, nb::arg("type"), nb::arg("blocks"), nb::arg("grid").none(), nb::arg("out"),
         nb::arg("dtype"),
         "Decode ggml's blocks, rounded once from f32; `grid` is what the indices of types iq1, iq2 and iq3 point into. "
         "Returns whether a number was too large for the type.");
  define(m, "ggml_unpack", &unpack, nb::arg("type"), nb::arg("blocks"), nb::arg("codes"), nb::arg("scales"),
         nb::arg("minima").none(),
         "Take blocks apart: rows of codes, the lowest bits first, and bytes of scales and minima, as stored or in f32.");
  define(m, "ggml_pack", &pack, nb::arg("type"), nb::arg("codes"), nb::arg("scales"), nb::arg("minima").none(),
         nb::arg("blocks"), "Put blocks together whose scales are stored as they are; undoes `ggml_unpack`.");
  define(m, "ggml_compose", &compose, nb::arg("type"), nb::arg("codes"), nb::arg("d"), nb::arg("dmin").none(),
         nb::arg("steps").none(), nb::arg("minimums").none(), nb::arg("blocks"),
         "Put blocks together from a code for each element, their own scale and minimum as bits of f16, and the integers that "
         "multiply these for each group.");
  define(m, "ggml_encode", &encode, nb::arg("type"), nb::arg("values"), nb::arg("dtype"), nb::arg("importance").none(),
         nb::arg("search"), nb::arg("blocks"),
         "Encode rows of whole blocks: scales by search, or as the package gguf has them. Returns (0, 0), (1, index of a value "
         "that is not finite) or (2, index of the first value of a block for whose scale f16 has no room).");
}
