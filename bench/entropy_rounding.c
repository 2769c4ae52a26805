// Codes by feedback in both directions: bench/entropy_rounding.py compiles and calls this.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static double dot(const double* a, const double* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// `upper` and `outputs` are transposed: row k has the effects of earlier columns (rows) on column (row) k. `bounds` has
// `largest` sizes for each context, from which on a code is larger.
int choose_codes(size_t rows, size_t cols, const double* weights, const double* upper, const double* outputs, double step,
                 const double* bounds, size_t largest, const uint8_t* contexts, int8_t* codes) {
  double* errors = calloc(rows * cols, sizeof *errors);
  double* remaining = malloc(rows * sizeof *remaining);
  if (!errors || !remaining) return 1;
  for (size_t k = 0; k < cols; ++k)
    for (size_t i = 0; i < rows; ++i) {
      const double before = dot(errors + i * cols, upper + k * cols, k);
      const double moved = dot(remaining, outputs + i * rows, i);
      const double x = (weights[i * cols + k] - before - moved) / step, size = fabs(x);
      const double* bound = bounds + contexts[i * cols + k] * largest;
      size_t code = 0;
      while (code < largest && size >= bound[code]) ++code;
      codes[i * cols + k] = (int8_t)(x < 0 ? -(int)code : (int)code);
      errors[i * cols + k] = codes[i * cols + k] * step - weights[i * cols + k];
      remaining[i] = errors[i * cols + k] + before;
    }
  free(errors);
  free(remaining);
  return 0;
}
