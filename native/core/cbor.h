// Strict CBOR (RFC 7049, RFC 8949): a pull parser over untrusted bytes.
//
// Accepted: definite lengths, integers, floats, false, true, null, byte and UTF-8 text strings, arrays, maps with text
// keys; unless `Limits::deterministic`, arguments need not be shortest. Refused by rule: everything else. Duplicate keys,
// and their order, are left to the caller, which has the map. Nothing is allocated, and a count is returned only after
// the bytes for it were checked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ingot::cbor {

// A refusal. `rule` is a rule of spec/cbor.md, `offset` the first byte of the offending item.
class Error : public std::runtime_error {
 public:
  Error(const char* rule, std::size_t offset, const std::string& message)
      : std::runtime_error(message), rule(rule), offset(offset) {}
  const char* rule;
  std::size_t offset;
};

struct Limits {
  std::uint32_t depth;   // nesting depth of arrays and maps
  std::uint64_t items;   // number of data items, map keys included
  bool deterministic;    // accept only the core deterministic encoding (RFC 8949 section 4.2.1)
};

enum class Type : std::uint8_t { kUnsigned, kNegative, kBytes, kText, kArray, kMap, kFalse, kTrue, kNull, kFloat };

// The head of a data item; for strings, also the payload.
struct Item {
  Type type;
  std::size_t offset;      // of the head
  std::uint64_t value;     // the number n (kNegative means -1 - n), or the count of elements or pairs
  double real;             // kFloat
  std::string_view bytes;  // kBytes, kText: valid UTF-8
  bool ascii;              // kText
};

class Cursor {
 public:
  Cursor(const std::uint8_t* data, std::size_t size, Limits limits) : data_(data), size_(size), limits_(limits) {}

  // Reads the next item; after an array or map its elements follow. Throws Error.
  Item next();
  // Reads a map key. Throws Error if it is not a text string.
  Item key();
  // Brackets the reading of an array's or map's elements. Throws Error past the depth limit.
  void enter(const Item& container);
  void leave() { --depth_; }
  // Throws Error unless all bytes were read.
  void finish() const;
  // Returns the offset of the next item.
  std::size_t position() const { return position_; }

  // A fast version of `next` for the most frequent items in their usual encodings. Returns false, without reading, for
  // other items and for items that need a detailed check.
  bool quick_number(std::uint64_t& value);
  bool quick_text(std::string_view& text);
  bool quick_text_is(std::string_view text);  // certainly UTF-8; false from 24 bytes on

 private:
  std::uint64_t argument(std::size_t start, unsigned major, unsigned info);
  void string(Item& item);
  void simple(Item& item, unsigned info);
  std::size_t remaining() const { return size_ - position_; }

  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
  Limits limits_;
  std::uint64_t items_ = 0;
  std::uint32_t depth_ = 0;
};

// Whether the bytes are UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing past U+10FFFF); sets `ascii`.
bool valid_utf8(std::string_view text, bool& ascii);

// Returns whether two different map keys are in the order of the core deterministic encoding: encoded keys compare by
// their lengths first, which are in their heads.
inline bool in_order(std::string_view first, std::string_view second) {
  return first.size() != second.size() ? first.size() < second.size() : first < second;
}

inline bool Cursor::quick_number(std::uint64_t& value) {
  if (remaining() == 0 || items_ == limits_.items) return false;
  const std::uint8_t* bytes = data_ + position_;
  const unsigned initial = bytes[0];
  if (initial > 0x1b) return false;
  const std::size_t width = initial < 24 ? 0 : std::size_t{1} << (initial - 24);
  if (remaining() <= width) return false;
  std::uint64_t result = width == 0 ? initial : 0;
  for (std::size_t i = 1; i <= width; ++i) result = result << 8 | bytes[i];
  if (limits_.deterministic && width != 0 && (width == 1 ? result < 24 : result >> 4 * width == 0)) return false;
  value = result;
  position_ += 1 + width;
  ++items_;
  return true;
}

inline bool Cursor::quick_text(std::string_view& text) {
  if (remaining() < 2 || items_ == limits_.items) return false;
  const std::uint8_t* bytes = data_ + position_;
  const unsigned initial = bytes[0];
  if (initial < 0x60 || initial > 0x78) return false;
  const std::size_t head = initial == 0x78 ? 2 : 1, size = initial == 0x78 ? bytes[1] : initial - 0x60;
  if (remaining() - head < size || (limits_.deterministic && head == 2 && size < 24)) return false;
  const std::string_view result(reinterpret_cast<const char*>(bytes + head), size);
  bool ascii = false;
  if (!valid_utf8(result, ascii)) return false;
  text = result;
  position_ += head + size;
  ++items_;
  return true;
}

inline bool Cursor::quick_text_is(std::string_view text) {
  if (remaining() <= text.size() || text.size() >= 24 || items_ == limits_.items) return false;
  const std::uint8_t* bytes = data_ + position_;
  if (bytes[0] != 0x60 + text.size() || std::memcmp(bytes + 1, text.data(), text.size()) != 0) return false;
  position_ += 1 + text.size();
  ++items_;
  return true;
}

}  // namespace ingot::cbor
