// Headers of files: a map of structs in strict CBOR, decoded into columns.
//
// The parser accepts only headers that are beyond doubt: a field that the schema does not name, a repeated key, an escape
// in a name, or a number that is not an integer from 0 to below 2**63 throws `Doubt`. Then the slow parser reads the
// header and raises the precise error, if any.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/cbor.h"
#include "core/numbers.h"

namespace ingot::table {

struct Doubt {};

enum class Type : std::uint8_t {
  kNumber,   // a non-negative integer
  kText,     // one of a few texts
  kPlace,    // a text; its position is returned
  kSizes,    // non-negative integers, at most `kMaxRank` of them
  kPair,     // two non-negative integers, whose product may overflow
  kAny,      // any value; its position is returned
  kStruct,   // keys that the schema names
  kMap,      // any keys, with values of one type
};

constexpr std::size_t kMaxRank = 64;

struct Schema {
  Type type;
  bool optional;              // of a field: it may be absent
  std::string key;            // of a field
  std::vector<Schema> inner;  // fields of a struct; the value type of a map
};

// Repeated texts, in the order of their first occurrence; valid as long as the bytes that they refer to.
class Texts {
 public:
  // Returns the code of a text, and adds it if it is new.
  std::int64_t code(std::string_view text);
  std::int64_t find(std::string_view text) const;  // -1 if it is unknown
  // Like `code`, but fast for texts that follow each other in the same order again: `last` is the code of the text
  // before, -1 if there is none.
  std::int64_t code_after(std::int64_t last, std::string_view text);
  // Returns the code that followed `last` the last time if its text is equal; otherwise -1.
  std::int64_t guess(std::int64_t last, std::string_view text) const;
  void follows(std::int64_t last, std::int64_t code);  // remembers it
  // The code that last followed `last`; -1 if none did.
  std::int64_t expected(std::int64_t last) const {
    const auto index = static_cast<std::size_t>(last);
    return last < 0 ? first_ : index < next_.size() ? next_[index] : -1;
  }
  const std::vector<std::string_view>& all() const { return all_; }
  void moved(std::int64_t code, std::string_view text) { all_[static_cast<std::size_t>(code)] = text; }  // the same text

 private:
  std::size_t slot(std::string_view text) const;
  void grow();

  std::vector<std::string_view> all_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int32_t> next_;  // by code, the code that last followed it; -1
  std::int32_t first_ = -1;
};

// Values of one field, in the order of the rows; -1 stands for one that is absent.
//   kNumber           first: values
//   kText             first: codes, places in `texts`
//   kPlace, kAny      first: where they begin, second: bytes
//   kSizes            first: sizes of all rows, second: where each row's begin, and the end, third: their product,
//                     which is -1 for a row without sizes
//   kPair             first, second: its numbers
//   kStruct           first: 1 where it is there; inner: its fields
//   kMap              first: where each row's pairs begin, and the end, second: codes of the keys, inner: the values
struct Column {
  Numbers first, second, third;
  Texts texts;
  std::vector<Column> inner;
  std::vector<std::uint8_t> after;  // kStruct: by a field's index plus one, the field that last followed it
};

struct Table {
  std::size_t begin = 0, end = 0;  // offsets of the map in the bytes
  std::vector<std::string_view> names;  // each once
  Column rows;
};

// Decodes the map under the root's key `under`. All bytes must be one value; everything outside of the map is skipped.
// Throws Doubt.
Table read_cbor(std::string_view data, const Schema& row, std::string_view under, const cbor::Limits& limits);

// Multiplies a size into a product of sizes; throws Doubt past 2**63 - 1, zeros aside. `nonzero` starts at 1.
inline void multiply(std::uint64_t size, std::uint64_t& nonzero, bool& zero) {
  zero = zero || size == 0;
  if (size != 0 && __builtin_mul_overflow(nonzero, size, &nonzero)) throw Doubt{};
  if (nonzero > INT64_MAX) throw Doubt{};
}

}  // namespace ingot::table
