// Heads of records, one after the other: lengths, texts, sizes and numbers, decoded into columns from the bytes at hand.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "core/table.h"

namespace ingot {

// How a head is made up, a letter for each field:
//   t, T  a text that repeats, behind its length in 32 or 64 bits
//   n, N  the same, of a text that does not
//   d     the number of sizes in 32 bits, at most table::kMaxRank, and the sizes in 64
//   I, Q  a number of 32 or 64 bits
//   >     behind the last field: as many bytes as it says are passed over
class Heads {
 public:
  struct Field {
    char letter;
    std::vector<std::int64_t> first, second, third;  // as those of table::Column
    std::vector<std::string_view> names;             // n, N
    table::Texts texts;                              // t, T: those that `first` has the places of
  };

  Heads(std::string_view layout, bool big_endian);

  // Takes up to `count` heads that lie in `data` as a whole, from `at` on; returns where the next one begins, which may be
  // behind the end. Throws table::Doubt for what no writer writes: then nobody asks for the columns.
  std::uint64_t take(std::string_view data, std::uint64_t at, std::uint64_t count);

  std::uint64_t rows() const { return rows_; }
  std::vector<Field>& fields() { return fields_; }

 private:
  // What stands behind the first text of heads that are alike: the first row with it, and the bytes passed over behind it.
  struct Known {
    std::size_t row;
    std::uint64_t skip;
  };

  bool again(std::string_view data, std::uint64_t at);
  bool measure(std::string_view data, std::uint64_t at);
  void learn();
  void put();
  void put_text(Field& field, std::string_view bytes);
  std::uint64_t number(const char* from, std::size_t width) const;
  std::string_view keep(std::string_view text);
  std::string_view valid(std::string_view text);

  bool swapped_, skips_ = false, repeats_ = false;
  std::vector<Field> fields_;
  std::uint64_t rows_ = 0, next_ = 0;
  std::vector<std::string_view> taken_;  // the bytes of each field of the head at hand
  std::deque<std::string> kept_;         // texts, which outlive the bytes that they came in
  std::string_view rest_;                // of the head at hand, what stands behind its first text
  std::uint64_t skip_ = 0;
  table::Texts rests_;
  std::vector<Known> known_;  // by the codes of `rests_`
  std::int64_t last_ = -1;    // of these, that of the head before
  std::size_t misses_ = 0;    // since a head was one again
};

}  // namespace ingot
