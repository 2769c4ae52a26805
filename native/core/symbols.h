// Plain data of the encoding ingot.packed/1 (spec/packed.md), shared by its kernels and their callers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr std::size_t kSymbolsMost = std::size_t{1} << 20;  // symbols of a stream
constexpr std::size_t kContextsMost = 8;

// Bytes that are coded as symbols: `units` units of `unit` symbols each. Each unit has a context below `context_count`,
// which selects its table; `contexts` is null if there is only one. With `pairs`, a table is the product of the tables
// of both halves of a byte.
struct SymbolShape {
  std::size_t units;
  std::size_t unit;
  const std::uint8_t* contexts;
  std::size_t context_count;
  bool pairs;

  std::size_t size() const { return units * unit; }
};

// Scratch memory for `size` symbols in either direction.
constexpr std::size_t symbols_scratch(std::size_t size) { return 4 * size + 1024; }

enum class BitSide : std::uint8_t { none = 0, source = 1, target = 2 };

// Copies a field of `count` elements of each record: bits of a byte of the source to bits of a byte of the target. On the
// side `bits`, elements are single bits of an array of bits, lowest first, instead of bytes.
struct BitMove {
  std::size_t source, source_stride;
  std::size_t target, target_stride;
  std::size_t count;
  std::uint8_t source_shift, target_shift, mask;
  BitSide bits;
};

}  // namespace ingot
