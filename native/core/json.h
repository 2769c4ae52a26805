// Strict JSON (RFC 8259): a pull parser for headers as writers make them. Throws table::Doubt for all else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

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
  std::string_view decimal();  // digits, perhaps a fraction and a small negative exponent
  Frame map();
  bool key(Frame& frame, std::string_view& key);  // false at the map's end
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

}  // namespace ingot::json
