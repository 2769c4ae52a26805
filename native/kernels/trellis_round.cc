// Chooses streams: of least weighted error, and with feedback between columns (GPTQ, arXiv 2210.17323). Sums have a fixed
// order for any width of vectors.
#include "kernels/gcc_headers.h"
#include "core/trellis.h"

#include <algorithm>
#include <cmath>

#include "kernels/floats.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"
#include "kernels/trellis_linked.h"
#include "kernels/trellis_search.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr float kFar = 0x1p20f;  // limit of a target over its scale: beyond the largest value nothing is gained

// A column as input of searches: targets divided by scales, and the weights of their squares.
class Column {
 public:
  explicit Column(const TrellisColumns& columns) : columns_(columns), targets_(columns.rows), weights_(columns.rows) {}

  const float* targets() const { return targets_.data(); }
  const float* weights() const { return weights_.data(); }

  void set(const float* target, std::size_t col) {
    const float* scales = columns_.scales + col / columns_.group * columns_.rows;
    float amax = 0;
    for (std::size_t i = 0; i < columns_.rows; ++i) amax = std::max(amax, std::fabs(scales[i]));
    for (std::size_t i = 0; i < columns_.rows; ++i) {
      const float scale = scales[i], part = amax > 0 ? scale / amax : 0.0f;
      targets_[i] = scale != 0 ? std::min(std::max(target[i] / scale, -kFar), kFar) : 0.0f;
      weights_[i] = columns_.weights[i] * (part * part);
    }
  }

 private:
  const TrellisColumns& columns_;
  std::vector<float> targets_, weights_;
};

template <int kBits>
void search(const TrellisColumns& to, const float* target, bool open) {
  Search<kBits> find(to.values);
  Column column(to);
  for (std::size_t col = 0; col < to.cols; ++col) {
    column.set(target + col * to.rows, col);
    std::uint16_t* windows = to.windows + col * to.rows;
    if (open)
      find.open(column.targets(), column.weights(), to.rows, windows);
    else
      find.search_all(column.targets(), column.weights(), to.rows, windows);
  }
}

// A column with dependent rows: targets and scales, divided by the largest scale.
template <int kBits>
class LinkedColumn {
 public:
  LinkedColumn(const TrellisColumns& columns, const TrellisLinks& links)
      : columns_(columns),
        shift_(links.shift),
        there_(links.below != nullptr && columns.rows * kBits > Search<kBits>::kTried),
        find_(columns.values, links, columns.rows),
        targets_(columns.rows),
        aims_(columns.rows),
        scales_(columns.rows) {}

  bool there() const { return there_; }

  // Searches windows with the bits between the last and the first row fixed.
  void again(const float* target, std::size_t col, std::uint16_t* windows) {
    const std::size_t rows = columns_.rows;
    const float* scales = columns_.scales + col / columns_.group * rows;
    float amax = 0;
    for (std::size_t i = 0; i < rows; ++i) amax = std::max(amax, std::fabs(scales[i]));
    if (!(amax > 0)) return static_cast<void>(std::fill_n(windows, rows, std::uint16_t{0}));
    for (std::size_t i = 0; i < rows; ++i) {
      scales_[i] = scales[i] / amax;
      targets_[i] = std::min(std::max(target[i] / amax, -kFar), kFar);
      const float shift = shift_ != nullptr ? shift_[col * rows + i] / amax : 0.0f;
      aims_[i] = targets_[i] + std::min(std::max(shift, -kFar), kFar);
    }
    const std::size_t between = windows[rows - 1] >> kBits;
    std::copy_n(find_.find(targets_.data(), aims_.data(), scales_.data(), between), rows, windows);
  }

 private:
  const TrellisColumns& columns_;
  const float* shift_;
  bool there_;
  Linked<kBits> find_;
  std::vector<float> targets_, aims_, scales_;
};

template <int kBits>
void feedback(const TrellisColumns& to, const TrellisLinks& links, std::size_t first, std::size_t last,
              const float* original, float* targets, const float* factor, float* errors) {
  Search<kBits> find(to.values);
  LinkedColumn<kBits> linked(to, links);
  Column column(to);
  const std::size_t rows = to.rows;
  std::vector<float> aims(rows);
  for (std::size_t col = first; col < last; ++col) {
    std::copy_n(targets + col * rows, rows, aims.data());
    for (std::size_t i = 0; links.shift != nullptr && i < rows; ++i) aims[i] += links.shift[col * rows + i];
    column.set(aims.data(), col);
    std::uint16_t* windows = to.windows + col * rows;
    if (linked.there()) find.last_window(column.targets(), column.weights(), rows, windows);
    if (!linked.there())
      find.search_all(column.targets(), column.weights(), rows, windows);
    else
      linked.again(targets + col * rows, col, windows);
    const float* scales = to.scales + col / to.group * rows;
    float* __restrict error = errors + col * rows;
    for (std::size_t i = 0; i < rows; ++i) error[i] = original[col * rows + i] - scales[i] * to.values[windows[i]];
    for (std::size_t next = col + 1; next < last; ++next) {
      const float link = factor[col * to.cols + next];
      float* __restrict target = targets + next * rows;
      for (std::size_t i = 0; i < rows; ++i) target[i] += error[i] * link;
    }
  }
}

}  // namespace

void trellis_search(const TrellisColumns& to, const float* target, bool open) {
  if (to.bits == 2) return search<2>(to, target, open);
  if (to.bits == 3) return search<3>(to, target, open);
  search<4>(to, target, open);
}

// Columns first to last. Their targets include the errors of all columns before; the errors within the range are added
// here.
void trellis_feedback(const TrellisColumns& to, const TrellisLinks& links, std::size_t first, std::size_t last,
                      const float* original, float* targets, const float* factor, float* errors) {
  if (to.bits == 2) return feedback<2>(to, links, first, last, original, targets, factor, errors);
  if (to.bits == 3) return feedback<3>(to, links, first, last, original, targets, factor, errors);
  feedback<4>(to, links, first, last, original, targets, factor, errors);
}

}  // namespace ingot::INGOT_ISA
