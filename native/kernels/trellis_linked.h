// Finds the stream of least error if rows depend on each other: e' G e of a column's errors e, with G = (L + I) D (L +
// I)', is the sum of D[k] * (e[k] + contributions of the errors of later rows)^2. A search proceeds from the last row
// to the first, and each surviving path has its own targets (per-survivor processing: Raheli and others, IEEE Trans.
// Commun. 43, 1995). Between blocks of sixteen rows, errors are propagated only for the few paths from which all others
// descend.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/trellis.h"
#include "kernels/trellis_search.h"

namespace ingot::INGOT_ISA {
namespace {

template <int kBits>
class Linked : private Search<kBits> {
  using Base = Search<kBits>;
  using Base::kPlane, Base::kSymbols, Base::back_, Base::cost_, Base::smallest_, Base::path_, Base::values_;

 public:
  Linked(const float* values, const TrellisLinks& links, std::size_t rows)
      : Base(values), links_(links), rows_(rows), near_(kPlane), errors_(kPlane), next_near_(kPlane), next_errors_(kPlane),
        before_(kPlane), origin_(kPlane), next_origin_(kPlane), slot_(kPlane), number_(kPlane) {
    path_.resize(rows);
    back_.resize(rows * kPlane);
  }

  // Finds the windows whose `scales` * value are nearest to `aims`, in the order of L. Errors are relative to
  // `targets`; `between` are the bits that the windows after the last row and of the first row share.
  const std::uint16_t* find(const float* targets, const float* aims, const float* scales, std::size_t between) {
    this->start(static_cast<int>(between));
    begin(aims);
    for (std::size_t row = rows_; row-- > 0;) {
      std::uint8_t* back = back_.data() + row * kPlane;
      this->choose(back);
      if (row + 1 < rows_) follow(row + 1, targets[row + 1], scales[row + 1], back);
      extend(row, scales[row]);
    }
    this->trace(static_cast<int>(between), rows_);
    return path_.data();
  }

 private:
  static constexpr std::size_t kBlock = 16;
  struct alignas(64) Block {
    float values[kBlock];
  };

  const float* links(std::size_t row) const { return links_.below + row * rows_; }

  void begin(const float* aims) {
    pending_.assign(aims, aims + rows_);
    stride_ = rows_;
    const std::size_t first = (rows_ - 1) / kBlock * kBlock;
    Block partial = {};
    std::copy(aims + first, aims + rows_, partial.values);
    std::fill(near_.begin(), near_.end(), partial);
    std::fill(errors_.begin(), errors_.end(), Block{});
    std::fill(before_.begin(), before_.end(), Block{});
    std::fill(origin_.begin(), origin_.end(), std::uint16_t{0});
    std::fill(slot_.begin(), slot_.end(), std::uint16_t{0});
  }

  // Every surviving path has its window of `row` now.
  void follow(std::size_t row, float target, float scale, const std::uint8_t* back) {
    const std::size_t lane = row % kBlock;
    Block link = {};
    std::copy_n(links(row) + (row - lane), lane, link.values);
    for (std::size_t u = 0; u < kPlane; ++u) {
      const std::size_t window = back[u] * kPlane + u, from = window >> kBits;
      const float error = scale * values_[window] - target;
      const Block &near = near_[from], &errors = errors_[from];
      Block &next = next_near_[u], &made = next_errors_[u];
      for (std::size_t i = 0; i < kBlock; ++i) next.values[i] = near.values[i] - error * link.values[i];
      made = errors;
      made.values[lane] = error;
      next_origin_[u] = origin_[from];
    }
    near_.swap(next_near_);
    errors_.swap(next_errors_);
    origin_.swap(next_origin_);
    if (lane == 0) cross(row);
  }

  // The block that begins at `first` is complete: computes the targets of the block before it.
  void cross(std::size_t first) {
    constexpr std::uint16_t kNone = 0xffff;
    std::fill(number_.begin(), number_.end(), kNone);
    next_pending_.clear();
    std::size_t count = 0;
    for (std::size_t u = 0; u < kPlane; ++u) {
      const std::size_t origin = origin_[u];
      if (number_[origin] != kNone) continue;
      number_[origin] = static_cast<std::uint16_t>(count++);
      const float* old = pending_.data() + slot_[origin] * stride_;
      next_pending_.insert(next_pending_.end(), old, old + first);
      carry(before_[origin], first + kBlock, first, next_pending_.data() + (count - 1) * first);
    }
    pending_.swap(next_pending_);
    stride_ = first;
    for (std::size_t u = 0; u < kPlane; ++u) {
      const std::uint16_t number = number_[origin_[u]];
      float* near = near_[u].values;
      std::copy_n(pending_.data() + number * stride_ + first - kBlock, kBlock, near);
      for (std::size_t k = 0; k < kBlock && first + k < rows_; ++k) {
        const float* __restrict link = links(first + k) + first - kBlock;
        const float error = errors_[u].values[k];
        for (std::size_t i = 0; i < kBlock; ++i) near[i] -= error * link[i];
      }
      next_origin_[u] = number;
    }
    before_.swap(errors_);
    slot_.swap(next_origin_);
    for (std::size_t u = 0; u < kPlane; ++u) origin_[u] = static_cast<std::uint16_t>(u);
  }

  // Adds the effect of errors of the block from `row` on to the first `count` targets.
  void carry(const Block& errors, std::size_t row, std::size_t count, float* __restrict targets) const {
    for (std::size_t k = 0; k < kBlock && row + k < rows_; ++k) {
      const float* __restrict link = links(row + k);
      for (std::size_t i = 0; i < count; ++i) targets[i] -= errors.values[k] * link[i];
    }
  }

  void extend(std::size_t row, float scale) {
    const std::size_t lane = row % kBlock;
    for (std::size_t u = 0; u < kPlane; ++u) aim_[u] = near_[u].values[lane];
    const float weight = links_.diagonal[row];
    for (std::size_t s = 0; s < kTrellisStates; s += kCosts) {
      const Costs away = scale * load_costs(values_ + s) - repeated<kBits>(aim_ + (s >> kBits));
      const Costs sum = repeated<kBits>(smallest_ + (s >> kBits)) + weight * (away * away);
      std::memcpy(cost_ + s, &sum, sizeof sum);
    }
  }

  const TrellisLinks& links_;
  std::size_t rows_, stride_ = 0;
  alignas(64) float aim_[kPlane + 16] = {};  // reads past the end, like least_
  std::vector<Block> near_, errors_, next_near_, next_errors_, before_;
  std::vector<std::uint16_t> origin_, next_origin_, slot_, number_;
  std::vector<float> pending_, next_pending_;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
