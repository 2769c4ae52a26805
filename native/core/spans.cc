#include "core/spans.h"

#include <algorithm>
#include <cstring>

namespace ingot::spans {
namespace {

bool inside(std::string_view data, std::int64_t start, std::uint64_t size) {
  return start >= 0 && size <= data.size() && static_cast<std::uint64_t>(start) <= data.size() - size;
}

}  // namespace

bool spelled(std::string_view text, const std::vector<Pattern>& patterns, const bool (&is_digit)[256]) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const Pattern& pattern) {
    if (text.size() < pattern.prefix.size() || text.size() - pattern.prefix.size() != pattern.digits) return false;
    if (!text.starts_with(pattern.prefix)) return false;
    const std::string_view digits = text.substr(pattern.prefix.size());
    return std::all_of(digits.begin(), digits.end(), [&](char c) { return is_digit[static_cast<std::uint8_t>(c)]; });
  });
}

void same(std::string_view data, const std::int64_t* starts, const char* rows, std::size_t count, std::size_t size, bool* out) {
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = inside(data, starts[i], size) && std::memcmp(data.data() + starts[i], rows + i * size, size) == 0;
  }
}

bool zeros(std::string_view data, const std::int64_t* starts, const std::int64_t* lengths, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (lengths[i] < 0 || !inside(data, starts[i], static_cast<std::uint64_t>(lengths[i]))) return false;
    const std::string_view span = data.substr(static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(lengths[i]));
    if (span.find_first_not_of('\0') != std::string_view::npos) return false;
  }
  return true;
}

}  // namespace ingot::spans
