// Definitions that decoders, encoders and unpackers of ggml's blocks share: types as template arguments, and the positions
// of a block's scales (spec/gguf.md).
#pragma once
#include <iterator>
#include <utility>

#include "core/ggml.h"
#include "kernels/floats.h"

namespace ingot::INGOT_ISA {
namespace {

using Byte = std::uint8_t;

template <Ggml kType>
constexpr GgmlBlock kOf = kGgmlBlocks[static_cast<int>(kType)];

// Calls `run.template operator()<type>()`; does nothing if the constraints of `run` exclude the type.
template <class Run>
void with_type(Ggml type, const Run& run) {
  const auto first = [&]<Ggml kType>() {
    if constexpr (requires { run.template operator()<kType>(); }) {
      if (type == kType) run.template operator()<kType>();
    }
  };
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    (first.template operator()<static_cast<Ggml>(kIndex)>(), ...);
  }(std::make_index_sequence<std::size(kGgmlBlocks)>{});
}

inline std::uint32_t u16_at(const Byte* bytes) { return bytes[0] | static_cast<std::uint32_t>(bytes[1]) << 8; }
// The number of 16 bits as a single instruction, for single numbers (loops use `f16_to_f32`).
inline float half(std::uint32_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<std::uint16_t>(bits));
#else
  return f16_to_f32(static_cast<std::uint16_t>(bits));
#endif
}
inline float f16_at(const Byte* bytes) { return half(u16_at(bytes)); }
inline int nibble(const Byte* bytes, int index) { return bytes[index / 2] >> 4 * (index % 2) & 15; }

// The integers of the scale and the minimum of group `k` of a block at `b`.
inline int q3_k_scale(const Byte* b, int k) {
  const int low = b[96 + k % 8] >> 4 * (k / 8) & 15, high = b[104 + k % 4] >> 2 * (k / 4) & 3;
  return (low | high << 4) - 32;
}

inline int iq4_xs_scale(const Byte* b, int k) {
  return (nibble(b + 4, k) | static_cast<int>(u16_at(b + 2) >> 2 * k & 3) << 4) - 32;
}

// Reads the 6-bit scale and minimum of group k of Q4_K and Q5_K, from 12 bytes.
inline void six_bits(const Byte* b, int k, int& scale, int& minimum) {
  const Byte* s = b + 4;
  scale = k < 4 ? s[k] & 63 : (s[k + 4] & 15) | s[k - 4] >> 6 << 4;
  minimum = k < 4 ? s[k + 4] & 63 : s[k + 4] >> 4 | s[k] >> 6 << 4;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
