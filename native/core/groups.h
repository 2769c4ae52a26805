// Records of tensors whose names are known: the heads of a tensor's records follow each other, each with its name first.
//
// What stands behind the names is much the same from tensor to tensor. So it is decoded once for each kind of head, and a
// tensor is told by its group, the kinds of its heads in turn.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/numbers.h"
#include "core/table.h"

namespace ingot {

// A head: texts behind their lengths in 32 bits (a tensor's name, a field, an element type), the number of sizes in 32 bits
// and the sizes in 64, and in 64 bits how many bytes follow it.
class Groups {
 public:
  // By kind of head: codes of its texts, the product of its sizes, the bytes behind the head, those of it behind the name.
  struct Kinds {
    table::Texts fields, dtypes;
    table::Numbers field, dtype, elements, length, size;
  };

  // `names` outlive this, and are each there once; the first head lies at `start`.
  Groups(std::vector<std::string_view> names, std::uint64_t start);

  // Takes the heads that lie in `data` as a whole, which begins where the next one does; returns how far the one behind
  // them is, which may be behind the end. Throws table::Doubt for what no writer writes: then nobody asks for the rest.
  std::uint64_t take(std::string_view data);
  // Ends the last tensor.
  void finish();

  std::size_t longest() const { return longest_; }  // name
  // By tensor, in the order of the file: number of its name, group, where its first head begins.
  const table::Numbers& rows() const { return rows_; }
  const table::Numbers& groups() const { return groups_; }
  const table::Numbers& starts() const { return starts_; }
  // By group, where its kinds begin in `members`, and the end.
  const table::Numbers& begins() const { return begins_; }
  const table::Numbers& members() const { return members_; }
  const Kinds& kinds() const { return kinds_; }

 private:
  // Heads in turn: of which kind the last is, what came before it, and what came behind it when it came last.
  struct Node {
    std::size_t kind, before, likely = 0;
    std::int64_t group = -1;
  };

  std::uint64_t head(std::string_view data);
  bool is_at_hand(std::string_view name) const { return open_ && names_[row_] == name; }
  std::size_t find(std::string_view name);
  std::size_t follow(std::size_t node, std::string_view behind);
  std::size_t learn(std::string_view behind, std::size_t size);
  std::string_view keep(std::string_view text);

  std::vector<std::string_view> names_;
  std::size_t longest_ = 0;
  std::vector<bool> seen_;  // by name
  table::Texts known_;      // names, once one did not come in turn
  bool open_ = false;       // a tensor is at hand: its name, and the heads that it has so far
  std::size_t row_ = 0, node_ = 0, heads_ = 0;
  std::uint64_t position_;
  std::vector<Node> nodes_;  // the first stands for no heads
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> behind_;  // by node and kind
  table::Texts rests_;       // heads behind their names, by kind
  std::deque<std::string> kept_;
  Kinds kinds_;
  table::Numbers rows_, groups_, starts_, begins_, members_;
};

}  // namespace ingot
