// Scratch memory that a thread keeps between calls: newly mapped pages for every tensor would cost as much as decoding
// a small tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace ingot::bind {

class Scratch {
 public:
  explicit Scratch(std::size_t bytes) {
    std::unique_ptr<std::uint8_t[]>& from = bytes <= kKept ? cached() : buffer_;
    if (bytes > kKept || size() < bytes) {
      if (bytes <= kKept) size() = 0;
      from.reset(new std::uint8_t[bytes + kLine]);
      if (bytes <= kKept) size() = bytes;
    }
    data_ = from.get() + (kLine - reinterpret_cast<std::uintptr_t>(from.get()) % kLine);
  }
  // Memory that is aligned to cache lines. A thread may use only one at a time.
  std::uint8_t* data() const { return data_; }

 private:
  static constexpr std::size_t kKept = std::size_t{4} << 20;  // larger blocks are freed
  static constexpr std::size_t kLine = 64;

  static std::unique_ptr<std::uint8_t[]>& cached() {
    thread_local std::unique_ptr<std::uint8_t[]> bytes;
    return bytes;
  }
  static std::size_t& size() {
    thread_local std::size_t bytes = 0;
    return bytes;
  }

  std::unique_ptr<std::uint8_t[]> buffer_;
  std::uint8_t* data_;
};

}  // namespace ingot::bind
