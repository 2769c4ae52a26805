// Scratch memory that a thread keeps between calls: fresh pages for every tensor cost as much as decoding a small one.
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
  // Whole lines of the caches begin here. Two of a thread may not be in use at once.
  std::uint8_t* data() const { return data_; }

 private:
  static constexpr std::size_t kKept = std::size_t{4} << 20;  // more is given back
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
