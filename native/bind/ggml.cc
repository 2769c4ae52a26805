#include "core/ggml.h"

#include <iterator>

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

void decode(std::string_view type, const InBytes& blocks, const std::optional<In<float>>& grid, const Out<float>& out) {
  std::size_t index = 0;
  while (index < std::size(ingot::kGgmlBlocks) && ingot::kGgmlBlocks[index].name != type) ++index;
  require(index < std::size(ingot::kGgmlBlocks), "expected a type of block");
  const ingot::GgmlBlock& block = ingot::kGgmlBlocks[index];
  require(out.size() % block.elements == 0 && blocks.size() % block.bytes == 0 &&
              blocks.size() / block.bytes == out.size() / block.elements,
          "expected whole blocks, and as many elements out");
  require((grid ? grid->size() : 0) == block.grid, "expected the grid of the type, or none");
  nb::gil_scoped_release release;
  INGOT_KERNEL(ggml_decode)(static_cast<ingot::Ggml>(index), blocks.data(), out.size() / block.elements,
                            grid ? grid->data() : nullptr, out.data());
}

}  // namespace

void bind_ggml(nb::module_& m) {
  define(m, "ggml_decode", &decode, nb::arg("type"), nb::arg("blocks"), nb::arg("grid").none(), nb::arg("out"),
         "Decode ggml's blocks to f32; `grid` is what the indices of types iq1, iq2 and iq3 point into.");
}
