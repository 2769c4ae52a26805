// Products with matrices of codecs that decode tiles: in bf16, f16 or f32, by the kernels for many rows (core/products.h).
#include <optional>

#include "bind/products.h"
#include "core/dispatch.h"
#include "core/palette.h"
#include "core/trellis.h"
#include "kernels/affine_gemm.h"
#include "kernels/tiles.h"

namespace {

using ingot::Dtype;
using ingot::GemmMode;

// Scales of 1: the tiles contain the final values.
constexpr float kOne = 1;

class Tiles {
 public:
  // `within` is whether all weights, in any type, are 0 or have magnitudes between 2^-40 and 2^40.
  Tiles(std::size_t rows, std::size_t cols, bool within) : within_(within) {
    require(rows <= kMost && cols >= 1 && cols <= kMost, "expected sizes in range");
    at_.rows = rows, at_.cols = at_.group = cols, at_.bits = 16;
    at_.per_tensor = at_.one_scale = true, at_.zero = ingot::ZeroKind::none;
  }

 protected:
  void multiply(const ingot::TileSource& source, std::size_t bytes, const InArray& x, const std::optional<InArray>& bias,
                const OutArray& out, std::string_view dtype, std::string_view bias_dtype, std::size_t threads) const {
    const Product product(at_, x, bias, out, dtype, bias_dtype);
    nb::gil_scoped_release release;
    const ingot::Weights weights{at_, {nullptr, &kOne, nullptr, Dtype::f32}, &source, bytes};
    ingot::multiply_rows(weights, product.x, product.count, product.out, ingot::mode_here(mode(product)), threads);
  }

  ingot::MatmulLayout at_{};

 private:
  // Products of 16-bit values are exact in f32; those of bf16 only if nothing overflows or is subnormal.
  GemmMode mode(const Product& product) const {
    if (product.out.type == Dtype::f32 || !within_) return GemmMode::plain;
    const GemmMode result =
        INGOT_KERNEL(gemm_mode)(product.x, product.out.type, product.count * at_.cols, ingot::kBesideValuesReach);
    return product.out.type == Dtype::bf16 && result != GemmMode::tiles ? GemmMode::plain : result;
  }

  const bool within_;
};

class Trellis : public Tiles {
 public:
  Trellis(InBytes words, In<float> values, InArray scales, std::size_t rows, std::size_t cols, int bits, std::size_t group,
          std::size_t band, std::string_view scale_dtype, bool within)
      : Tiles(rows, cols, within), words_(words), values_(values), scales_(scales) {
    const Dtype type = float_type(scale_dtype);
    require(bits >= 2 && bits <= 4, "expected 2 to 4 bits");
    require(group >= 1 && cols % group == 0 && band >= 16 && band % 16 == 0 && band <= kMost, "expected a group that divides the columns, and bands");
    require(values.size() == ingot::kTrellisStates, "expected 4096 values");
    require(type != Dtype::f64, "expected scales of type f32, f16 or bf16");
    require_elements(scales, type, "expected aligned scales of the named type");
    std::size_t count = 0, places = 0, bytes = 0;
    require(!__builtin_mul_overflow(rows, cols / group, &count) && scales.size() == count, "expected a scale for every group");
    require(!__builtin_mul_overflow(rows, static_cast<std::size_t>(bits), &places), "expected fewer rows");
    places = places / 16 + (places % 16 != 0);  // bands are complete words except the last
    require(!__builtin_mul_overflow(2 * places, cols, &bytes) && words.size() == bytes, "expected as many bytes as the streams fill");
    held_ = {rows, cols, group, band, bits, words_.data(), values_.data(), scales_.data(), type};
  }

  void gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads) const {
    multiply({INGOT_KERNEL(trellis_tile), &held_}, words_.size(), x, bias, out, dtype, bias_dtype, threads);
  }

 private:
  const InBytes words_;
  const In<float> values_;
  const InArray scales_;
  ingot::TrellisMatrix held_{};
};

class Palette : public Tiles {
 public:
  Palette(InBytes packed, InArray tables, std::size_t rows, std::size_t cols, int bits, std::string_view dtype, bool within)
      : Tiles(rows, cols, within), packed_(packed), tables_(tables), type_(float_type(dtype)) {
    require(bits >= 1 && bits <= 8 && bits != 5 && bits != 7, "expected 1, 2, 3, 4, 6 or 8 bits");
    require(type_ != Dtype::f64, "expected tables of type f32, f16 or bf16");
    require_elements(tables, type_, "expected aligned tables of the named type");
    require(cols * static_cast<std::size_t>(bits) % 8 == 0, "expected rows that begin at a byte");
    std::size_t bytes = 0;
    require(!__builtin_mul_overflow(rows, cols * static_cast<std::size_t>(bits) / 8, &bytes) && packed.size() == bytes,
            "expected as many bytes as the indices fill");
    const std::size_t entries = std::size_t{1} << bits, count = tables.size() / entries;
    require(count >= 1 && tables.size() % entries == 0 && rows % count == 0, "expected tables for runs of as many rows");
    held_ = {rows, cols, rows / count ? rows / count : 1, bits, packed_.data(), tables_.data()};
  }

  void gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads) const {
    require(float_type(dtype) == type_, "expected x in the type of the tables");
    multiply({INGOT_KERNEL(palette_tile), &held_}, packed_.size(), x, bias, out, dtype, bias_dtype, threads);
  }

 private:
  const InBytes packed_;
  const InArray tables_;
  const Dtype type_;
  ingot::PaletteMatrix held_{};
};

constexpr const char* kDoc = "out[m, row] = sum over k of x[m, k] * w[row, k] + bias[row], w in the type of x, as PackedMatrix.gemm adds.";

}  // namespace

void bind_tile_matmul(nb::module_& m) {
  nb::class_<Trellis>(m, "TrellisMatrix", "Streams of a trellis to multiply with; raises ValueError where sizes do not fit.")
      .def(nb::init<InBytes, In<float>, InArray, std::size_t, std::size_t, int, std::size_t, std::size_t, std::string_view, bool>(),
           nb::arg("words"), nb::arg("values"), nb::arg("scales"), nb::kw_only(), nb::arg("rows"), nb::arg("cols"), nb::arg("bits"),
           nb::arg("group"), nb::arg("band"), nb::arg("scale_dtype"), nb::arg("within"))
      .def("gemm", guarded(&Trellis::gemm), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), kDoc);
  nb::class_<Palette>(m, "PaletteMatrix", "Indices into tables to multiply with; raises ValueError where sizes do not fit.")
      .def(nb::init<InBytes, InArray, std::size_t, std::size_t, int, std::string_view, bool>(), nb::arg("packed"),
           nb::arg("tables"), nb::kw_only(), nb::arg("rows"), nb::arg("cols"), nb::arg("bits"), nb::arg("dtype"), nb::arg("within"))
      .def("gemm", guarded(&Palette::gemm), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("dtype"),
           nb::arg("bias_dtype"), nb::arg("threads"), kDoc);
}
