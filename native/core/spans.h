// Many short spans of bytes, looked at together. Those that do not lie in the bytes as a whole are none.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ingot::spans {

// A text that precedes a fixed number of digits.
struct Pattern {
  std::string_view prefix;
  std::size_t digits;
};

// Whether a text is one of the forms with as many of these digits behind it.
bool spelled(std::string_view text, const std::vector<Pattern>& patterns, const bool (&is_digit)[256]);

// Sets for each of `count` rows of `size` bytes whether `data` has the same bytes at the row's place.
void same(std::string_view data, const std::int64_t* starts, const char* rows, std::size_t count, std::size_t size, bool* out);

// Whether all spans hold nothing but zeros.
bool zeros(std::string_view data, const std::int64_t* starts, const std::int64_t* lengths, std::size_t count);

}  // namespace ingot::spans
