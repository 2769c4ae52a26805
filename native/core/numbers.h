// A column of integers. It takes no memory while the integers increase in equal steps, as for similar rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ingot::table {

class Numbers {
 public:
  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  // Returns whether all are equal, or there are none.
  bool is_uniform() const { return even_ && (count_ < 2 || step_ == 0); }

  std::int64_t operator[](std::size_t index) const { return even_ ? at_step(index) : values_[index]; }
  std::int64_t back() const { return (*this)[count_ - 1]; }

  void push_back(std::int64_t value) {
    if (even_) {
      if (count_ == 0) first_ = static_cast<std::uint64_t>(value);
      if (count_ == 1) step_ = static_cast<std::uint64_t>(value) - first_;
      if (count_ < 2) next_ = static_cast<std::uint64_t>(value);
      if (static_cast<std::uint64_t>(value) == next_) {
        next_ += step_;
        ++count_;
        return;
      }
      spread();
    }
    values_.push_back(value);
    ++count_;
  }

  void repeat(std::int64_t value, std::size_t times) {
    if (even_ && count_ > 0 && step_ == 0 && value == at_step(0)) {
      count_ += times;  // the next integer is equal, after one or more
      return;
    }
    for (; times > 0; --times) push_back(value);
  }

  // Writes all integers; there must be space for `size()`.
  void copy(std::int64_t* to) const {
    if (!even_) {
      std::copy(values_.begin(), values_.end(), to);
      return;
    }
    for (std::size_t index = 0; index < count_; ++index) to[index] = at_step(index);
  }

 private:
  std::int64_t at_step(std::size_t index) const { return static_cast<std::int64_t>(first_ + index * step_); }

  void spread() {
    values_.reserve(2 * count_ + 64);
    for (std::size_t index = 0; index < count_; ++index) values_.push_back(at_step(index));
    even_ = false;
  }

  std::vector<std::int64_t> values_;  // if the steps are not equal
  std::uint64_t first_ = 0, step_ = 0, next_ = 0;  // modulo 2**64
  std::size_t count_ = 0;
  bool even_ = true;
};

}  // namespace ingot::table
