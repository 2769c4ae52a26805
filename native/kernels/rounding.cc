// Rounding with feedback (GPTQ, arXiv 2210.17323), and coordinate descent on the error under two factors. Sums have a
// fixed order for any width of vectors.
#include <vector>

#include "kernels/kernels.h"
#include "kernels/matrix.h"
#include "kernels/rounding_refit.h"

namespace ingot::INGOT_ISA {

void rounding_nearest(const Grid& grid, const Rounded& to, const float* values) {
  const Levels levels(grid);
  for (std::size_t row = 0; row < to.rows; ++row)
    for (std::size_t j = 0; j < to.cols; ++j) {
      const std::size_t index = row * to.groups + static_cast<std::size_t>(to.group_of[j]);
      const float scale = to.scales[index], zero = to.zeros ? to.zeros[index] : 0.0f;
      to.codes[row * to.cols + j] = levels.nearest(scale == 0 ? zero : levels.among(values[row * to.cols + j], scale, zero));
    }
}

// Columns first to last. Their targets include the errors of all columns before; the errors within the range are added
// here.
void rounding_feedback(const Grid& grid, const Rounded& to, std::size_t first, std::size_t last, const float* original,
                       float* targets, const float* factor, float* errors) {
  const Levels levels(grid);
  const std::size_t n = to.cols;
  for (std::size_t row = 0; row < to.rows; ++row) {
    float* __restrict target = targets + row * n;
    for (std::size_t j = first; j < last; ++j) {
      const std::size_t index = row * to.groups + static_cast<std::size_t>(to.group_of[j]);
      const float scale = to.scales[index], zero = to.zeros ? to.zeros[index] : 0.0f;
      const std::uint8_t code = levels.nearest(scale == 0 ? zero : levels.among(target[j], scale, zero));
      to.codes[row * n + j] = code;
      const float error = original[row * n + j] - levels.value(code, scale, zero);
      errors[row * n + j] = error;
      const float* __restrict next = factor + j * n;
      for (std::size_t k = j + 1; k < last; ++k) target[k] += error * next[k];
    }
  }
}

void rounding_descend(const Grid& grid, const Rounded& to, const Descent& down) {
  const Levels levels(grid);
  const std::size_t rows = to.rows, n = to.cols;
  std::vector<float> change(rows * n, 0.0f), slope, part, moved;  // change of D A; of a group the gradient, levels, moves
  for (std::size_t first = 0; first < n;) {
    std::size_t last = first + 1;
    while (last < n && to.group_of[last] == to.group_of[first]) ++last;
    const std::size_t size = last - first, group = static_cast<std::size_t>(to.group_of[first]);
    slope.resize(size);
    part.resize(size);
    moved.assign(rows * size, 0.0f);
    bool any = false;
    const Refit fit(grid, to, {down.inputs + first * n + first, n, size});
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t index = row * to.groups + group;
      const float diagonal = down.outputs[row * rows + row], zero = to.zeros ? to.zeros[index] : 0.0f;
      float& scale = to.scales[index];
      if (scale == 0 || !(diagonal > 0)) continue;
      float* __restrict m = slope.data();
      std::copy_n(down.gradient + row * n + first, size, m);
      for (std::size_t other = 0; other < rows; ++other) {
        const float link = down.outputs[row * rows + other];
        const float* __restrict theirs = change.data() + other * n + first;
        for (std::size_t j = 0; j < size; ++j) m[j] += link * theirs[j];
      }
      float* __restrict mine = change.data() + row * n + first;
      const auto shift = [&](std::size_t j, float by) {
        const float* __restrict input = down.inputs + (first + j) * n + first;
        moved[row * size + j] += by;
        any = true;
        for (std::size_t k = 0; k < size; ++k) {
          mine[k] += by * input[k];
          m[k] += diagonal * by * input[k];
        }
      };
      std::uint8_t* codes = to.codes + row * n + first;
      for (std::size_t j = 0; j < size; ++j) {
        const float curve = diagonal * down.inputs[(first + j) * n + first + j],
                    value = levels.value(codes[j], scale, zero);
        const std::uint8_t code = levels.nearest(levels.among(value - m[j] / curve, scale, zero));
        if (code == codes[j]) continue;
        codes[j] = code;
        shift(j, levels.value(code, scale, zero) - value);
      }
      if (!down.refit) continue;
      const Fitted now{scale, zero};
      for (std::size_t j = 0; j < size; ++j) part[j] = levels.level(codes[j]);
      const Fitted better = fit.better(now, part.data(), m, diagonal, index);
      if (better.scale == now.scale && better.zero == now.zero) continue;
      for (std::size_t j = 0; j < size; ++j)
        shift(j, levels.value(codes[j], better.scale, better.zero) - levels.value(codes[j], scale, zero));
      scale = better.scale;
      if (to.zeros != nullptr) to.zeros[index] = better.zero;
    }
    if (any) {  // the other columns of D A
      const float* input = down.inputs + first * n;
      multiply_add<float>(moved.data(), size, input, n, change.data(), n, rows, size, first, 1.0f);
      multiply_add<float>(moved.data(), size, input + last, n, change.data() + last, n, rows, size, n - last, 1.0f);
    }
    first = last;
  }
  for (std::size_t i = 0; i < rows * n; ++i) down.product[i] += change[i];
}

}  // namespace ingot::INGOT_ISA
