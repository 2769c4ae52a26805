#include "core/table.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/cbor.h"
#include "core/table_cbor.h"

namespace ingot::table {
namespace {

constexpr std::size_t kMaxPairs = 64;
constexpr std::size_t kFar = 1 << 8;    // entries with equal hashes; more than these indicate input made to be slow

// Hashes eight bytes at a time: names are long, and all names are hashed.
std::size_t hash(std::string_view text) {
  constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15u;
  std::uint64_t result = text.size() * kPrime;
  const auto mix = [&](std::uint64_t word) {
    result = (result ^ word) * kPrime;
    result ^= result >> 29;
  };
  std::uint64_t word = 0;
  std::size_t index = 0;
  for (; text.size() - index >= sizeof word; index += sizeof word) {
    std::memcpy(&word, text.data() + index, sizeof word);
    mix(word);
  }
  word = 0;
  std::memcpy(&word, text.data() + index, text.size() - index);
  mix(word);
  return static_cast<std::size_t>(result ^ result >> 32);
}

// Throws Doubt if a name occurs twice.
void require_distinct(const std::vector<std::string_view>& names) {
  std::size_t room = 16;
  while (room < 2 * names.size()) room *= 2;
  if (names.size() > UINT32_MAX - 1) throw Doubt{};
  std::vector<std::uint32_t> slots(room, 0);  // by a name's index plus one
  for (std::size_t number = 0; number < names.size(); ++number) {
    std::size_t index = hash(names[number]) & (room - 1), far = 0;
    for (; slots[index] != 0; index = (index + 1) & (room - 1)) {
      if (++far > kFar || names[slots[index] - 1] == names[number]) throw Doubt{};
    }
    slots[index] = static_cast<std::uint32_t>(number + 1);
  }
}

class Reader {
 public:
  Reader(std::string_view data, Cbor& in) : data_(data), in_(in) {}

  Table run(const Schema& row, std::string_view under) {
    Table table;
    shape(row, table.rows);
    auto frame = in_.map();
    std::string_view key;
    bool result = false;
    while (in_.key(frame, key)) {
      if (key != under) {
        in_.skip();
        continue;
      }
      if (result) throw Doubt{};
      result = true;
      rows(row, table);
    }
    if (!result) throw Doubt{};
    in_.finish();
    close(row, table.rows);
    require_distinct(table.names);
    return table;
  }

 private:
  void rows(const Schema& row, Table& table) {
    table.begin = in_.position();
    auto frame = in_.map();
    std::string_view name;
    while (in_.key(frame, name)) {
      table.names.push_back(name);
      value(row, table.rows);
    }
    table.end = in_.position();
  }

  static void shape(const Schema& schema, Column& column) {
    column.inner.resize(schema.inner.size());
    if (schema.type == Type::kStruct) {  // writers use the same order for all entries
      column.after.resize(schema.inner.size() + 1);
      std::iota(column.after.begin(), column.after.end(), std::uint8_t{0});
    }
    for (std::size_t i = 0; i < schema.inner.size(); ++i) shape(schema.inner[i], column.inner[i]);
  }

  // Adds the end to columns of beginnings.
  static void close(const Schema& schema, Column& column) {
    if (schema.type == Type::kSizes) column.second.push_back(static_cast<std::int64_t>(column.first.size()));
    if (schema.type == Type::kMap) column.first.push_back(static_cast<std::int64_t>(column.second.size()));
    for (std::size_t i = 0; i < schema.inner.size(); ++i) close(schema.inner[i], column.inner[i]);
  }

  // The recursion ends because the schema is finite.
  void value(const Schema& schema, Column& column) {
    switch (schema.type) {
      case Type::kNumber: column.first.push_back(static_cast<std::int64_t>(in_.number())); return;
      case Type::kText: text(column); return;
      case Type::kPlace: store(column, in_.text()); return;
      case Type::kSizes: sizes(column); return;
      case Type::kPair: pair(column); return;
      case Type::kStruct: fields(schema, column); return;
      case Type::kMap: pairs(schema, column); return;
      case Type::kAny: break;
    }
    const std::size_t begin = in_.position();
    in_.skip();
    store(column, data_.substr(begin, in_.position() - begin));
  }

  void text(Column& column) {
    const std::int64_t last = column.first.empty() ? -1 : column.first.back(), code = column.texts.expected(last);
    const bool is_known = code >= 0 && in_.text_is(column.texts.all()[static_cast<std::size_t>(code)]);
    column.first.push_back(is_known ? code : column.texts.code_after(last, in_.text()));
  }

  void store(Column& column, std::string_view text) {
    column.first.push_back(text.data() - data_.data());
    column.second.push_back(static_cast<std::int64_t>(text.size()));
  }

  void sizes(Column& column) {
    const std::size_t begin = column.first.size();
    column.second.push_back(static_cast<std::int64_t>(begin));
    std::uint64_t nonzero = 1;
    bool zero = false;
    auto frame = in_.array();
    while (in_.element(frame)) {
      const std::uint64_t size = in_.number();
      column.first.push_back(static_cast<std::int64_t>(size));
      multiply(size, nonzero, zero);
      if (column.first.size() - begin > kMaxRank) throw Doubt{};
    }
    column.third.push_back(zero ? 0 : static_cast<std::int64_t>(nonzero));
  }

