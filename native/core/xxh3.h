// XXH3 with 64 bits, seed 0 and the default secret (xxHash 0.8, doc/xxhash_spec.md), piece by piece.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace ingot {

class Xxh3 {
 public:
  // Takes the next bytes.
  void update(const std::uint8_t* data, std::size_t size);

  // The hash of all bytes so far; more may follow.
  std::uint64_t digest() const;

 private:
  static constexpr std::size_t kStripe = 64, kBuffer = 256;
  using Lanes = std::array<std::uint64_t, 8>;
  static constexpr Lanes kStart = {0xC2B2AE3Du,          0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                                   0x85EBCA77C2B2AE63u,  0x85EBCA77u,         0x27D4EB2F165667C5u, 0x9E3779B1u};

  Lanes lanes_ = kStart;
  std::size_t stripe_ = 0;          // stripes of the present block that are in the lanes
  std::uint64_t total_ = 0;         // bytes so far
  std::size_t held_ = 0;            // bytes in buffer_, which are in no lane yet: at least one once anything came
  std::uint8_t buffer_[kBuffer];
  std::uint8_t behind_[kStripe];    // the last stripe that went into the lanes
};

}  // namespace ingot
