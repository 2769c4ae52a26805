// Decodes bit streams through a trellis to scale * value (core/trellis.h): a window of each column's stream is looked
// up; one product in f32, then one rounding to the target.
#include "kernels/gcc_headers.h"
#include "core/trellis.h"

#include <algorithm>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/tiles.h"
#include "kernels/trellis_windows.h"

namespace ingot::INGOT_ISA {
namespace {

// Columns from `first` to `first` + `all` of a row; `scales` begins with that of the first column's group.
template <Dtype kDtype>
void decode_row(const TrellisBand& band, const float* values, const float* scales, std::size_t row, std::size_t first,
                std::size_t all, TypeOf<kDtype>* out) {
  alignas(64) std::uint16_t windows[kWindows];
  alignas(64) float result[kWindows];
  const RowWindows from(band, row);
  for (std::size_t start = 0; start < all; start += kWindows) {
    const std::size_t count = std::min(kWindows, all - start);
    from.read(first + start, count, windows);
    look_up(values, windows, count, result);
    for (std::size_t done = 0; done < count;) {
      const std::size_t index = first + start + done, some = std::min(count - done, band.group - index % band.group);
      const float scale = scales[index / band.group - first / band.group];
      for (std::size_t j = done; j < done + some; ++j) result[j] = scale * result[j];
      done += some;
    }
    store_block<kDtype>(result, count, out + start);
  }
}

template <Dtype kDtype>
void decode(const TrellisBand& band, const float* values, const float* scales, std::size_t first, std::size_t count, void* out) {
  const std::size_t groups = band.cols / band.group;
  auto* to = static_cast<TypeOf<kDtype>*>(out);
  for (std::size_t i = 0; i < count; ++i)
    decode_row<kDtype>(band, values, scales + i * groups, first + i, 0, band.cols, to + i * band.cols);
}

template <Dtype kDtype>
void decode_tile(const TrellisMatrix& matrix, const Tile& tile) {
  float scales[kTileCols];
  const std::size_t groups = matrix.cols / matrix.group, from = tile.first / matrix.group;
  const std::size_t to = (tile.first + tile.cols - 1) / matrix.group + 1;
  for (std::size_t i = 0; i < tile.rows; ++i) {
    const std::size_t row = tile.row + i, start = row / matrix.band * matrix.band,
                      height = std::min(matrix.band, matrix.rows - start);
    const std::size_t positions = matrix.band * static_cast<std::size_t>(matrix.bits) / 16;  // of a complete band
    const TrellisBand band{height, matrix.cols, matrix.group, matrix.bits,
                           matrix.words + start / matrix.band * positions * matrix.cols * 2};
    load_floats_of(matrix.scales, matrix.scale_type, row * groups + from, to - from, scales);
    decode_row<kDtype>(band, matrix.values, scales, row - start, tile.first, tile.cols,
                       static_cast<TypeOf<kDtype>*>(tile.out) + i * tile.stride);
  }
}

}  // namespace

void trellis_decode(const TrellisBand& band, const float* values, const float* scales, std::size_t first, std::size_t count,
                    void* out, Dtype type) {
  switch (type) {
    case Dtype::f32:
      return decode<Dtype::f32>(band, values, scales, first, count, out);
    case Dtype::f16:
      return decode<Dtype::f16>(band, values, scales, first, count, out);
    case Dtype::bf16:
      return decode<Dtype::bf16>(band, values, scales, first, count, out);
    case Dtype::f64:
      return;
  }
}

void trellis_tile(const void* packed_matrix, const Tile& tile) {
  const auto& matrix = *static_cast<const TrellisMatrix*>(packed_matrix);
  switch (tile.type) {
    case Dtype::f32:
      return decode_tile<Dtype::f32>(matrix, tile);
    case Dtype::f16:
      return decode_tile<Dtype::f16>(matrix, tile);
    case Dtype::bf16:
      return decode_tile<Dtype::bf16>(matrix, tile);
    case Dtype::f64:
      return;
  }
}

}  // namespace ingot::INGOT_ISA
