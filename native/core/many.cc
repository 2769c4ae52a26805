#include "core/many.h"

#include <charconv>
#include <cstring>

#include "core/crc32c.h"

namespace ingot {
namespace {

// The number that all of these hexadecimal digits are; false where there is anything else.
bool number_of(std::string_view digits, std::uint64_t& number) {
  const char* end = digits.data() + digits.size();
  const std::from_chars_result found = std::from_chars(digits.data(), end, number, 16);
  return found.ec == std::errc() && found.ptr == end && digits.front() != '-';
}

template <class Word>
Word word_at(const std::uint8_t* data) {
  Word word = 0;
  for (std::size_t byte = 0; byte < sizeof(Word); ++byte) word |= static_cast<Word>(data[byte]) << (8 * byte);
  return word;
}

}  // namespace

bool proves(std::string_view digest, const std::uint8_t* data, std::size_t size) {
  constexpr std::string_view kPrefix = "crc32c:0x";
  if (digest.size() != kPrefix.size() + 8 || digest.substr(0, kPrefix.size()) != kPrefix) return false;
  std::uint64_t expected = 0;
  return number_of(digest.substr(kPrefix.size()), expected) && expected == crc32c(0, data, size);
}

bool ascend(const std::uint8_t* positions, std::size_t count, std::int64_t limit) {
  std::int64_t last = -1;
  for (std::size_t i = 0; i < count; ++i) {
    const auto next = static_cast<std::int64_t>(word_at<std::uint64_t>(positions + 8 * i));
    if (next <= last || next >= limit) return false;
    last = next;
  }
  return true;
}

bool finite(const std::uint8_t* values, std::size_t count) {
  constexpr std::uint32_t kExponent = 0x7F800000u;
  std::size_t odd = 0;
  for (std::size_t i = 0; i < count; ++i) odd += (word_at<std::uint32_t>(values + 4 * i) & kExponent) == kExponent;
  return odd == 0;
}

}  // namespace ingot
