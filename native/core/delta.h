// Plain data of the codec delta_exact (spec/delta_exact.md), shared by its kernels and their callers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// How bits of an element are taken. `width` is 1, 2, 4 or 8 bytes; `signed_magnitude` tells floats from integers; `shift` is
// where the bits that choose a context begin.
struct DeltaElement {
  std::size_t width;
  bool signed_magnitude;
  int shift;
};

// A run of chunks over `count` elements, cut every `chunk`. The last chunk has `last` elements, of which fewer may be here.
struct DeltaShape {
  DeltaElement element;
  std::size_t count;
  std::size_t chunk;
  std::size_t last;
};

constexpr std::size_t kDeltaMaxChunk = std::size_t{1} << 20;
constexpr std::size_t kDeltaBins = 256;      // what the bits that choose a context can say
constexpr std::size_t kDeltaContexts = 16;   // contexts of a chunk
constexpr std::size_t kDeltaSymbols = 512;   // symbols of a difference, rounded up
constexpr int kDeltaScaleBits = 11;          // frequencies of a context add up to 2^11

constexpr std::size_t kDeltaMargin = 64;  // before and after every array in scratch

// Gaps of a sparse chunk: one for each change, and one for every 255 unchanged elements.
constexpr std::size_t delta_gaps(std::size_t chunk) { return chunk + chunk / 255 + 1; }

// Room for decoding: gaps and planes of a sparse chunk, or the tables of a dense one.
constexpr std::size_t delta_apply_scratch(std::size_t width, std::size_t chunk) {
  return delta_gaps(chunk) + width * chunk + kDeltaContexts * (std::size_t{4} << kDeltaScaleBits) + 4 * kDeltaMargin;
}

// Room for encoding: differences, positions, gaps and planes, symbols twice, bins, what ANS writes, counts by bin and symbol.
constexpr std::size_t delta_encode_scratch(std::size_t width, std::size_t chunk) {
  return (2 * width + 4 + 4 + 1 + 2) * chunk + delta_gaps(chunk) + 1024 + 4 * kDeltaBins * kDeltaSymbols + 9 * kDeltaMargin;
}

}  // namespace ingot
