#include "core/kmeans1d.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "core/dispatch.h"
#include "core/palette.h"

namespace ingot {
namespace {

constexpr std::size_t kCoarse = 1024;  // points of the first, coarse search for the penalty
constexpr int kTries = 128;

// Finds the cheapest partition into any number of runs if each run costs `penalty`: native/kernels/palette_runs.cc.
class Penalized {
 public:
  Penalized(const Prefix& prefix, std::size_t k)
      : prefix_(prefix), n_(prefix.points()), k_(k), best_(std::make_unique_for_overwrite<double[]>(n_ + 1)),
        from_(std::make_unique_for_overwrite<std::uint32_t[]>(n_ + 1)), queue_(std::make_unique_for_overwrite<PaletteStart[]>(n_)) {}

  // Returns the number of runs.
  std::size_t solve(double penalty) {
    INGOT_KERNEL(palette_runs)
    ({prefix_.weight.data(), prefix_.sum.data(), n_, best_.get(), from_.get(), queue_.get()}, penalty, k_);
    std::size_t runs = 0;
    for (std::size_t r = n_; r > 0; r = from_[r]) ++runs;
    return runs;
  }

  std::vector<std::size_t> bounds() const {
    std::vector<std::size_t> counts;
    for (std::size_t r = n_; r > 0; r = from_[r]) counts.push_back(r);
    counts.push_back(0);
    std::reverse(counts.begin(), counts.end());
    return counts;
  }

 private:
  const Prefix& prefix_;
  std::size_t n_, k_;
  std::unique_ptr<double[]> best_;
  std::unique_ptr<std::uint32_t[]> from_;
  std::unique_ptr<PaletteStart[]> queue_;
};

// Searches for a penalty whose partition has exactly `k` runs. The number of runs falls with the penalty, about as its
// third root (Panter, Dite: "Quantization distortion in pulse-count modulation", 1951), so few steps are needed.
bool search(Penalized& problem, std::size_t k, double& penalty) {
  double low = 0, high = std::numeric_limits<double>::infinity();  // too many runs, too few
  for (int i = 0; i < kTries; ++i) {
    const std::size_t result = problem.solve(penalty);
    if (result == k) return true;
    (result > k ? low : high) = penalty;
    double next = penalty * std::pow(static_cast<double>(result) / static_cast<double>(k), 3.0);
    const bool bounded = low > 0 && std::isfinite(high);
    if (bounded && (i % 3 == 2 || next <= low || next >= high)) next = std::sqrt(low) * std::sqrt(high);
    if (!(next > low && next < high) || !std::isfinite(next)) return false;
    penalty = next;
  }
  return false;
}

Prefix coarser(const Prefix& prefix, std::size_t step) {
  Prefix out;
  const std::size_t n = prefix.points();
  out.weight.reserve(n / step + 2);
  out.sum.reserve(n / step + 2);
  for (std::size_t i = 0; i < n; i += step) {
    out.weight.push_back(prefix.weight[i]);
    out.sum.push_back(prefix.sum[i]);
  }
  out.weight.push_back(prefix.weight[n]);
  out.sum.push_back(prefix.sum[n]);
  return out;
}

// Finds the best beginning for each end by divide and conquer; the best beginning increases with the end.
struct Layer {
  const Prefix& sums;
  const std::vector<double>& last;
  std::vector<double>& best;
  std::uint16_t* from;

  void fill(std::size_t first, std::size_t end, std::size_t low, std::size_t high) const {
    while (first < end) {
      const std::size_t r = first + (end - first) / 2;
      double smallest = std::numeric_limits<double>::infinity();
      std::size_t chosen = low;
      for (std::size_t l = low; l <= std::min(high, r - 1); ++l) {
        const double value = last[l] + sums.cost(l, r);
        if (value < smallest) {
          smallest = value;
          chosen = l;
        }
      }
      best[r] = smallest;
      from[r] = static_cast<std::uint16_t>(chosen);
      fill(first, r, low, chosen);
      first = r + 1;
      low = chosen;
    }
  }
};

}  // namespace

std::vector<std::size_t> kmeans1d_layers(const Prefix& sums, std::size_t k) {
  const std::size_t n = sums.points();
  std::vector<double> last(n + 1, std::numeric_limits<double>::infinity()), best(n + 1);
  std::vector<std::uint16_t> from(k * (n + 1));
  last[0] = 0;
  for (std::size_t j = 0; j < k; ++j) {
    std::fill(best.begin(), best.end(), std::numeric_limits<double>::infinity());
    Layer{sums, last, best, from.data() + j * (n + 1)}.fill(j + 1, n - (k - 1 - j) + 1, j, n);
    last.swap(best);
  }
  std::vector<std::size_t> bounds(k + 1);
  bounds[k] = n;
  for (std::size_t j = k; j > 0; --j) bounds[j - 1] = from[(j - 1) * (n + 1) + bounds[j]];
  return bounds;
}

std::vector<std::size_t> kmeans1d(const Prefix& sums, std::size_t k) {
  const std::size_t n = sums.points();
  if (k == 1) return {0, n};
  if (k >= n) {
    std::vector<std::size_t> bounds(n + 1);
    for (std::size_t i = 0; i <= n; ++i) bounds[i] = i;
    return bounds;
  }
  // The error of one run is unknown without squares; the range of the points serves as a first estimate.
  double penalty = 0;
  const double mean = sums.sum[n] / sums.weight[n];
  for (std::size_t i = 0; i < n; ++i) {
    const double w = sums.weight[i + 1] - sums.weight[i], away = (sums.sum[i + 1] - sums.sum[i]) / w - mean;
    penalty += w * away * away;
  }
  penalty *= 2 / (static_cast<double>(k) * static_cast<double>(k) * static_cast<double>(k));
  if (!(penalty > 0) || !std::isfinite(penalty)) return kmeans1d_layers(sums, k);
  const std::size_t step = n / std::max(kCoarse, 8 * k);
  if (step > 1) {
    const Prefix rough = coarser(sums, step);
    Penalized problem(rough, k);
    double guess = penalty;
    if (search(problem, k, guess)) penalty = guess;
  }
  Penalized problem(sums, k);
  return search(problem, k, penalty) ? problem.bounds() : kmeans1d_layers(sums, k);
}

}  // namespace ingot
