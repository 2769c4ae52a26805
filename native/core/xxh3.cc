#include "core/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/dispatch.h"
#include "core/xxh3_secret.h"

namespace ingot {
namespace {

static_assert(std::endian::native == std::endian::little, "XXH3 reads little-endian words");

constexpr std::uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u};
const std::uint8_t* const kSecret = kXxh3Secret;

std::uint32_t word32(const std::uint8_t* p) {
  std::uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

std::uint64_t word64(const std::uint8_t* p) {
  std::uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t h) {
  h = (h ^ h >> 37) * 0x165667919E3779F9u;
  return h ^ h >> 32;
}

std::uint64_t mixed(const std::uint8_t* data, const std::uint8_t* secret) {
  return folded(word64(data) ^ word64(secret), word64(data + 8) ^ word64(secret + 8));
}

std::uint64_t up_to_16(const std::uint8_t* data, std::size_t size) {
  if (size > 8) {
    const std::uint64_t low = word64(data) ^ word64(kSecret + 24) ^ word64(kSecret + 32);
    const std::uint64_t high = word64(data + size - 8) ^ word64(kSecret + 40) ^ word64(kSecret + 48);
    return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
  }
  if (size >= 4) {
    const std::uint64_t both = word32(data + size - 4) + (static_cast<std::uint64_t>(word32(data)) << 32);
    std::uint64_t h = both ^ word64(kSecret + 8) ^ word64(kSecret + 16);
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25u;
    h ^= (h >> 35) + size;
    h *= 0x9FB21C651E98DF25u;
    return h ^ h >> 28;
  }
  std::uint64_t h = word64(kSecret + 56) ^ word64(kSecret + 64);
  if (size != 0) {
    const std::uint32_t joined = static_cast<std::uint32_t>(data[0]) << 16 | static_cast<std::uint32_t>(data[size >> 1]) << 24 |
                                 data[size - 1] | static_cast<std::uint32_t>(size) << 8;
    h = joined ^ static_cast<std::uint64_t>(word32(kSecret) ^ word32(kSecret + 4));
  }
  h = (h ^ h >> 33) * kPrime64[1];
  h = (h ^ h >> 29) * kPrime64[2];
  return h ^ h >> 32;
}

std::uint64_t up_to_240(const std::uint8_t* data, std::size_t size) {
  std::uint64_t sum = size * kPrime64[0];
  if (size <= 128) {
    for (std::size_t i = (size - 1) / 32 + 1; i-- > 0;)
      sum += mixed(data + 16 * i, kSecret + 32 * i) + mixed(data + size - 16 * (i + 1), kSecret + 32 * i + 16);
    return avalanche(sum);
  }
  for (std::size_t i = 0; i < 8; ++i) sum += mixed(data + 16 * i, kSecret + 16 * i);
  sum = avalanche(sum) + mixed(data + size - 16, kSecret + 136 - 17);
  for (std::size_t i = 8; i < size / 16; ++i) sum += mixed(data + 16 * i, kSecret + 16 * (i - 8) + 3);
  return avalanche(sum);
}

}  // namespace

void Xxh3::update(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return;
  total_ += size;
  if (held_ + size <= kBuffer) {
    std::memcpy(buffer_ + held_, data, size);
    held_ += size;
    return;
  }
  // A stripe goes into the lanes when a byte behind it is known: the last one is treated in another way.
  const auto into = INGOT_KERNEL(xxh3_stripes);
  if (held_ != 0) {
    const std::size_t filling = kBuffer - held_;
    std::memcpy(buffer_ + held_, data, filling);
    data += filling, size -= filling;
    stripe_ = into(lanes_.data(), buffer_, kBuffer / kStripe, stripe_);
    std::memcpy(behind_, buffer_ + kBuffer - kStripe, kStripe);
  }
  const std::size_t stripes = (size - 1) / kStripe;
  if (stripes != 0) {
    stripe_ = into(lanes_.data(), data, stripes, stripe_);
    data += stripes * kStripe, size -= stripes * kStripe;
    std::memcpy(behind_, data - kStripe, kStripe);
  }
  std::memcpy(buffer_, data, size);
  held_ = size;
}

std::uint64_t Xxh3::digest() const {
  if (total_ <= 16) return up_to_16(buffer_, held_);
  if (total_ <= 240) return up_to_240(buffer_, held_);
  Lanes lanes = lanes_;
  INGOT_KERNEL(xxh3_stripes)(lanes.data(), buffer_, (held_ - 1) / kStripe, stripe_);
  std::uint8_t joined[kStripe];
  if (held_ >= kStripe) {
    std::memcpy(joined, buffer_ + held_ - kStripe, kStripe);
  } else {
    std::memcpy(joined, behind_ + held_, kStripe - held_);
    std::memcpy(joined + kStripe - held_, buffer_, held_);
  }
  std::uint64_t sum = total_ * kPrime64[0];
  for (std::size_t lane = 0; lane < 8; ++lane) {
    const std::uint64_t key = word64(joined + 8 * lane) ^ word64(kSecret + 121 + 8 * lane);
    lanes[lane ^ 1] += word64(joined + 8 * lane);
    lanes[lane] += (key & 0xffffffffu) * (key >> 32);
  }
  for (std::size_t pair = 0; pair < 4; ++pair)
    sum += folded(lanes[2 * pair] ^ word64(kSecret + 11 + 16 * pair), lanes[2 * pair + 1] ^ word64(kSecret + 19 + 16 * pair));
  return avalanche(sum);
}

}  // namespace ingot
