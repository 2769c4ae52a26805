// Finds the stream of least error if rows depend on each other: e' G e of a column's errors e, with G = (L + I) D (L +
// I)', is the sum of D[k] * (e[k] + contributions of the errors of later rows)^2. A search proceeds from the last row
// to the first, and each surviving path has its own targets (per-survivor processing: Raheli and others, IEEE Trans.
// Commun. 43, 1995). Between blocks of eight rows, errors are propagated only for the few paths from which all others
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
      : Base(values), links_(links), rows_(rows), near_(kPlane), next_near_(kPlane), errors_(kPlane), before_(kPlane),
        origin_(kPlane), slot_(kPlane), number_(kPlane) {
    path_.resize(rows);
    back_.resize(rows * kPlane);
  }

  // Finds the windows whose `scales` * value are nearest to `aims`, in the order of L. Errors are relative to
  // `targets`; `between` are the bits that the windows after the last row and of the first row share.
  const std::uint16_t* find(const float* targets, const float* aims, const float* scales, std::size_t between) {
    targets_ = targets;
    scales_ = scales;
    this->start(static_cast<int>(between));
    begin(aims);
    for (std::size_t row = rows_; row-- > 0;) {
      this->choose(back(row));
      if (row + 1 < rows_) follow(row + 1);
      extend(row, scales[row]);
    }
    this->trace(static_cast<int>(between), rows_);
    return path_.data();
  }

 private:
  static constexpr std::size_t kBlock = 8;
  struct alignas(32) Block {
    float values[kBlock];
  };
  using Eight = float __attribute__((vector_size(32)));

  // The best window of row + 1 for each window of `row`, without its top symbol.
  std::uint8_t* back(std::size_t row) { return back_.data() + row * kPlane; }
  const float* links(std::size_t row) const { return links_.below + row * rows_; }

  void begin(const float* aims) {
    pending_.assign(aims, aims + rows_);
    stride_ = rows_;
    const std::size_t first = (rows_ - 1) / kBlock * kBlock;
    Block partial = {};
    std::copy(aims + first, aims + rows_, partial.values);
    std::fill(near_.begin(), near_.end(), partial);
    std::fill(before_.begin(), before_.end(), Block{});
    std::fill(slot_.begin(), slot_.end(), std::uint16_t{0});
  }

  // Every surviving path has its window of `row` now.
  void follow(std::size_t row) {
    const std::size_t lane = row % kBlock;
    const std::uint8_t* __restrict top = back(row - 1);
    const float target = targets_[row], scale = scales_[row];
    for (std::size_t u = 0; u < kPlane; ++u) {
      const std::size_t window = top[u] * kPlane + u;
      from_[u] = static_cast<std::uint32_t>(window >> kBits);
      error_[u] = scale * values_[window] - target;
    }
    if (lane == 0) return cross(row);
    Block link = {};
    std::copy_n(links(row) + (row - lane), lane, link.values);
    for (std::size_t u = 0; u < kPlane; ++u) {
      const Block& near = near_[from_[u]];
      Block& next = next_near_[u];
      const float error = error_[u];
      for (std::size_t i = 0; i < kBlock; ++i) next.values[i] = near.values[i] - error * link.values[i];
    }
    near_.swap(next_near_);
  }

  // Goes back along a path to the start of the block from `first` on: stores its errors, and returns the path it
  // descends from.
  std::size_t trace_block(std::size_t first, std::size_t u, Block& errors) {
    for (std::size_t k = 0; k < kBlock && first + k < rows_; ++k) {
      const std::size_t row = first + k, window = back(row - 1)[u] * kPlane + u;
      errors.values[k] = scales_[row] * values_[window] - targets_[row];
      u = window >> kBits;
    }
    return u;
  }

  // The block that begins at `first` is complete: computes the targets of the block before it.
  void cross(std::size_t first) {
    constexpr std::uint16_t kNone = 0xffff;
    const bool begins = first + kBlock >= rows_;
    for (std::size_t u = 0; u < kPlane; ++u) {
      errors_[u] = {};
      const std::size_t origin = trace_block(first, u, errors_[u]);
      origin_[u] = static_cast<std::uint16_t>(begins ? 0 : origin);
    }
    std::fill(number_.begin(), number_.end(), kNone);
    next_pending_.clear();
    std::size_t count = 0;
    for (const std::size_t origin : origin_) {
      if (number_[origin] != kNone) continue;
      number_[origin] = static_cast<std::uint16_t>(count++);
      const float* old = pending_.data() + slot_[origin] * stride_;
      next_pending_.insert(next_pending_.end(), old, old + first);
      carry(before_[origin], first + kBlock, first, next_pending_.data() + (count - 1) * first);
    }
    pending_.swap(next_pending_);
    stride_ = first;
    Block nearest[kBlock] = {};
    for (std::size_t k = 0; k < kBlock && first + k < rows_; ++k)
      std::copy_n(links(first + k) + first - kBlock, kBlock, nearest[k].values);
    for (std::size_t u = 0; u < kPlane; ++u) {
      const std::uint16_t number = number_[origin_[u]];
      Block near;
      std::copy_n(pending_.data() + number * stride_ + first - kBlock, kBlock, near.values);
      near_[u] = less(near, errors_[u], nearest);
      slot_[u] = number;
    }
    before_.swap(errors_);
  }

  // Returns `from` without the effect of the errors of eight rows, whose links are `rows`.
  static Block less(const Block& from, const Block& errors, const Block* rows) {
    Eight sum;
    std::memcpy(&sum, from.values, sizeof sum);
    for (std::size_t k = 0; k < kBlock; ++k) {
      Eight link;
      std::memcpy(&link, rows[k].values, sizeof link);
      sum -= errors.values[k] * link;
    }
    Block result;
    std::memcpy(result.values, &sum, sizeof sum);
    return result;
  }

  // Adds the effect of errors of the block from `row` on to the first `count` targets, whole blocks of them.
  void carry(const Block& errors, std::size_t row, std::size_t count, float* targets) const {
    const std::size_t height = row < rows_ ? std::min(kBlock, rows_ - row) : 0;
    for (std::size_t i = 0; i < count; i += kBlock) {
      Eight sum;
      std::memcpy(&sum, targets + i, sizeof sum);
      for (std::size_t k = 0; k < height; ++k) {
        Eight link;
        std::memcpy(&link, links(row + k) + i, sizeof link);
        sum -= errors.values[k] * link;
      }
      std::memcpy(targets + i, &sum, sizeof sum);
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
  const float *targets_ = nullptr, *scales_ = nullptr;
  std::size_t rows_, stride_ = 0;
  alignas(64) float aim_[kPlane + 16] = {};  // reads past the end, like least_
  float error_[kPlane];
  std::uint32_t from_[kPlane];
  std::vector<Block> near_, next_near_, errors_, before_;
  std::vector<std::uint16_t> origin_, slot_, number_;
  std::vector<float> pending_, next_pending_;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
