// Strict JSON (RFC 8259): a pull parser for headers as writers make them. Throws table::Doubt for all else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/cbor.h"
#include "core/table.h"

namespace ingot::json {

// What is left of an array or object that is being read.
struct Frame {
  bool first = true;
};

class Cursor {
 public:
  explicit Cursor(std::string_view data) : data_(data) {}

  // Where the next value begins, or the end.
  std::size_t place();
  // Where the last value ended.
  std::size_t position() const { return at_; }

  std::uint64_t number();     // a natural one below 2**63
  std::string_view text();    // without escapes
  bool text_is(std::string_view text);  // passes over a text if it is this one, which was one before
  bool value_is(std::string_view value);  // passes over an object if it is spelled like this one, which was one before
  std::string_view decimal();  // digits, perhaps a fraction and a small negative exponent
  Frame map();
  bool key(Frame& frame, std::string_view& key);  // false at the map's end
  // Passes over a key, up to its value, if it is the text and stands as writers have it: then it is the next one.
  bool key_is(Frame& frame, std::string_view text);
  Frame array();
  bool element(Frame& frame);
  // Passes over a value: strings and brackets are matched, all else is for a parser that says what is wrong.
  void skip();
  void finish();

 private:
  char peek();
  void take(char wanted);
  bool more(Frame& frame, char end);  // past the comma; false past the end
  void string();

  std::string_view data_;
  std::size_t at_ = 0;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

inline char Cursor::peek() {
  while (at_ < data_.size() && is_space(data_[at_])) ++at_;
  if (at_ == data_.size()) throw table::Doubt{};
  return data_[at_];
}

inline std::size_t Cursor::place() {
  peek();
  return at_;
}

inline void Cursor::take(char wanted) {
  if (peek() != wanted) throw table::Doubt{};
  ++at_;
}

inline std::uint64_t Cursor::number() {
  const char lead = peek();
  if (!is_digit(lead)) throw table::Doubt{};
  std::uint64_t value = 0;
  std::size_t digits = 0;
  for (; at_ < data_.size() && is_digit(data_[at_]); ++at_, ++digits) value = value * 10 + static_cast<std::uint64_t>(data_[at_] - '0');
  if (digits > 18 || (lead == '0' && digits > 1)) throw table::Doubt{};
  if (at_ < data_.size() && (data_[at_] == '.' || data_[at_] == 'e' || data_[at_] == 'E')) throw table::Doubt{};
  return value;
}

inline std::string_view Cursor::text() {
  take('"');
  const std::size_t start = at_;
  // Eight bytes at a time while none of them ends the text or is odd: a quote, a backslash, below a space, or no ASCII.
  constexpr std::uint64_t kOnes = 0x0101010101010101u, kHighs = 0x8080808080808080u;
  const auto zero = [](std::uint64_t word) { return (word - kOnes) & ~word; };
  for (std::uint64_t word; data_.size() - at_ >= sizeof word; at_ += sizeof word) {
    std::memcpy(&word, data_.data() + at_, sizeof word);
    const std::uint64_t odd = word | zero(word ^ kOnes * '"') | zero(word ^ kOnes * '\\') | ((word - kOnes * 0x20) & ~word);
    if ((odd & kHighs) != 0) break;
  }
  bool ascii = true;
  while (at_ < data_.size() && data_[at_] != '"') {
    const char c = data_[at_++];
    if (c == '\\' || (static_cast<signed char>(c) >= 0 && c < 0x20)) throw table::Doubt{};
    ascii = ascii && static_cast<signed char>(c) >= 0;
  }
  if (at_ == data_.size()) throw table::Doubt{};
  const std::string_view text = data_.substr(start, at_++ - start);
  if (!ascii && !cbor::valid_utf8(text, ascii)) throw table::Doubt{};
  return text;
}

inline bool Cursor::text_is(std::string_view text) {
  const std::size_t size = text.size() + 2;
  if (data_.size() - at_ < size) return false;
  const char* from = data_.data() + at_;
  if (from[0] != '"' || from[size - 1] != '"' || std::memcmp(from + 1, text.data(), text.size()) != 0) return false;
  at_ += size;
  return true;
}

inline bool Cursor::value_is(std::string_view value) {
  if (!data_.substr(place()).starts_with(value)) return false;
  at_ += value.size();
  return true;
}

inline Frame Cursor::map() {
  take('{');
  return {};
}

inline bool Cursor::more(Frame& frame, char end) {
  if (peek() == end) {
    ++at_;
    return false;
  }
  if (!frame.first) take(',');
  frame.first = false;
  return true;
}

inline bool Cursor::key(Frame& frame, std::string_view& key) {
  if (!more(frame, '}')) return false;
  key = text();
  take(':');
  return true;
}

inline bool Cursor::key_is(Frame& frame, std::string_view text) {
  const std::size_t start = at_ + !frame.first, size = text.size() + 3;
  if (data_.size() < start || data_.size() - start < size) return false;
  const char* from = data_.data() + start;
  if (!frame.first && from[-1] != ',') return false;
  if (from[0] != '"' || from[size - 2] != '"' || from[size - 1] != ':') return false;
  if (std::memcmp(from + 1, text.data(), text.size()) != 0) return false;
  at_ = start + size;
  frame.first = false;
  return true;
}

inline Frame Cursor::array() {
  take('[');
  return {};
}

inline bool Cursor::element(Frame& frame) {
  if (!more(frame, ']')) return false;
  if (peek() == ']') throw table::Doubt{};  // a comma at the end
  return true;
}

}  // namespace ingot::json
