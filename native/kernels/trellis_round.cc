// Chooses streams: of least weighted error, with feedback between columns (GPTQ, arXiv 2210.17323), and by descent on
// the error under two factors. Sums have a fixed order for any width of vectors.
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

constexpr std::size_t kSixteen = 16;
constexpr float kFar = 0x1p20f;  // limit of a target over its scale: beyond the largest value nothing is gained
constexpr std::size_t kPart = 24;  // rows of a descent that are searched together
constexpr float kSofter = 4.0f;  // weight of errors in a second attempt: fewer windows change

inline float as_stored(float value, Dtype type) {
  if (type == Dtype::f16) return f16_to_f32(f32_to_f16(value));
  if (type == Dtype::bf16) return bf16_to_f32(f32_to_bf16(value));
  return value;
}

inline float dot(const float* __restrict a, const float* __restrict b, std::size_t n) {
  float lanes[kSixteen] = {};
  std::size_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen)
    for (std::size_t lane = 0; lane < kSixteen; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) lanes[i % kSixteen] += a[i] * b[i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

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
    if (!(amax > 0)) return;
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
    find.search_all(column.targets(), column.weights(), rows, windows);
    if (linked.there()) linked.again(targets + col * rows, col, windows);
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

template <int kBits>
class Descend {
 public:
  Descend(const TrellisColumns& to, const TrellisDescent& down)
      : to_(to), down_(down), find_(to.values), column_(to), requested_(to.rows), moved_(to.rows), pulled_(to.rows),
        before_(to.rows), part_(to.group), along_(to.group) {}

  void run() {
    for (std::size_t first = 0; first < to_.cols; first += to_.group) {
      const std::size_t last = std::min(first + to_.group, to_.cols);
      for (std::size_t col = first; col < last; ++col) move(first, last, col);
      if (down_.refit)
        for (std::size_t row = 0; row < to_.rows; ++row) refit(first, last, row);
      carry(first, last);
    }
  }

 private:
  static constexpr std::size_t kSymbols = Search<kBits>::kSymbols, kSpan = Search<kBits>::kSpan;

  const float* scales(std::size_t col) const { return to_.scales + col / to_.group * to_.rows; }
  float input(std::size_t a, std::size_t b) const { return down_.inputs[a * to_.cols + b]; }
  const float* output(std::size_t row) const { return down_.outputs + row * to_.rows; }

  // pulled_ = G moved_
  void pull() {
    std::fill(pulled_.begin(), pulled_.end(), 0.0f);
    float* __restrict sum = pulled_.data();
    for (std::size_t row = 0; row < to_.rows; ++row) {
      const float by = moved_[row];
      if (by == 0) continue;
      const float* __restrict link = output(row);
      for (std::size_t i = 0; i < to_.rows; ++i) sum[i] += by * link[i];
    }
  }

  // Changes one column's windows, all others fixed.
  void move(std::size_t first, std::size_t last, std::size_t col) {
    const std::size_t rows = to_.rows;
    const float diagonal = input(col, col);
    if (!(diagonal > 0)) return;
    std::uint16_t* windows = to_.windows + col * rows;
    std::copy_n(windows, rows, before_.data());
    if (rows <= kPart + kSpan) {
      search(col, diagonal, 0, rows);
    } else {  // parts of the rows, which depend less on each other
      for (std::size_t done = 0; done < rows; done += kPart)
        search(col, diagonal, (down_.turn + done) % rows, kPart + kSpan - 1);
    }
    float* slope = down_.gradient + col * rows;
    if (rows >= kSpan)
      for (std::size_t row = 0; row < rows; ++row) one_symbol(windows, slope, scales(col), diagonal, row);
    bool any = false;
    for (std::size_t i = 0; i < rows; ++i) {
      moved_[i] = windows[i] == before_[i] ? 0.0f : scales(col)[i] * (to_.values[windows[i]] - to_.values[before_[i]]);
      any = any || moved_[i] != 0;
    }
    if (!any) return;
    pull();
    apply(first, last, col, col);
    float* __restrict change = down_.change + col * rows;
    for (std::size_t i = 0; i < rows; ++i) change[i] += moved_[i];
  }

  // Updates the gradients of a group's columns after column `col` changed by moved_; the gradient of `done` is already
  // updated.
  void apply(std::size_t first, std::size_t last, std::size_t col, std::size_t done) {
    for (std::size_t other = first; other < last; ++other) {
      if (other == done) continue;
      const float link = input(col, other);
      float* __restrict slope = down_.gradient + other * to_.rows;
      const float* __restrict sum = pulled_.data();
      for (std::size_t i = 0; i < to_.rows; ++i) slope[i] += link * sum[i];
    }
  }

  void search(std::size_t col, float diagonal, std::size_t first, std::size_t count) {
    if (!searched(col, diagonal, 1.0f, first, count)) searched(col, diagonal, kSofter, first, count);
  }

  // Searches as if rows were independent; the result is used if the real error decreases.
  bool searched(std::size_t col, float diagonal, float weight, std::size_t first, std::size_t count) {
    const std::size_t rows = to_.rows;
    float* __restrict slope = down_.gradient + col * rows;
    std::uint16_t* windows = to_.windows + col * rows;
    const float* scale = scales(col);
    for (std::size_t i = 0; i < rows; ++i) {
      const float curve = weight * diagonal * output(i)[i];
      requested_[i] = scale[i] * to_.values[windows[i]] - (curve > 0 ? slope[i] / curve : 0.0f);
    }
    column_.set(requested_.data(), col);
    std::vector<std::uint16_t>& counts = found_;
    counts.assign(windows, windows + rows);
    if (count == rows)
      find_.again(column_.targets(), column_.weights(), rows, down_.turn % rows, counts.data());
    else
      find_.within(column_.targets(), column_.weights(), rows, first, count, counts.data());
    for (std::size_t i = 0; i < rows; ++i)
      moved_[i] = counts[i] == windows[i] ? 0.0f : scale[i] * (to_.values[counts[i]] - to_.values[windows[i]]);
    pull();
    if (!(2 * dot(moved_.data(), slope, rows) + diagonal * dot(moved_.data(), pulled_.data(), rows) < 0)) return false;
    std::copy_n(counts.data(), rows, windows);
    for (std::size_t i = 0; i < rows; ++i) slope[i] += diagonal * pulled_[i];
    return true;
  }

  // Changes the symbol of one row, whose bits are in the windows of the rows before it too.
  void one_symbol(std::uint16_t* windows, float* slope, const float* scale, float diagonal, std::size_t row) {
    const std::size_t rows = to_.rows;
    std::size_t index[kSpan];
    float best[kSpan] = {}, least = 0;
    std::uint16_t taken[kSpan];
    for (std::size_t k = 0; k < kSpan; ++k) index[k] = (row + rows - k) % rows;
    const std::size_t present = windows[row] % kSymbols;
    for (std::size_t symbol = 0; symbol < kSymbols; ++symbol) {
      if (symbol == present) continue;
      float by[kSpan], error = 0;
      std::uint16_t changed[kSpan];
      for (std::size_t k = 0; k < kSpan; ++k) {
        const std::size_t position = k * kBits;
        changed[k] =
            static_cast<std::uint16_t>((windows[index[k]] & ~((kSymbols - 1) << position)) | symbol << position);
        by[k] = scale[index[k]] * (to_.values[changed[k]] - to_.values[windows[index[k]]]);
        error += 2 * by[k] * slope[index[k]];
      }
      for (std::size_t k = 0; k < kSpan; ++k) {
        const float* link = output(index[k]);
        float sum = 0;
        for (std::size_t other = 0; other < kSpan; ++other) sum += by[other] * link[index[other]];
        error += diagonal * by[k] * sum;
      }
      if (!(error < least)) continue;
      least = error;
      std::copy_n(by, kSpan, best);
      std::copy_n(changed, kSpan, taken);
    }
    if (!(least < 0)) return;
    for (std::size_t k = 0; k < kSpan; ++k) {
      windows[index[k]] = taken[k];
      const float by = diagonal * best[k];
      const float* __restrict link = output(index[k]);
      for (std::size_t i = 0; i < rows; ++i) slope[i] += by * link[i];
    }
  }

  // Changes the scale of a row's group: D changes by (new scale - scale) * value.
  void refit(std::size_t first, std::size_t last, std::size_t row) {
    const std::size_t rows = to_.rows, size = last - first;
    float& scale = to_.scales[first / to_.group * rows + row];
    if (scale == 0) return;
    float slope = 0, curve = 0;
    for (std::size_t j = 0; j < size; ++j) {
      part_[j] = to_.values[to_.windows[(first + j) * rows + row]];
      slope += down_.gradient[(first + j) * rows + row] * part_[j];
    }
    for (std::size_t j = 0; j < size; ++j) {
      along_[j] = dot(part_.data(), down_.inputs + (first + j) * to_.cols + first, size);
      curve += part_[j] * along_[j];
    }
    curve *= output(row)[row];
    if (!(curve > 0)) return;
    const float better = as_stored(scale - slope / curve, down_.scale_type), by = better - scale;
    if (better == 0 || !is_finite(better) || !(by * (2 * slope + by * curve) < 0)) return;
    const float* __restrict link = output(row);
    for (std::size_t j = 0; j < size; ++j) {
      down_.change[(first + j) * rows + row] += by * part_[j];
      const float sum = by * along_[j];
      float* __restrict target = down_.gradient + (first + j) * rows;
      for (std::size_t i = 0; i < rows; ++i) target[i] += sum * link[i];
    }
    scale = better;
  }

  // Adds the effect of a group's change to the columns after it.
  void carry(std::size_t first, std::size_t last) {
    const std::size_t rows = to_.rows, size = last - first, rest = to_.cols - last;
    if (rest == 0) return;
    product_.assign(size * rows, 0.0f);
    multiply_add<float>(down_.change + first * rows, rows, down_.outputs, rows, product_.data(), rows, size, rows, rows, 1.0f);
    multiply_add<float>(down_.inputs + last * to_.cols + first, to_.cols, product_.data(), rows,
                        down_.gradient + last * rows, rows, rest, size, rows, 1.0f);
  }

  const TrellisColumns& to_;
  const TrellisDescent& down_;
  Search<kBits> find_;
  Column column_;
  std::vector<float> requested_, moved_, pulled_;
  std::vector<std::uint16_t> before_, found_;
  std::vector<float> part_, along_, product_;
};

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

void trellis_descend(const TrellisColumns& to, const TrellisDescent& down) {
  if (to.bits == 2) return Descend<2>(to, down).run();
  if (to.bits == 3) return Descend<3>(to, down).run();
  Descend<4>(to, down).run();
}

}  // namespace ingot::INGOT_ISA
