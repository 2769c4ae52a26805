// Element positions that kernels use as memory offsets.
#pragma once
#include <cstdint>
#include <memory>

#include "bind/arrays.h"
#include "core/dispatch.h"

using Positions = In<std::int64_t>;

// A private copy of positions, relative to `origin`, checked to ascend and to be below `limit`. Once the interpreter's
// lock is released, another thread may write to the caller's array, so checking that array would not be enough.
class Followed {
 public:
  Followed(const Positions& positions, std::size_t limit, std::int64_t origin = 0)
      : count_(positions.size()), buffer_(new std::int64_t[count_]) {
    const std::int64_t* source = positions.data();
    for (std::size_t i = 0; i < count_; ++i)  // unsigned: may wrap around
      buffer_[i] =
          static_cast<std::int64_t>(static_cast<std::uint64_t>(source[i]) - static_cast<std::uint64_t>(origin));
    constexpr std::int64_t before = -1;
    require(INGOT_KERNEL(first_unordered)(buffer_.get(), count_, before, static_cast<std::int64_t>(limit)) == count_,
            "expected ascending positions inside the array");
  }
  const std::int64_t* data() const { return buffer_.get(); }
  std::size_t size() const { return count_; }

  // Returns positions with a value for each; valid as long as this object.
  template <class Values>
  ingot::Placed with(const Values& values) const {
    require(values.size() == count_, "expected a value for every position");
    return {buffer_.get(), values.data(), count_};
  }

 private:
  const std::size_t count_;
  const std::unique_ptr<std::int64_t[]> buffer_;
};
