// Decodes float32 differences to elements of two or four bytes. The caller has prepared their bits: sixteen values for
// a 4-bit code, a scale per row, values at positions.
#include "kernels/kernels.h"
#include "kernels/wdelta_codes.h"

namespace ingot::INGOT_ISA {
namespace {

template <class T>
void write_entries(const Placed& entries, T* out) {
  const T* values = static_cast<const T*>(entries.values);
  for (std::size_t i = 0; i < entries.count; ++i) out[entries.positions[i]] = values[i];
}

template <class T>
void int4(const std::uint8_t* packed, std::size_t first, const T* table, const Placed& outliers, bool gaps,
          std::size_t n, T* out) {
  const Pairs<T> pairs(table);
  if (!gaps) {
    pairs.expand(packed, first, n, out);
    return write_entries(outliers, out);
  }
  const T* values = static_cast<const T*>(outliers.values);
  std::size_t index = 0;
  for (std::size_t j = 0; j < outliers.count; ++j) {
    const std::size_t end = static_cast<std::size_t>(outliers.positions[j]);
    pairs.expand(packed, first, end - index, out + index);
    first += end - index;
    out[end] = values[j];
    index = end + 1;
  }
  pairs.expand(packed, first, n - index, out + index);
}

template <class T>
void signs(const std::uint8_t* bits, std::size_t first, const T* scales, std::size_t rows, std::size_t cols, T* out) {
  for (std::size_t row = 0; row < rows; ++row)
    sign_row(bits, first + row * cols, scales[row], cols, out + row * cols);
}

}  // namespace

void int4_decode(const std::uint8_t* packed, std::size_t first, const void* table, const Placed& outliers, bool gaps,
                 std::size_t n, void* out, int width) {
  if (width == 2)
    int4(packed, first, static_cast<const std::uint16_t*>(table), outliers, gaps, n, static_cast<std::uint16_t*>(out));
  else
    int4(packed, first, static_cast<const std::uint32_t*>(table), outliers, gaps, n, static_cast<std::uint32_t*>(out));
}

void sign_decode(const std::uint8_t* bits, std::size_t first, const void* scales, std::size_t rows, std::size_t cols,
                 void* out, int width) {
  if (width == 2)
    signs(bits, first, static_cast<const std::uint16_t*>(scales), rows, cols, static_cast<std::uint16_t*>(out));
  else
    signs(bits, first, static_cast<const std::uint32_t*>(scales), rows, cols, static_cast<std::uint32_t*>(out));
}

void place_values(const Placed& entries, void* out, int width) {
  if (width == 2)
    write_entries(entries, static_cast<std::uint16_t*>(out));
  else
    write_entries(entries, static_cast<std::uint32_t*>(out));
}

std::size_t first_unordered(const std::int64_t* positions, std::size_t n, std::int64_t last, std::int64_t limit) {
  constexpr std::size_t kBlock = 256;
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t end = n - start < kBlock ? n : start + kBlock;
    bool invalid = positions[start] <= last || positions[end - 1] >= limit;
    for (std::size_t i = start + 1; i < end; ++i) invalid |= positions[i] <= positions[i - 1];
    if (invalid)
      for (std::size_t i = start; i < end; ++i) {
        if (positions[i] <= last || positions[i] >= limit) return i;
        last = positions[i];
      }
    last = positions[end - 1];
  }
  return n;
}

}  // namespace ingot::INGOT_ISA
