#include "core/symbols.h"

#include <vector>

#include "bind/arrays.h"
#include "bind/scratch.h"
#include "core/dispatch.h"

namespace {

using ingot::BitMove;
using ingot::BitSide;
using ingot::SymbolShape;

// Checks that `size` bytes are whole units, and that there is one context below `count` for each, or none.
SymbolShape shape_of(std::size_t size, std::size_t unit, const InBytes& contexts, std::size_t count, bool pairs) {
  require(unit >= 1 && size % unit == 0 && size >= 1 && size <= ingot::kSymbolsMost, "expected 1 to 2^20 symbols in units");
  require(count >= 1 && count <= ingot::kContextsMost, "expected 1 to 8 contexts");
  require(count == 1 ? contexts.size() == 0 : contexts.size() == size / unit, "expected a context for every unit");
  std::uint8_t largest = 0;
  for (std::size_t u = 0; u < contexts.size(); ++u) largest = contexts.data()[u] > largest ? contexts.data()[u] : largest;
  require(largest < count, "expected contexts below their number");
  return {size / unit, unit, count == 1 ? nullptr : contexts.data(), count, pairs};
}

std::size_t encode(const InBytes& symbols, std::size_t unit, const InBytes& contexts, std::size_t count, bool pairs,
                   const OutBytes& out) {
  const SymbolShape shape = shape_of(symbols.size(), unit, contexts, count, pairs);
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::symbols_scratch(shape.size()));
  return INGOT_KERNEL(symbols_encode)(symbols.data(), shape, out.data(), out.size(), scratch.data());
}

int decode(const InBytes& data, std::size_t unit, const InBytes& contexts, std::size_t count, bool pairs, const OutBytes& out) {
  const SymbolShape shape = shape_of(out.size(), unit, contexts, count, pairs);
  nb::gil_scoped_release release;
  const ingot::bind::Scratch scratch(ingot::symbols_scratch(shape.size()));
  return static_cast<int>(INGOT_KERNEL(symbols_decode)(data.data(), data.size(), shape, out.data(), scratch.data()));
}

// Checks that the field of the last record ends within `size` bytes.
void require_within(std::size_t start, std::size_t stride, std::size_t records, std::size_t bytes, std::size_t size) {
  require(start <= size && stride <= size && bytes <= size, "expected fields within the arrays");
  require(records <= 1 || stride <= (size - start) / (records - 1), "expected fields within the arrays");
  require(bytes <= size - start - stride * (records - 1), "expected fields within the arrays");
}

void move_bits(const InBytes& in, const OutBytes& out, std::size_t records, const In<std::int64_t>& fields) {
  constexpr std::size_t columns = 9;
  require(fields.size() % columns == 0, "expected nine numbers for each field");
  std::vector<BitMove> moves;
  for (const std::int64_t* f = fields.data(); records && f < fields.data() + fields.size(); f += columns) {
    for (std::size_t k = 0; k < columns; ++k) require(f[k] >= 0, "expected no negative number");
    require(f[2] < 8 && f[5] < 8 && f[6] >= 1 && f[6] <= 8 && f[8] <= 2, "expected shifts below 8 and 1 to 8 bits");
    require(f[2] + f[6] <= 8 && f[5] + f[6] <= 8 && (f[8] == 0 || f[6] == 1), "expected fields within bytes");
    const auto number = [f](std::size_t k) { return static_cast<std::size_t>(f[k]); };
    const BitSide bits = static_cast<BitSide>(f[8]);
    const std::size_t count = number(7), packed = (count + 7) / 8;
    require_within(number(0), number(1), records, bits == BitSide::source ? packed : count, in.size());
    require_within(number(3), number(4), records, bits == BitSide::target ? packed : count, out.size());
    moves.push_back({number(0), number(1), number(3), number(4), count, static_cast<std::uint8_t>(f[2]),
                     static_cast<std::uint8_t>(f[5]), static_cast<std::uint8_t>((1 << f[6]) - 1), bits});
  }
  nb::gil_scoped_release release;
  INGOT_KERNEL(move_bits)(in.data(), out.data(), records, moves.data(), moves.size());
}

}  // namespace

void bind_symbols(nb::module_& m) {
  define(m, "symbols_encode", &encode, nb::arg("symbols"), nb::arg("unit"), nb::arg("contexts"), nb::arg("count"), nb::arg("pairs"),
        nb::arg("out"), "Encode bytes with a table for each context; returns the bytes written, 0 if out is too small.");
  define(m, "symbols_decode", &decode, nb::arg("data"), nb::arg("unit"), nb::arg("contexts"), nb::arg("count"), nb::arg("pairs"),
        nb::arg("out"), "Decode bytes. Returns 0, or a reason: 2 table, 3 stream.");
  define(m, "move_bits", &move_bits, nb::arg("source"), nb::arg("target"), nb::arg("records"), nb::arg("fields"),
        "Copy bit fields of records into a target of zeros.");
}
