// Functions on many short spans of bytes at a time. A span that is not completely inside the bytes counts as a
// mismatch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ingot::spans {

// A text followed by a fixed number of digits.
struct Pattern {
  std::string_view prefix;
  std::size_t digits;
};

// Returns whether a text is one of the patterns: its prefix, followed by its number of digits.
bool spelled(std::string_view text, const std::vector<Pattern>& patterns, const bool (&is_digit)[256]);

// Sets for each of `count` rows of `size` bytes whether `data` has the same bytes at the row's position.
void same(std::string_view data, const std::int64_t* starts, const char* rows, std::size_t count, std::size_t size, bool* out);

// Returns whether all spans contain only zeros.
bool zeros(std::string_view data, const std::int64_t* starts, const std::int64_t* lengths, std::size_t count);

}  // namespace ingot::spans
