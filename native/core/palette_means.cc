#include "core/palette_means.h"

#include <cmath>

namespace ingot {

PaletteError palette_means(const PaletteTotals& state, const float* centroids, double squares, std::size_t n,
                           float* after) {
  const std::size_t numbers = state.k * state.size, row = numbers + state.k;
  const auto total = [&](std::size_t index) {
    double sum = 0;
    for (std::size_t i = 0; i < state.rows; ++i) sum += state.totals[i * row + index];
    return sum;
  };
  double error = squares;
  for (std::size_t c = 0; c < state.k; ++c) {
    const double count = total(numbers + c);
    for (std::size_t index = c * state.size; index < (c + 1) * state.size; ++index) {
      const double sum = total(index), place = static_cast<double>(centroids[index]);
      error += place * place * count - 2 * place * sum;
      after[index] = count > 0 ? static_cast<float>(sum / count) : centroids[index];
    }
  }
  const double room = 1e-6 * std::abs(error) + 1e-11 * squares + 1e-30 * static_cast<double>(n);
  return {error - room, error + room};
}

}  // namespace ingot
