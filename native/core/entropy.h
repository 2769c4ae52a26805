// Plain data of the codec float_entropy (spec/float_entropy.md), shared by its kernels and their callers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

// The result of decoding a chunk's bytes.
enum class EntropyStatus { ok = 0, chunk = 1, table = 2, stream = 3 };

// A run of chunks: `count` elements of `width` bytes (1, 2, 4 or 8), cut every `chunk` elements.
struct EntropyShape {
  std::size_t width;
  std::size_t count;
  std::size_t chunk;
};

// Options of the encoder. `joint` allows symbols of the exponent and two bits of the mantissa, for types with an
// exponent of 8 bits.
struct EntropyChoice {
  bool max;
  bool joint;
};

constexpr std::size_t kEntropyMaxChunk = std::size_t{1} << 20;

// Scratch memory that both directions need for chunks of at most `chunk` elements: planes, output of ANS, joint
// symbols, margins.
constexpr std::size_t entropy_scratch(std::size_t width, std::size_t chunk) { return (width + 4) * chunk + 1024; }

}  // namespace ingot
