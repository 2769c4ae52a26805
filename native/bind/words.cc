#include "core/words.h"

#include "bind/arrays.h"
#include "core/dispatch.h"

namespace {

using ingot::WordMatrix;

// A window of `rows` x `cols` words in bytes, `stride` bytes from row to row, from byte `start` on.
WordMatrix window(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
                  const OutBytes& out) {
  std::size_t bytes = 0, last = 0;
  require(!__builtin_mul_overflow(rows, cols, &bytes) && !__builtin_mul_overflow(bytes, std::size_t{4}, &bytes) &&
              bytes == out.size(),
          "expected as many words out as in the window");
  if (bytes) {
    require(!__builtin_mul_overflow(rows - 1, stride, &last) && !__builtin_add_overflow(last, start, &last) &&
                !__builtin_add_overflow(last, 4 * cols, &last) && last <= in.size(),
            "expected a window within the bytes");
  }
  return {in.data() + start, stride, rows, cols};
}

void turn(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
          const OutBytes& out) {
  const WordMatrix at = window(in, start, stride, rows, cols, out);
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_turn)(at, out.data());
}

void from_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
              const OutBytes& out) {
  const WordMatrix at = window(in, start, stride, rows, cols, out);
  require(rows % 8 == 0, "expected rows in eights");
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_from_awq)(at, out.data());
}

void to_awq(const InBytes& in, std::size_t start, std::size_t stride, std::size_t rows, std::size_t cols,
            const OutBytes& out) {
  const WordMatrix at = window(in, start, stride, rows, cols, out);
  require(rows % 8 == 0, "expected rows in eights");
  nb::gil_scoped_release release;
  INGOT_KERNEL(words_to_awq)(at, out.data());
}

}  // namespace

void bind_words(nb::module_& m) {
  define(m, "words_turn", &turn, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"), nb::arg("cols"),
         nb::arg("out"), "Transpose a window of words of 32 bits: out[col, row].");
  define(m, "words_from_awq", &from_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"),
         "AWQ's words [inputs, outputs / 8] as rows of outputs, first input in the low bits: out[8 * cols, rows / 8].");
  define(m, "words_to_awq", &to_awq, nb::arg("in"), nb::arg("start"), nb::arg("stride"), nb::arg("rows"),
         nb::arg("cols"), nb::arg("out"),
         "Rows of outputs, words [outputs, inputs / 8], as AWQ's words: out[8 * cols, rows / 8].");
}
