#include "core/kmeans1d.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ingot {
namespace {

constexpr std::size_t kCoarse = 1024;  // points of the first, rough search for the penalty
constexpr int kTries = 128;

// Least cost of a partition into any number of runs where each run costs `penalty` more. The squared error has the
// quadrangle inequality, so that the best beginning of the last run never moves back: a queue of candidates, each with
// the point from which on it is best, finds all of them in about O(n) (Galil, Park: "Dynamic programming with convexity,
// concavity and sparsity", 1992, section 4).
class Penalized {
 public:
  explicit Penalized(const Prefix& at)
      : at_(at), n_(at.points()), best_(n_ + 1), from_(n_ + 1), runs_(n_ + 1), queue_(n_ + 1) {}

  // Returns the number of runs.
  std::size_t solve(double penalty) {
    best_[0] = 0;
    runs_[0] = 0;
    std::size_t front = 0, back = 0;
    queue_[0] = {0, 1};
    for (std::size_t r = 1; r <= n_; ++r) {
      while (front < back && queue_[front + 1].start <= r) ++front;
      const std::uint32_t l = queue_[front].from;
      best_[r] = value(l, r) + penalty;
      from_[r] = l;
      runs_[r] = runs_[l] + 1;
      if (r < n_) insert(static_cast<std::uint32_t>(r), front, back);
    }
    return runs_[n_];
  }

  std::vector<std::size_t> bounds() const {
    std::vector<std::size_t> found(runs_[n_] + 1);
    std::size_t at = n_;
    for (std::size_t i = runs_[n_]; i > 0; --i) {
      found[i] = at;
      at = from_[at];
    }
    found[0] = 0;
    return found;
  }

 private:
  struct Candidate {
    std::uint32_t from, start;
  };

  double value(std::size_t l, std::size_t r) const { return best_[l] + at_.cost(l, r); }
  bool beats(std::uint32_t newer, std::uint32_t older, std::size_t r) const { return value(newer, r) < value(older, r); }

  void insert(std::uint32_t l, std::size_t front, std::size_t& back) {
    while (back > front && queue_[back].start >= l + 1 && beats(l, queue_[back].from, queue_[back].start)) --back;
    // The newer one wins from some point on: near the beginning as a rule, so steps grow from there.
    const std::uint32_t older = queue_[back].from;
    std::size_t low = std::max<std::size_t>(queue_[back].start, l + 1), step = 1;
    if (back == front && beats(l, older, low)) {
      queue_[back] = {l, static_cast<std::uint32_t>(low)};
      return;
    }
    std::size_t high = low;  // not won at low
    while (true) {
      high = std::min(low + step, n_);
      if (high == low) return;  // never
      if (beats(l, older, high)) break;
      low = high;
      step *= 2;
    }
    while (high - low > 1) {
      const std::size_t middle = low + (high - low) / 2;
      (beats(l, older, middle) ? high : low) = middle;
    }
    queue_[++back] = {l, static_cast<std::uint32_t>(high)};
  }

  const Prefix& at_;
  std::size_t n_;
  std::vector<double> best_;
  std::vector<std::uint32_t> from_, runs_;
  std::vector<Candidate> queue_;
};

// Looks for a penalty whose partition has just `k` runs. Their number falls with the penalty, about as its third root
// (Panter, Dite: "Quantization distortion in pulse-count modulation", 1951), which makes the steps short.
bool search(Penalized& problem, std::size_t k, double& penalty) {
  double low = 0, high = std::numeric_limits<double>::infinity();  // too many runs, too few
  for (int i = 0; i < kTries; ++i) {
    const std::size_t found = problem.solve(penalty);
    if (found == k) return true;
    (found > k ? low : high) = penalty;
    double next = penalty * std::pow(static_cast<double>(found) / static_cast<double>(k), 3.0);
    const bool bounded = low > 0 && std::isfinite(high);
    if (bounded && (i % 3 == 2 || next <= low || next >= high)) next = std::sqrt(low) * std::sqrt(high);
    if (!(next > low && next < high) || !std::isfinite(next)) return false;
    penalty = next;
  }
  return false;
}

Prefix coarser(const Prefix& at, std::size_t step) {
  Prefix out;
  const std::size_t n = at.points();
  for (std::size_t i = 0; i < n; i += step) {
    out.weight.push_back(at.weight[i]);
    out.sum.push_back(at.sum[i]);
  }
  out.weight.push_back(at.weight[n]);
  out.sum.push_back(at.sum[n]);
  return out;
}

// Halves a range of ends until each has its best beginning (divide and conquer, by the same monotony).
struct Layer {
  const Prefix& at;
  const std::vector<double>& last;
  std::vector<double>& best;
  std::uint16_t* from;

  void fill(std::size_t first, std::size_t end, std::size_t low, std::size_t high) const {
    while (first < end) {
      const std::size_t r = first + (end - first) / 2;
      double least = std::numeric_limits<double>::infinity();
      std::size_t chosen = low;
      for (std::size_t l = low; l <= std::min(high, r - 1); ++l) {
        const double value = last[l] + at.cost(l, r);
        if (value < least) {
          least = value;
          chosen = l;
        }
      }
      best[r] = least;
      from[r] = static_cast<std::uint16_t>(chosen);
      fill(first, r, low, chosen);
      first = r + 1;
      low = chosen;
    }
  }
};

}  // namespace

std::vector<std::size_t> kmeans1d_layers(const Prefix& at, std::size_t k) {
  const std::size_t n = at.points();
  std::vector<double> last(n + 1, std::numeric_limits<double>::infinity()), best(n + 1);
  std::vector<std::uint16_t> from(k * (n + 1));
  last[0] = 0;
  for (std::size_t j = 0; j < k; ++j) {
    std::fill(best.begin(), best.end(), std::numeric_limits<double>::infinity());
    Layer{at, last, best, from.data() + j * (n + 1)}.fill(j + 1, n - (k - 1 - j) + 1, j, n);
    last.swap(best);
  }
  std::vector<std::size_t> bounds(k + 1);
  bounds[k] = n;
  for (std::size_t j = k; j > 0; --j) bounds[j - 1] = from[(j - 1) * (n + 1) + bounds[j]];
  return bounds;
}

std::vector<std::size_t> kmeans1d(const Prefix& at, std::size_t k) {
  const std::size_t n = at.points();
  if (k == 1) return {0, n};
  if (k >= n) {
    std::vector<std::size_t> bounds(n + 1);
    for (std::size_t i = 0; i <= n; ++i) bounds[i] = i;
    return bounds;
  }
  // What one run leaves cannot be told without squares; the spread of the points serves as well for a first guess.
  double penalty = 0;
  const double mean = at.sum[n] / at.weight[n];
  for (std::size_t i = 0; i < n; ++i) {
    const double w = at.weight[i + 1] - at.weight[i], away = (at.sum[i + 1] - at.sum[i]) / w - mean;
    penalty += w * away * away;
  }
  penalty *= 2 / (static_cast<double>(k) * static_cast<double>(k) * static_cast<double>(k));
  if (!(penalty > 0) || !std::isfinite(penalty)) return kmeans1d_layers(at, k);
  const std::size_t step = n / std::max(kCoarse, 8 * k);
  if (step > 1) {
    const Prefix rough = coarser(at, step);
    Penalized problem(rough);
    double guess = penalty;
    if (search(problem, k, guess)) penalty = guess;
  }
  Penalized problem(at);
  return search(problem, k, penalty) ? problem.bounds() : kmeans1d_layers(at, k);
}

}  // namespace ingot
