#include "core/json.h"

namespace ingot::json {
namespace {

using table::Doubt;

constexpr std::size_t kMaxDepth = 64, kLongestDecimal = 24;

}  // namespace

std::string_view Cursor::decimal() {
  const std::size_t start = place();
  const auto digits = [&] {
    const std::size_t from = at_;
    while (at_ < data_.size() && is_digit(data_[at_])) ++at_;
    if (at_ == from) throw Doubt{};
    return at_ - from;
  };
  const bool zero = data_[at_] == '0';
  if (digits() > 1 && zero) throw Doubt{};
  if (at_ < data_.size() && data_[at_] == '.') {
    ++at_;
    digits();
  }
  if (at_ < data_.size() && (data_[at_] == 'e' || data_[at_] == 'E')) {
    ++at_;
    if (at_ == data_.size() || data_[at_++] != '-') throw Doubt{};
    if (digits() > 2) throw Doubt{};
  }
  if (at_ - start > kLongestDecimal) throw Doubt{};
  return data_.substr(start, at_ - start);
}

void Cursor::string() {
  for (++at_; at_ < data_.size(); ++at_) {
    if (data_[at_] == '"') {
      ++at_;
      return;
    }
    if (data_[at_] == '\\') ++at_;
  }
  throw Doubt{};
}

void Cursor::skip() {
  char open[kMaxDepth];
  std::size_t depth = 0;
  do {
    const char next = peek();
    if (next == '"') {
      string();
    } else if (next == '{' || next == '[') {
      if (depth == kMaxDepth) throw Doubt{};
      open[depth++] = next;
      ++at_;
    } else if (next == '}' || next == ']') {
      if (depth == 0 || open[--depth] != (next == '}' ? '{' : '[')) throw Doubt{};
      ++at_;
    } else if (depth != 0 && (next == ',' || next == ':')) {
      ++at_;
    } else {
      const std::size_t start = at_;
      while (at_ < data_.size() && !is_space(data_[at_]) && std::string_view(",:{}[]\"").find(data_[at_]) == std::string_view::npos) ++at_;
      if (at_ == start) throw Doubt{};
    }
  } while (depth != 0);
}

void Cursor::finish() {
  while (at_ < data_.size() && is_space(data_[at_])) ++at_;
  if (at_ != data_.size()) throw Doubt{};
}

}  // namespace ingot::json