  void pair(Column& column) {
    auto frame = in_.array();
    for (Numbers* local : {&column.first, &column.second}) {
      if (!in_.element(frame)) throw Doubt{};
      local->push_back(static_cast<std::int64_t>(in_.number()));
    }
    if (in_.element(frame)) throw Doubt{};
  }

  void fields(const Schema& schema, Column& column) {
    column.first.push_back(1);
    const std::size_t count = schema.inner.size();
    std::uint64_t seen = 0;
    std::size_t last = 0;  // one more than the current field
    const auto take = [&](std::size_t field) {
      if (seen >> field & 1) throw Doubt{};
      seen |= std::uint64_t{1} << field;
      value(schema.inner[field], column.inner[field]);
      last = field + 1;
    };
    auto frame = in_.map();
    std::string_view key;
    for (;;) {
      std::size_t likely = column.after[last];
      while (likely < count && in_.key_is(frame, schema.inner[likely].key)) {
        take(likely);
        likely = column.after[last];
      }
      if (!in_.key(frame, key)) break;
      std::size_t tried = 0;
      while (tried < count && schema.inner[likely % count].key != key) ++likely, ++tried;
      if (tried == count) throw Doubt{};
      column.after[last] = static_cast<std::uint8_t>(likely % count);
      take(likely % count);
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (seen >> i & 1) continue;
      if (!schema.inner[i].optional) throw Doubt{};
      absent(schema.inner[i], column.inner[i]);
    }
  }

  void pairs(const Schema& schema, Column& column) {
    const std::size_t begin = column.second.size();
    column.first.push_back(static_cast<std::int64_t>(begin));
    auto frame = in_.map();
    std::string_view key;
    for (;;) {
      const std::int64_t last = column.second.empty() ? -1 : column.second.back();
      std::int64_t code = column.texts.expected(last);
      if (code < 0 || !in_.key_is(frame, column.texts.all()[static_cast<std::size_t>(code)])) {
        if (!in_.key(frame, key)) break;
        code = column.texts.code_after(last, key);
      }
      for (std::size_t i = begin; i < column.second.size(); ++i) {
        if (column.second[i] == code) throw Doubt{};
      }
      column.second.push_back(code);
      if (column.second.size() - begin > kMaxPairs) throw Doubt{};
      value(schema.inner[0], column.inner[0]);
    }
  }

  static void absent(const Schema& schema, Column& column) {
    switch (schema.type) {
      case Type::kSizes:
        column.second.push_back(static_cast<std::int64_t>(column.first.size()));
        column.third.push_back(-1);
        return;
      case Type::kMap: column.first.push_back(static_cast<std::int64_t>(column.second.size())); return;
      case Type::kStruct:
        column.first.push_back(0);
        for (std::size_t i = 0; i < schema.inner.size(); ++i) absent(schema.inner[i], column.inner[i]);
        return;
      case Type::kPlace:
      case Type::kPair:
      case Type::kAny: column.second.push_back(-1); [[fallthrough]];
      default: column.first.push_back(-1);
    }
  }

  std::string_view data_;
  Cbor& in_;
};

}  // namespace

// Returns the slot that contains the text's code, or the free slot for it.
std::size_t Texts::slot(std::string_view text) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t index = hash(text) & mask;
  for (std::size_t far = 0; slots_[index] >= 0 && all_[static_cast<std::size_t>(slots_[index])] != text;
       index = (index + 1) & mask) {
    if (++far > kFar) throw Doubt{};
  }
  return index;
}

std::int64_t Texts::find(std::string_view text) const { return slots_.empty() ? -1 : slots_[slot(text)]; }

std::int64_t Texts::code(std::string_view text) {
  if (2 * all_.size() >= slots_.size()) grow();
  std::int32_t& code = slots_[slot(text)];
  if (code < 0) {
    code = static_cast<std::int32_t>(all_.size());
    all_.push_back(text);
  }
  return code;
}

std::int64_t Texts::guess(std::int64_t last, std::string_view text) const {
  const std::int64_t code = expected(last);
  return code >= 0 && all_[static_cast<std::size_t>(code)] == text ? code : -1;
}

void Texts::follows(std::int64_t last, std::int64_t code) {
  next_.resize(all_.size(), -1);
  (last < 0 ? first_ : next_[static_cast<std::size_t>(last)]) = static_cast<std::int32_t>(code);
}

std::int64_t Texts::code_after(std::int64_t last, std::string_view text) {
  std::int64_t result = guess(last, text);
  if (result >= 0) return result;
  result = code(text);
  follows(last, result);
  return result;
}

void Texts::grow() {
  slots_.assign(std::max<std::size_t>(16, 2 * slots_.size()), -1);
  for (std::size_t code = 0; code < all_.size(); ++code) slots_[slot(all_[code])] = static_cast<std::int32_t>(code);
}

Table read_cbor(std::string_view data, const Schema& row, std::string_view under, const cbor::Limits& limits) {
  Cbor in(data, limits);
  try {
    return Reader(data, in).run(row, under);
  } catch (const cbor::Error&) {
    throw Doubt{};
  }
}

}  // namespace ingot::table
