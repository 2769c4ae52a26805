// Rounding with feedback (GPTQ, arXiv 2210.17323; along rows too: YAQA, arXiv 2505.22988), and coordinate descent on the
// error under two factors. Sums have a fixed order for any width of vectors.
#include <vector>

#include "core/pool.h"
#include "kernels/kernels.h"
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

// Columns first to last, whose targets include the errors of all columns before; the errors of these are added to the
// targets up to column `end`. With links, rows are rounded from the last to the first, and the changes of a row, which
// include what feedback added, move the targets of the rows before it.
void rounding_feedback(const Grid& grid, const Rounded& to, const Feedback& feed) {
  const Levels levels(grid);
  const std::size_t n = to.cols, first = feed.first, size = feed.last - first;
  std::vector<float> none(size, 0.0f);
  for (std::size_t row = to.rows; row-- > 0;) {
    float* __restrict target = feed.targets + row * n;
    const float* shift = feed.links.below != nullptr ? feed.links.shifts + row * feed.links.stride : none.data();
    float* change = feed.links.below != nullptr ? feed.links.changes + row * feed.links.stride : nullptr;
    for (std::size_t j = first; j < feed.last; ++j) {
      const std::size_t index = row * to.groups + static_cast<std::size_t>(to.group_of[j]);
      const float scale = to.scales[index], zero = to.zeros ? to.zeros[index] : 0.0f;
      const float aim = target[j] + shift[j - first];
      const std::uint8_t code = levels.nearest(scale == 0 ? zero : levels.among(aim, scale, zero));
      to.codes[row * n + j] = code;
      const float value = levels.value(code, scale, zero), error = feed.original[row * n + j] - value;
      feed.errors[row * n + j] = error;
      if (change != nullptr) change[j - first] = target[j] - value;
      const float* __restrict next = feed.factor + j * n;  // 0 up to column j
      for (std::size_t k = first + (j - first) / kSixteen * kSixteen; k < feed.end; ++k) target[k] += error * next[k];
    }
    if (change == nullptr) continue;
    for (std::size_t earlier = 0; earlier < row; ++earlier) {
      const float link = feed.links.below[row * feed.links.below_stride + earlier];
      float* __restrict moved = feed.links.shifts + earlier * feed.links.stride;
      const float* __restrict by = change;
      for (std::size_t j = 0; j < size; ++j) moved[j] += link * by[j];
    }
  }
}

namespace {

constexpr std::size_t kFewest = 128;  // columns after which the columns outside are updated
constexpr std::size_t kTogether = 32;  // columns whose codes are compared at once
constexpr std::size_t kChunk = 64;     // columns of D A that are updated at once
constexpr std::size_t kColumns = 8 * kPanel;  // of a product that a thread computes at once

// The descent of a block of rows through the columns of a span of groups.
class Span {
 public:
  Span(const Grid& grid, const Rounded& to, const Descent& down, std::size_t first, std::size_t last)
      : levels_(grid), grid_(grid), to_(to), down_(down), first_(first), size_(last - first), near_(to.rows * size_),
        moved_(to.rows * size_, 0.0f) {}

  // `change` is the change of D A so far; returns the moves, or null if there are none.
  const float* run(const float* change) {
    for (std::size_t row = 0; row < to_.rows; ++row)
      std::copy_n(change + row * to_.cols + first_, size_, near_.data() + row * size_);
    for (std::size_t start = 0; start < size_;) {
      std::size_t stop = start + 1;
      while (stop < size_ && to_.group_of[first_ + stop] == to_.group_of[first_ + start]) ++stop;
      group(start, stop);
      start = stop;
    }
    return any_ ? moved_.data() : nullptr;
  }

 private:
  const float* input(std::size_t j) const { return down_.inputs + (first_ + j) * to_.cols + first_; }

  void group(std::size_t start, std::size_t stop) {
    start_ = start;
    count_ = stop - start;
    slope_.resize(count_);
    level_.resize(count_);
    inverse_.resize(count_);
    at_.resize(count_);
    wanted_.resize(count_);
    for (std::size_t j = 0; j < count_; ++j) inverse_[j] = 1.0f / input(start + j)[start + j];
    const Refit fit(grid_, to_, {input(start) + start, to_.cols, count_});
    const std::size_t group = static_cast<std::size_t>(to_.group_of[first_ + start]);
    for (std::size_t row = 0; row < to_.rows; ++row) {
      const std::size_t index = row * to_.groups + group;
      diagonal_ = down_.outputs != nullptr ? down_.outputs[row * to_.rows + row] : 1.0f;
      if (to_.scales[index] == 0 || !(diagonal_ > 0)) continue;
      gradient(row);
      codes(row, index);
      if (down_.refit) refit(fit, row, index);
    }
  }

  // slope_ = G D A of the row's group, with the changes of the block.
  void gradient(std::size_t row) {
    std::copy_n(down_.gradient + row * to_.cols + first_ + start_, count_, slope_.data());
    float* __restrict slope = slope_.data();
    if (down_.outputs == nullptr) {
      const float* __restrict from = near_.data() + row * size_ + start_;
      for (std::size_t j = 0; j < count_; ++j) slope[j] += from[j];
      return;
    }
    const float* links = down_.outputs + row * to_.rows;
    std::size_t other = 0;
    for (; other + 4 <= to_.rows; other += 4) {
      const float* __restrict from = near_.data() + other * size_ + start_;
      for (std::size_t j = 0; j < count_; ++j)
        slope[j] += (links[other] * from[j] + links[other + 1] * from[size_ + j]) +
                    (links[other + 2] * from[2 * size_ + j] + links[other + 3] * from[3 * size_ + j]);
    }
    for (; other < to_.rows; ++other)
      for (std::size_t j = 0; j < count_; ++j) slope[j] += links[other] * near_[other * size_ + start_ + j];
  }

