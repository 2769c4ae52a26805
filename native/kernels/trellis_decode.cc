// Bit streams through a trellis to scale * value (core/trellis.h): a window of each column's stream is looked up; one
// product in f32, then one rounding to the target.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own AVX-512 headers (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "core/trellis.h"

#include <algorithm>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/trellis_windows.h"

namespace ingot::INGOT_ISA {
namespace {

template <Dtype kDtype>
void decode_row(const TrellisBand& band, const float* values, const float* scales, std::size_t row, TypeOf<kDtype>* out) {
  alignas(64) std::uint16_t windows[kWindows];
  alignas(64) float made[kWindows];
  const RowWindows from(band, row);
  for (std::size_t start = 0; start < band.cols; start += kWindows) {
    const std::size_t count = std::min(kWindows, band.cols - start);
    from.read(start, count, windows);
    look_up(values, windows, count, made);
    for (std::size_t done = 0; done < count;) {
      const std::size_t at = start + done, some = std::min(count - done, band.group - at % band.group);
      const float scale = scales[at / band.group];
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
    decode_row<kDtype>(band, values, scales + i * groups, first + i, to + i * band.cols);
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

}  // namespace ingot::INGOT_ISA
