#include "core/json.h"

#include "core/cbor.h"
#include "core/table.h"

namespace ingot::json {
namespace {

using table::Doubt;

constexpr std::size_t kMaxDepth = 64, kLongestDecimal = 24;

bool digit(char c) { return c >= '0' && c <= '9'; }
bool space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

}  // namespace

char Cursor::peek() {
  while (at_ < data_.size() && space(data_[at_])) ++at_;
  if (at_ == data_.size()) throw Doubt{};
  return data_[at_];
}

std::size_t Cursor::place() {
  peek();
  return at_;
}

void Cursor::take(char wanted) {
  if (peek() != wanted) throw Doubt{};
  ++at_;
}

std::uint64_t Cursor::number() {
  const char lead = peek();
  if (!digit(lead)) throw Doubt{};
  std::uint64_t value = 0;
  std::size_t digits = 0;
  for (; at_ < data_.size() && digit(data_[at_]); ++at_, ++digits) value = value * 10 + static_cast<std::uint64_t>(data_[at_] - '0');
  if (digits > 18 || (lead == '0' && digits > 1)) throw Doubt{};
  if (at_ < data_.size() && (data_[at_] == '.' || data_[at_] == 'e' || data_[at_] == 'E')) throw Doubt{};
  return value;
}

std::string_view Cursor::text() {
  take('"');
  const std::size_t start = at_;
  bool ascii = true;
  while (at_ < data_.size() && data_[at_] != '"') {
    const char c = data_[at_++];
    if (c == '\\' || (static_cast<signed char>(c) >= 0 && c < 0x20)) throw Doubt{};
    ascii = ascii && static_cast<signed char>(c) >= 0;
  }
  if (at_ == data_.size()) throw Doubt{};
  const std::string_view text = data_.substr(start, at_++ - start);
  if (!ascii && !cbor::valid_utf8(text, ascii)) throw Doubt{};
  return text;
}

std::string_view Cursor::decimal() {
  const std::size_t start = place();
  const auto digits = [&] {
    const std::size_t from = at_;
    while (at_ < data_.size() && digit(data_[at_])) ++at_;
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

Frame Cursor::map() {
  take('{');
  return {};
}

bool Cursor::more(Frame& frame, char end) {
  if (peek() == end) {
    ++at_;
    return false;
  }
  if (!frame.first) take(',');
  frame.first = false;
  return true;
}

bool Cursor::key(Frame& frame, std::string_view& key) {
  if (!more(frame, '}')) return false;
  key = text();
  take(':');
  return true;
}

Frame Cursor::array() {
  take('[');
  return {};
}

bool Cursor::element(Frame& frame) {
  if (!more(frame, ']')) return false;
  if (peek() == ']') throw Doubt{};  // a comma at the end
  return true;
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
      while (at_ < data_.size() && !space(data_[at_]) && std::string_view(",:{}[]\"").find(data_[at_]) == std::string_view::npos) ++at_;
      if (at_ == start) throw Doubt{};
    }
  } while (depth != 0);
}

void Cursor::finish() {
  while (at_ < data_.size() && space(data_[at_])) ++at_;
  if (at_ != data_.size()) throw Doubt{};
}

}  // namespace ingot::json