  void shift(std::size_t row, std::size_t j, float by) {
    const float* __restrict from = input(start_ + j);
    float* __restrict near = near_.data() + row * size_;
    float* __restrict slope = slope_.data();
    const float steep = diagonal_ * by;
    any_ = true;
    moved_[row * size_ + start_ + j] += by;
    for (std::size_t k = 0; k < size_; ++k) near[k] += by * from[k];
    for (std::size_t k = 0; k < count_; ++k) slope[k] += steep * from[start_ + k];
  }

  // Changes the row's codes one after the other. Many are compared at once: few change.
  void codes(std::size_t row, std::size_t index) {
    const float scale = to_.scales[index], zero = to_.zeros ? to_.zeros[index] : 0.0f;
    const float steps = 1.0f / (diagonal_ * scale);
    std::uint8_t* codes = to_.codes + row * to_.cols + first_ + start_;
    for (std::size_t j = 0; j < count_; ++j) level_[j] = levels_.level(codes[j]);
    for (std::size_t from = 0; from < count_;) {
      const std::size_t low = from / kTogether * kTogether, high = std::min(low + kTogether, count_);
      for (std::size_t j = low; j < high; ++j) at_[j] = level_[j] - slope_[j] * (inverse_[j] * steps);
      levels_.nearest_levels(at_.data() + low, high - low, wanted_.data() + low);
      std::size_t j = from;
      while (j < high && wanted_[j] == level_[j]) ++j;
      from = j + 1;
      if (j == high) {
        from = high;
        continue;
      }
      const std::uint8_t code = levels_.nearest(at_[j]);
      const float by = levels_.value(code, scale, zero) - levels_.value(codes[j], scale, zero);
      codes[j] = code;
      level_[j] = levels_.level(code);
      if (by != 0) shift(row, j, by);
    }
  }

  void refit(const Refit& fit, std::size_t row, std::size_t index) {
    float& scale = to_.scales[index];
    const Fitted now{scale, to_.zeros ? to_.zeros[index] : 0.0f};
    const Fitted better = fit.better(now, level_.data(), slope_.data(), diagonal_, index);
    if (better.scale == now.scale && better.zero == now.zero) return;
    const std::uint8_t* codes = to_.codes + row * to_.cols + first_ + start_;
    for (std::size_t j = 0; j < count_; ++j)
      at_[j] = levels_.value(codes[j], better.scale, better.zero) - levels_.value(codes[j], now.scale, now.zero);
    for (std::size_t j = 0; j < count_; ++j) moved_[row * size_ + start_ + j] += at_[j];
    any_ = true;
    for (std::size_t k = 0; k < size_; k += kChunk) add_moves(row, k, std::min(kChunk, size_ - k));
    scale = better.scale;
    if (to_.zeros != nullptr) to_.zeros[index] = better.zero;
  }

  // Adds the effect of at_, the moves of a group, to some columns of D A.
  void add_moves(std::size_t row, std::size_t k, std::size_t count) {
    float sums[kChunk] = {};
    for (std::size_t j = 0; j < count_; ++j) {
      const float* __restrict from = input(start_ + j) + k;
      const float by = at_[j];
      if (count == kChunk)
        for (std::size_t i = 0; i < kChunk; ++i) sums[i] += by * from[i];
      else
        for (std::size_t i = 0; i < count; ++i) sums[i] += by * from[i];
    }
    float* __restrict near = near_.data() + row * size_ + k;
    for (std::size_t i = 0; i < count; ++i) near[i] += sums[i];
  }

  const Levels levels_;
  const Grid& grid_;
  const Rounded& to_;
  const Descent& down_;
  const std::size_t first_, size_;
  std::vector<float> near_, moved_;  // the change of D A in the span, and of D: rows x size
  std::vector<float> slope_, level_, inverse_, at_, wanted_;  // of a group
  std::size_t start_ = 0, count_ = 0;
  float diagonal_ = 1;
  bool any_ = false;
};

// Returns the end of whole groups from `first` on: an even number of columns unless they are the last.
std::size_t end_of_span(const Rounded& to, std::size_t first) {
  std::size_t last = first + 1;
  for (; last < to.cols; ++last)
    if (to.group_of[last] != to.group_of[last - 1] && last - first >= kFewest && (last - first) % 2 == 0) break;
  return last;
}

}  // namespace

void rounding_descend(const Grid& grid, const Rounded& to, const Descent& down) {
  const std::size_t rows = to.rows, n = to.cols;
  float* change = down.change;
  std::fill_n(change, rows * n, 0.0f);
  for (std::size_t first = 0; first < n;) {
    const std::size_t last = end_of_span(to, first);
    Span span(grid, to, down, first, last);
    if (const float* moved = span.run(change)) {
      const std::size_t height = (n + 1) / 2;
      in_ranges(n, kColumns, down.threads, [&](std::size_t start, std::size_t stop) {
        const PairedMatrix part{down.pairs.words + start / kPanel * height * kPanel, n, stop - start};
        pairs_multiply_add(moved, last - first, part, first, last - first, 1 / down.unit, down.unit, change + start, n,
                           rows);
      });
    }
    first = last;
  }
  for (std::size_t i = 0; i < rows * n; ++i) down.product[i] += change[i];
}

}  // namespace ingot::INGOT_ISA
