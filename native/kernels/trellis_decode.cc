// Bit streams through a trellis to scale * value (core/trellis.h): a window of each column's stream is looked up; one
// product in f32, then one rounding to the target.
#include "kernels/gcc_headers.h"
#include "core/trellis.h"

#include <algorithm>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/tiles.h"
#include "kernels/trellis_windows.h"

namespace ingot::INGOT_ISA {
namespace {

// Columns `first` to `first` + `all` of a row; `scales` begins with that of the first one's group.
template <Dtype kDtype>
void decode_row(const TrellisBand& band, const float* values, const float* scales, std::size_t row, std::size_t first,
                std::size_t all, TypeOf<kDtype>* out) {
  alignas(64) std::uint16_t windows[kWindows];
  alignas(64) float made[kWindows];
  const RowWindows from(band, row);
  for (std::size_t start = 0; start < all; start += kWindows) {
    const std::size_t count = std::min(kWindows, all - start);
    from.read(first + start, count, windows);
    look_up(values, windows, count, made);
    for (std::size_t done = 0; done < count;) {
      const std::size_t at = first + start + done, some = std::min(count - done, band.group - at % band.group);
      const float scale = scales[at / band.group - first / band.group];
      for (std::size_t j = done; j < done + some; ++j) made[j] = scale * made[j];
      done += some;
    }
    store_block<kDtype>(made, count, out + start);
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
void decode_tile(const TrellisMatrix& held, const Tile& tile) {
  float scales[kTileCols];
  const std::size_t groups = held.cols / held.group, from = tile.first / held.group;
  const std::size_t to = (tile.first + tile.cols - 1) / held.group + 1;
  for (std::size_t i = 0; i < tile.rows; ++i) {
    const std::size_t row = tile.row + i, start = row / held.band * held.band, height = std::min(held.band, held.rows - start);
    const std::size_t places = held.band * static_cast<std::size_t>(held.bits) / 16;  // of a whole band
    const TrellisBand band{height, held.cols, held.group, held.bits, held.words + start / held.band * places * held.cols * 2};
    load_floats_of(held.scales, held.scale_type, row * groups + from, to - from, scales);
    decode_row<kDtype>(band, held.values, scales, row - start, tile.first, tile.cols,
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

void trellis_tile(const void* held, const Tile& tile) {
  const auto& matrix = *static_cast<const TrellisMatrix*>(held);
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
