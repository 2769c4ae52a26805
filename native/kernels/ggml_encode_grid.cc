// Encodes weights to ggml's blocks whose codes are entries of a grid: IQ1, IQ2 and IQ3.
#include "kernels/ggml_block_loop.h"
#include "kernels/ggml_grid_fit.h"

namespace ingot::INGOT_ISA {
namespace {

template <Ggml kType>
GgmlStatus encode_grid(const GgmlSource& from, Byte* out) {
  using Type = GridType<kType>;
  constexpr std::size_t vectors = GridBlock<Type>::kVectors;
  const GridEntries<Type> entries(from.grid);
  GridBlock<Type> block;
  return for_blocks<kType>(from, out, [&](const float* x, const float* weights, Byte* to) {
    std::copy_n(x, kBlockValues, block.x);
    std::copy_n(weights, kBlockValues, block.w);
    float back = 1;
    normalize(block.x, back);
    block.fill();
    GridFit<Type> fit{{entries, block}, back, 0, {}, {}};
    if (!fit.run()) return false;
    GridContents contents{};
    contents.d = f32_to_f16(fit.d * back);
    for (std::size_t group = 0; group < GridFit<Type>::kGroups; ++group)
      contents.step[group] = static_cast<std::uint8_t>(fit.step[group]);
    std::copy_n(fit.trial.entry, vectors, contents.entry);
    std::copy_n(fit.trial.negative, 32, contents.negative);
    if constexpr (Type::kSigns == Signs::inside) std::copy_n(fit.trial.down, vectors, contents.down);
    pack_grid<kType>(contents, to);
    return true;
  });
}

template <Ggml kType>
bool nearest_columns(const GridColumns& from, const GridCodes& out) {
  using Type = GridType<kType>;
  constexpr std::size_t at_once = kBlockValues / 8, vectors = 8 / Type::kDims;
  const GridEntries<Type> entries(from.grid);
  GridBlock<Type> block;
  const GridSearch<Type> search{entries, block};
  float ones[GridTrial<Type>::kGroups];
  std::fill(std::begin(ones), std::end(ones), 1.0f);
  for (std::size_t i = 0; i < kBlockValues; ++i) block.w[i] = from.weights[i % 8];
  GridTrial<Type> trial;
  for (std::size_t first = 0; first < from.rows; first += at_once) {
    const std::size_t count = std::min(at_once, from.rows - first);
    std::fill(std::begin(block.x), std::end(block.x), 0.0f);
    for (std::size_t row = 0; row < count; ++row) {
      const float scale = from.scales[first + row], inverse = scale != 0 ? 1 / scale : 0;
      for (std::size_t i = 0; i < 8; ++i) block.x[8 * row + i] = from.values[8 * (first + row) + i] * inverse;
    }
    block.fill();
    search.search(ones, trial);
    for (std::size_t row = 0; row < count; ++row) {
      for (std::size_t i = 0; i < vectors; ++i) out.entries[vectors * (first + row) + i] = trial.entry[vectors * row + i];
      out.negative[first + row] = trial.negative[row];
      out.down[first + row] = trial.down[vectors * row];
      for (std::size_t i = 0; i < 8; ++i) out.values[8 * (first + row) + i] = from.scales[first + row] * trial.q[8 * row + i];
    }
  }
  return true;
}

template <Ggml kType>
bool compose(const GridParts& from, std::size_t blocks, Byte* out) {
  using Type = GridType<kType>;
  constexpr std::size_t vectors = GridBlock<Type>::kVectors, groups = kBlockValues / Type::kScaled;
  for (std::size_t block = 0; block < blocks; ++block) {
    GridContents contents{};
    contents.d = from.d[block];
    std::copy_n(from.steps + block * groups, groups, contents.step);
    std::copy_n(from.entries + block * vectors, vectors, contents.entry);
    std::copy_n(from.negative + block * 32, 32, contents.negative);
    std::copy_n(from.down + block * 32, 32, contents.down);
    pack_grid<kType>(contents, out + block * kOf<kType>.bytes);
  }
  return true;
}

}  // namespace

GgmlStatus ggml_encode_grid(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  switch (type) {
    case Ggml::iq1_s:
      return encode_grid<Ggml::iq1_s>(from, out);
    case Ggml::iq1_m:
      return encode_grid<Ggml::iq1_m>(from, out);
    case Ggml::iq2_xxs:
      return encode_grid<Ggml::iq2_xxs>(from, out);
    case Ggml::iq2_xs:
      return encode_grid<Ggml::iq2_xs>(from, out);
    case Ggml::iq2_s:
      return encode_grid<Ggml::iq2_s>(from, out);
    case Ggml::iq3_xxs:
      return encode_grid<Ggml::iq3_xxs>(from, out);
    case Ggml::iq3_s:
      return encode_grid<Ggml::iq3_s>(from, out);
    default:
      return {GgmlStatus::no_encoder, 0};
  }
}

// Returns false for types without a grid, and for IQ1_S, whose shifts apply to 32 columns.
bool ggml_grid_nearest(Ggml type, const GridColumns& from, const GridCodes& out) {
  switch (type) {
    case Ggml::iq1_m:
      return nearest_columns<Ggml::iq1_m>(from, out);
    case Ggml::iq2_xxs:
      return nearest_columns<Ggml::iq2_xxs>(from, out);
    case Ggml::iq2_xs:
      return nearest_columns<Ggml::iq2_xs>(from, out);
    case Ggml::iq2_s:
      return nearest_columns<Ggml::iq2_s>(from, out);
    case Ggml::iq3_xxs:
      return nearest_columns<Ggml::iq3_xxs>(from, out);
    case Ggml::iq3_s:
      return nearest_columns<Ggml::iq3_s>(from, out);
    default:
      return false;
  }
}

bool ggml_grid_compose(Ggml type, const GridParts& from, std::size_t blocks, std::uint8_t* out) {
  switch (type) {
    case Ggml::iq1_m:
      return compose<Ggml::iq1_m>(from, blocks, out);
    case Ggml::iq2_xxs:
      return compose<Ggml::iq2_xxs>(from, blocks, out);
    case Ggml::iq2_xs:
      return compose<Ggml::iq2_xs>(from, blocks, out);
    case Ggml::iq2_s:
      return compose<Ggml::iq2_s>(from, blocks, out);
    case Ggml::iq3_xxs:
      return compose<Ggml::iq3_xxs>(from, blocks, out);
    case Ggml::iq3_s:
      return compose<Ggml::iq3_s>(from, blocks, out);
    default:
      return false;
  }
}

}  // namespace ingot::INGOT_ISA
