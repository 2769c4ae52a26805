// A loop over the blocks of a tensor, for encoders that take one block at a time.
#pragma once
#include <algorithm>
#include <bit>

#include "kernels/floats.h"
#include "kernels/ggml_encode.h"
#include "kernels/ggml_types.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode_grid(Ggml type, const GgmlSource& from, std::uint8_t* out);
GgmlStatus ggml_encode_few_levels(Ggml type, const GgmlSource& from, std::uint8_t* out);

namespace {

template <Dtype kDtype>
void widen_block(const void* values, std::size_t first, std::size_t count, float* out) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(values) + first;
  for (std::size_t i = 0; i < count; i += 32) load_block<kDtype>(in + i, 32, out + i);
}

inline void widen_block(const GgmlSource& from, std::size_t first, std::size_t count, float* out) {
  switch (from.dtype) {
    case Dtype::f16:
      return widen_block<Dtype::f16>(from.values, first, count, out);
    case Dtype::bf16:
      return widen_block<Dtype::bf16>(from.values, first, count, out);
    case Dtype::f64:
      return widen_block<Dtype::f64>(from.values, first, count, out);
    default:
      return widen_block<Dtype::f32>(from.values, first, count, out);
  }
}

// Calls `encode(values, weights of errors, out)`, which returns false if f16 cannot hold the block's scale.
template <Ggml kType, class Encode>
GgmlStatus for_blocks(const GgmlSource& from, Byte* out, const Encode& encode) {
  constexpr std::size_t elements = kOf<kType>.elements, bytes = kOf<kType>.bytes;
  alignas(64) float x[elements], weights[elements];
  std::fill_n(weights, elements, 1.0f);
  for (std::size_t block = 0; block < from.blocks; ++block) {
    const std::size_t first = block * elements;
    widen_block(from, first, elements, x);
    for (std::size_t i = 0; i < elements; ++i)
      if ((std::bit_cast<std::uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u)
        return {GgmlStatus::non_finite, first + i};
    if (from.importance != nullptr) std::copy_n(from.importance + first % from.cols, elements, weights);
    if (!encode(x, weights, out + block * bytes)) return {GgmlStatus::scale_overflow, first};
  }
  return {GgmlStatus::ok, 0};
}

}  // namespace
}  // namespace ingot::INGOT_ISA
