// Plain data of the codec delta_exact (spec/delta_exact.md), shared by its kernels and their callers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// The interpretation of an element's bits. `width` is 1, 2, 4 or 8 bytes; `signed_magnitude` distinguishes floats from
// integers; `shift` is the lowest of the bits that select a context.
struct DeltaElement {
  std::size_t width;
  bool signed_magnitude;
  int shift;
};

// A run of chunks over `count` elements, `chunk` elements each. The last chunk has `last` elements, and may be present
// only in part.
struct DeltaShape {
  DeltaElement element;
  std::size_t count;
  std::size_t chunk;
  std::size_t last;
};

constexpr std::size_t kDeltaMaxChunk = std::size_t{1} << 20;
constexpr std::size_t kDeltaBins = 256;      // number of values of the bits that select a context
constexpr std::size_t kDeltaContexts = 16;   // limit on the contexts of a chunk
constexpr std::size_t kDeltaSymbols = 512;   // limit on the symbols of a difference
constexpr int kDeltaScaleBits = 11;          // the frequencies of a context sum to 2^11

constexpr std::size_t kDeltaMargin = 64;  // margin before and after every array in scratch memory

// Gaps of a sparse chunk: one for each change, and one for every 255 unchanged elements.
constexpr std::size_t delta_gaps(std::size_t chunk) { return chunk + chunk / 255 + 1; }

// Scratch memory for decoding: gaps and planes of a sparse chunk, or the tables of a dense chunk.
constexpr std::size_t delta_apply_scratch(std::size_t width, std::size_t chunk) {
  return delta_gaps(chunk) + width * chunk + kDeltaContexts * (std::size_t{4} << kDeltaScaleBits) + 4 * kDeltaMargin;
}

// Scratch memory for encoding: differences, positions, gaps and planes, two copies of the symbols, bins, output of ANS,
// counts by bin and symbol.
constexpr std::size_t delta_encode_scratch(std::size_t width, std::size_t chunk) {
  return (2 * width + 4 + 4 + 1 + 2) * chunk + delta_gaps(chunk) + 1024 + 4 * kDeltaBins * kDeltaSymbols + 9 * kDeltaMargin;
}

}  // namespace ingot
