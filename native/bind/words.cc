#include "core/words.h"

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using ingot::WordMatrix;
using ingot::WordWindow;

// Whether `rows` x `cols` words, `stride` bytes from row to row, lie within `size` bytes from byte `start` on.
bool within(std::size_t size, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols) {
  std::size_t words = 0, last = 0, width = 0;
  if (__builtin_mul_overflow(rows, cols, &words)) return false;
  if (!words) return true;
  return !__builtin_mul_overflow(cols, std::size_t{4}, &width) && !__builtin_mul_overflow(rows - 1, stride, &last) &&
         !__builtin_add_overflow(last, start, &last) && !__builtin_add_overflow(last, width, &last) && last <= size;
}

// A window of `rows` x `cols` words in bytes, `stride` bytes from row to row, from byte `start` on.
WordMatrix window(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols) {
  require(within(in.size(), start, stride, rows, cols), "expected a window within the bytes");
  return {in.data() + start, stride, rows, cols};
}

// Another one, to write to, whose rows do not overlap.
WordWindow target(const OutBytes& out, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols) {
  require(within(out.size(), start, stride, rows, cols) && (rows < 2 || stride / 4 >= cols),
          "expected as many words out as in the window");
  return {out.data() + start, stride};
}

void turn(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
          const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix at = window(in, start, stride, rows, cols);
  const WordWindow to = target(out, out_start, out_stride, cols, rows);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_turn)(at, to);
}

// Where eight times as many rows of an eighth of the words go.
WordWindow by_codes(const OutBytes& out, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols) {
  require(rows % 8 == 0, "expected rows in eights");
  std::size_t outputs = 0;
  require(!__builtin_mul_overflow(cols, std::size_t{8}, &outputs), "expected as many words out as in the window");
  return target(out, start, stride, outputs, rows / 8);
}

void from_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
              const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix at = window(in, start, stride, rows, cols);
  const WordWindow to = by_codes(out, out_start, out_stride, rows, cols);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_from_awq)(at, to);
}

void to_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
            const OutBytes& out, std::size_t out_start, std::size_t out_stride) {
  const WordMatrix at = window(in, start, stride, rows, cols);
  const WordWindow to = by_codes(out, out_start, out_stride, rows, cols);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_to_awq)(at, to);
}

}  // namespace

void bind_words(nb::module_& m) {
  define(m, "words_turn", &turn, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"), nb::arg("cols"),
         nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "Transpose a window of words of 32 bits: out[col, row].");
  define(m, "words_from_awq", &from_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "AWQ's words [inputs, outputs / 8] as rows of outputs, first input in the low bits: out[8 * cols, rows / 8].");
  define(m, "words_to_awq", &to_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"), nb::arg("out_start"), nb::arg("out_stride"),
         "Rows of outputs, words [outputs, inputs / 8], as AWQ's words: out[8 * cols, rows / 8].");
}
