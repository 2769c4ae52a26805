#include "core/groups.h"

#include <algorithm>

#include "core/cbor.h"

namespace ingot {
namespace {

using table::Doubt;

constexpr std::size_t kWidth = 4;      // bytes of a text's length
constexpr std::size_t kMostHeads = 16; // of a tensor

// Little-endian, wherever it lies.
std::uint64_t number(const char* from, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = width; i-- > 0;) value = value << 8 | static_cast<std::uint8_t>(from[i]);
  return value;
}

// Takes pieces off a head whose end may not be there.
class Pieces {
 public:
  explicit Pieces(std::string_view data) : data_(data) {}

  bool number(std::size_t width, std::uint64_t& value) {
    std::string_view bytes;
    if (!piece(width, bytes)) return false;
    value = ingot::number(bytes.data(), width);
    return true;
  }
  bool piece(std::uint64_t size, std::string_view& out) {
    if (size > data_.size() - at_) return false;
    out = data_.substr(at_, static_cast<std::size_t>(size));
    at_ += out.size();
    return true;
  }
  bool text(std::string_view& out) {
    std::uint64_t size = 0;
    return number(kWidth, size) && piece(size, out);
  }
  std::size_t taken() const { return at_; }

 private:
  std::string_view data_;
  std::size_t at_ = 0;
};

// A head behind its name.
struct Rest {
  std::string_view field, dtype;
  std::uint64_t elements = 1, length = 0;
  std::size_t size = 0;

  // False where it is not all there.
  bool read(std::string_view data) {
    Pieces in(data);
    std::uint64_t rank = 0, nonzero = 1;
    if (!in.text(field) || !in.text(dtype) || !in.number(4, rank)) return false;
    if (rank > table::kMaxRank) throw Doubt{};
    bool zero = false;
    for (; rank > 0; --rank) {
      std::uint64_t value = 0;
      if (!in.number(8, value)) return false;
      table::multiply(value, nonzero, zero);
    }
    if (!in.number(8, length)) return false;
    if (length > INT64_MAX) throw Doubt{};
    elements = zero ? 0 : nonzero;
    size = in.taken();
    return true;
  }
};

}  // namespace

Groups::Groups(std::vector<std::string_view> names, std::uint64_t start)
    : names_(std::move(names)), seen_(names_.size()), position_(start), nodes_{{0, 0}} {
  for (const std::string_view name : names_) longest_ = std::max(longest_, name.size());
}

std::uint64_t Groups::take(std::string_view data) {
  std::uint64_t at = 0;
  while (at < data.size()) {
    const std::uint64_t step = head(data.substr(static_cast<std::size_t>(at)));
    if (step == 0) break;
    position_ += step;
    at += step;
  }
  return at;
}

// Takes one head; returns how far the next one is, 0 where it is not all there.
std::uint64_t Groups::head(std::string_view data) {
  Pieces in(data);
  std::string_view name;
  if (!in.text(name)) return 0;
  const bool goes_on = is_at_hand(name);
  if (goes_on && heads_ == kMostHeads) throw Doubt{};  // before they take memory: each in turn is kept
  const std::size_t row = goes_on ? row_ : find(name);
  const std::size_t node = follow(goes_on ? node_ : 0, data.substr(in.taken()));
  if (node == 0) return 0;
  const std::size_t kind = nodes_[node].kind;
  const std::uint64_t size = in.taken() + static_cast<std::uint64_t>(kinds_.size[kind]);
  const std::uint64_t step = size + static_cast<std::uint64_t>(kinds_.length[kind]);  // both are below 2**63
  if (step > INT64_MAX || position_ > INT64_MAX - step) throw Doubt{};
  if (!goes_on) {
    finish();
    if (seen_[row]) throw Doubt{};  // records of a tensor in two places
    seen_[row] = true;
    rows_.push_back(static_cast<std::int64_t>(row));
    starts_.push_back(static_cast<std::int64_t>(position_));
  }
  heads_ = goes_on ? heads_ + 1 : 1;
  open_ = true;
  row_ = row;
  node_ = node;
  return step;
}

void Groups::finish() {
  if (!open_) return;
  open_ = false;
  Node& last = nodes_[node_];
  if (last.group < 0) {
    last.group = static_cast<std::int64_t>(begins_.size());
    begins_.push_back(static_cast<std::int64_t>(members_.size()));
    std::vector<std::size_t> kinds;
    for (std::size_t node = node_; node != 0; node = nodes_[node].before) kinds.push_back(nodes_[node].kind);
    for (std::size_t i = kinds.size(); i-- > 0;) members_.push_back(static_cast<std::int64_t>(kinds[i]));
  }
  groups_.push_back(last.group);
}

// The number of a name: names come in the order in which they are known, or nearly.
std::size_t Groups::find(std::string_view name) {
  const std::size_t next = rows_.empty() ? 0 : row_ + 1;
  if (next < names_.size() && names_[next] == name) return next;
  if (known_.all().empty()) {
    for (const std::string_view each : names_) known_.code(each);
  }
  const std::int64_t found = known_.find(name);
  if (found < 0) throw Doubt{};
  return static_cast<std::size_t>(found);
}

// The node behind another that stands for the head whose name ends before `behind`; 0 where it is not all there.
std::size_t Groups::follow(std::size_t node, std::string_view behind) {
  const std::size_t likely = nodes_[node].likely;
  if (likely != 0 && behind.starts_with(rests_.all()[nodes_[likely].kind])) return likely;
  Rest rest;
  if (!rest.read(behind)) return 0;
  const std::size_t kind = learn(behind, rest.size);
  const auto [place, is_new] = behind_.try_emplace({node, kind}, nodes_.size());
  if (is_new) nodes_.push_back({kind, node});
  nodes_[node].likely = place->second;
  return place->second;
}

// The kind of a head, which may be new.
std::size_t Groups::learn(std::string_view behind, std::size_t size) {
  const std::size_t known = rests_.all().size();
  const std::int64_t code = rests_.code(behind.substr(0, size));
  if (static_cast<std::size_t>(code) < known) return static_cast<std::size_t>(code);
  const std::string_view kept = keep(behind.substr(0, size));
  rests_.moved(code, kept);
  Rest rest;
  rest.read(kept);
  bool ascii = false;
  if (!cbor::valid_utf8(rest.field, ascii) || !cbor::valid_utf8(rest.dtype, ascii)) throw Doubt{};
  kinds_.field.push_back(kinds_.fields.code(rest.field));
  kinds_.dtype.push_back(kinds_.dtypes.code(rest.dtype));
  kinds_.elements.push_back(static_cast<std::int64_t>(rest.elements));
  kinds_.length.push_back(static_cast<std::int64_t>(rest.length));
  kinds_.size.push_back(static_cast<std::int64_t>(rest.size));
  return static_cast<std::size_t>(code);
}

std::string_view Groups::keep(std::string_view text) { return kept_.emplace_back(text); }

}  // namespace ingot
