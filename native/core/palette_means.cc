#include "core/palette_means.h"

#include <cmath>

namespace ingot {

PaletteError palette_means(const PaletteTotals& found, const float* centroids, double squares, std::size_t n, float* after) {
  const std::size_t numbers = found.k * found.size, row = numbers + found.k;
  const auto total = [&](std::size_t at) {
    double sum = 0;
    for (std::size_t i = 0; i < found.rows; ++i) sum += found.totals[i * row + at];
    return sum;
  };
  double error = squares;
  for (std::size_t c = 0; c < found.k; ++c) {
    const double count = total(numbers + c);
    for (std::size_t at = c * found.size; at < (c + 1) * found.size; ++at) {
      const double sum = total(at), place = static_cast<double>(centroids[at]);
      error += place * place * count - 2 * place * sum;
      after[at] = count > 0 ? static_cast<float>(sum / count) : centroids[at];
    }
  }
  const double room = 1e-6 * std::abs(error) + 1e-11 * squares + 1e-30 * static_cast<double>(n);
  return {error - room, error + room};
}

}  // namespace ingot
