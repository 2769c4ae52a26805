#include "core/words.h"

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "kernels/turns.h"

namespace {

using ingot::WordMatrix;
using ingot::WordWindow;

// Returns whether `rows` x `cols` elements of `each` bytes, with `stride` bytes between rows, are within `size` bytes
// from byte `start` on.
bool within(std::size_t size, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
            std::size_t unit = 4) {
  std::size_t words = 0, last = 0, width = 0;
  if (__builtin_mul_overflow(rows, cols, &words)) return false;
  if (!words) return true;
  return !__builtin_mul_overflow(cols, unit, &width) && !__builtin_mul_overflow(rows - 1, stride, &last) &&
         !__builtin_add_overflow(last, start, &last) && !__builtin_add_overflow(last, width, &last) && last <= size;
}

// A window of `rows` x `cols` elements in bytes, `stride` bytes from row to row, from byte `start` on.
WordMatrix window(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
                  std::size_t width = 4) {
  require(within(in.size(), start, stride, rows, cols, width), "expected a window within the bytes");
  return {in.data() + start, stride, rows, cols};
}

// The same for output; its rows do not overlap.
WordWindow target(const OutBytes& out, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
                  std::size_t width = 4) {
  require(within(out.size(), start, stride, rows, cols, width) && (rows < 2 || stride / width >= cols),
          "expected as many words out as in the window");
  return {out.data() + start, stride};
}

void turn(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
          const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix matrix = window(in, start, stride, rows, cols);
  const WordWindow to = target(out, out_start, out_stride, cols, rows);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_turn)(matrix, to);
}

// A matrix of elements of 1 or 2 bytes.
void turn_short(const InBytes& in, std::size_t width, std::size_t rows, std::size_t cols, const OutBytes& out,
                std::size_t out_start, std::size_t out_stride) {
  require(width == 1 || width == 2, "expected elements of 1 or 2 bytes");
  std::size_t stride = 0;
  require(!__builtin_mul_overflow(cols, width, &stride), "expected a window within the bytes");
  const WordMatrix matrix = window(in, 0, stride, rows, cols, width);
  const WordWindow to = target(out, out_start, out_stride, cols, rows, width);
  nb::gil_scoped_release release;
  if (width == 2)
    INGOT_KERNEL(halves_turn)(matrix, to);
  else
    INGOT_KERNEL(bytes_turn)(matrix, to);
}

// Converts lines of codes from one packing to the other, both without gaps.
void turn_lines(const InBytes& in, std::size_t lines, std::size_t cols, bool to_awq, const OutBytes& out) {
  const std::size_t eights = to_awq ? cols : lines;
  require(eights % 8 == 0, "expected words in eights");
  std::size_t stride = 0;
  require(!__builtin_mul_overflow(cols, std::size_t{4}, &stride), "expected a window within the bytes");
  const WordMatrix matrix = window(in, 0, stride, lines, cols);
  require(out.size() / 4 / (cols ? cols : 1) >= lines, "expected as many words out as in the window");
  nb::gil_scoped_release release;
  if (to_awq)
    INGOT_KERNEL(lines_to_awq)(matrix, out.data());
  else
    INGOT_KERNEL(lines_from_awq)(matrix, out.data());
}

// The output window of words, which has eight times as many rows; each row has an eighth of a word.
WordWindow by_codes(const OutBytes& out, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols) {
  require(rows % 8 == 0, "expected rows in eights");
  std::size_t outputs = 0;
  require(!__builtin_mul_overflow(cols, std::size_t{8}, &outputs), "expected as many words out as in the window");
  return target(out, start, stride, outputs, rows / 8);
}

void from_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
              const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix matrix = window(in, start, stride, rows, cols);
  const WordWindow to = by_codes(out, out_start, out_stride, rows, cols);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_from_awq)(matrix, to);
}

void to_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
            const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix matrix = window(in, start, stride, rows, cols);
  const WordWindow to = by_codes(out, out_start, out_stride, rows, cols);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_to_awq)(matrix, to);
}

}  // namespace

void bind_words(nb::module_& m) {
  define(m, "words_turn", &turn, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"), nb::arg("cols"),
         nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "Transpose a window of words of 32 bits: out[col, row].");
  define(m, "short_turn", &turn_short, nb::arg("in"), nb::arg("each"), nb::arg("rows"), nb::arg("cols"), nb::arg("out"),
         nb::arg("out_start"), nb::arg("out_stride"),
         "Transpose a matrix of elements of `each` bytes, 1 or 2, into a window: out[col, row].");
  define(m, "lines_turn", &turn_lines, nb::arg("in"), nb::arg("lines"), nb::arg("cols"), nb::arg("to_awq"), nb::arg("out"),
         "GPTQ's lines of codes of 4 bits, [inputs / 8, outputs], as AWQ's, [inputs, outputs / 8], or those as these.");
  define(m, "words_from_awq", &from_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "AWQ's words [inputs, outputs / 8] as rows of outputs, first input in the low bits: out[8 * cols, rows / 8].");
  define(m, "words_to_awq", &to_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "Rows of outputs, words [outputs, inputs / 8], as AWQ's words: out[8 * cols, rows / 8].");
}
