#include "core/heads.h"

#include <bit>
#include <cstring>

#include "core/cbor.h"

namespace ingot {
namespace {

using table::Doubt;

constexpr std::size_t kArena = 1 << 16;
constexpr std::size_t kTries = 1 << 8;  // heads in turn of which none was like another: nor will others be

std::size_t width_of(char letter) { return letter == 'T' || letter == 'N' || letter == 'Q' ? 8 : 4; }
bool is_text(char letter) { return letter == 't' || letter == 'T' || letter == 'n' || letter == 'N'; }

}  // namespace

Heads::Heads(std::string_view layout, bool big_endian)
    : swapped_(big_endian != (std::endian::native == std::endian::big)) {
  for (const char letter : layout) {
    if (letter == '>') {
      skips_ = true;
    } else {
      fields_.emplace_back();
      fields_.back().letter = letter;
    }
  }
  taken_.resize(fields_.size());
  repeats_ = fields_.size() > 1 && is_text(fields_[0].letter);
  for (std::size_t i = 1; i < fields_.size(); ++i) repeats_ = repeats_ && fields_[i].letter != 'n' && fields_[i].letter != 'N';
}

std::uint64_t Heads::number(const char* from, std::size_t width) const {
  if (width == 4) {
    std::uint32_t value;
    std::memcpy(&value, from, sizeof value);
    return swapped_ ? __builtin_bswap32(value) : value;
  }
  std::uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return swapped_ ? __builtin_bswap64(value) : value;
}

std::uint64_t Heads::take(std::string_view data, std::uint64_t at, std::uint64_t count) {
  for (; count > 0 && at < data.size(); --count, at = next_) {
    if (again(data, at)) continue;
    if (!measure(data, at)) break;
    put();
    learn();
  }
  return at;
}

// Takes a head that says the same, in the same bytes, as an earlier one, its first text aside; false for any other.
bool Heads::again(std::string_view data, std::uint64_t at) {
  const std::int64_t code = rests_.expected(last_);
  if (code < 0) return false;
  data.remove_prefix(static_cast<std::size_t>(at));
  const std::size_t width = width_of(fields_[0].letter);
  if (data.size() < width) return false;
  const std::uint64_t size = number(data.data(), width);
  if (size > data.size() - width) return false;
  const std::string_view name = data.substr(width, static_cast<std::size_t>(size));
  const std::string_view rest = rests_.all()[static_cast<std::size_t>(code)];
  if (!data.substr(width + name.size()).starts_with(rest)) return false;
  const Known& known = known_[static_cast<std::size_t>(code)];
  if (__builtin_add_overflow(at + width + name.size() + rest.size(), known.skip, &at) || at > INT64_MAX) throw Doubt{};
  next_ = at;
  put_text(fields_[0], name);
  for (std::size_t i = 1; i < fields_.size(); ++i) {
    Field& field = fields_[i];
    if (field.letter == 'd') {
      field.second.push_back(static_cast<std::int64_t>(field.first.size()));
      const std::int64_t begin = field.second[known.row], end = field.second[known.row + 1];
      for (std::int64_t j = begin; j < end; ++j) field.first.push_back(field.first[static_cast<std::size_t>(j)]);
      field.third.push_back(field.third[known.row]);
    } else {
      field.first.push_back(field.first[known.row]);
    }
  }
  ++rows_;
  last_ = code;
  misses_ = 0;
  return true;
}

// Notes the head that was just put.
void Heads::learn() {
  if (!repeats_ || misses_ == kTries) return;
  ++misses_;
  last_ = rests_.code_after(last_, rest_);
  if (static_cast<std::size_t>(last_) < known_.size()) return;
  rests_.moved(last_, keep(rest_));
  known_.push_back({static_cast<std::size_t>(rows_) - 1, skip_});
}

// Finds the bytes of each field, and where the next head begins; false where they are not all there.
bool Heads::measure(std::string_view data, std::uint64_t at) {
  const auto piece = [&](std::uint64_t size, std::string_view& out) {
    if (size > data.size() - at) return false;
    out = data.substr(static_cast<std::size_t>(at), static_cast<std::size_t>(size));
    at += size;
    return true;
  };
  std::uint64_t last = 0, rest = 0;
  const std::string_view all = data;
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    if (i == 1) rest = at;
    const char letter = fields_[i].letter;
    std::string_view head;
    if (!piece(width_of(letter), head)) return false;
    last = number(head.data(), head.size());
    if (letter == 'd') {
      if (last > table::kMaxRank) throw Doubt{};
      last *= 8;
    }
    if (letter == 'I' || letter == 'Q') {
      taken_[i] = head;
    } else if (!piece(last, taken_[i])) {
      return false;
    }
  }
  if (repeats_) rest_ = all.substr(static_cast<std::size_t>(rest), static_cast<std::size_t>(at - rest));
  skip_ = skips_ ? last : 0;
  if (skips_ && __builtin_add_overflow(at, last, &at)) throw Doubt{};
  if (at > INT64_MAX) throw Doubt{};
  next_ = at;
  return true;
}

void Heads::put() {
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    Field& field = fields_[i];
    const std::string_view bytes = taken_[i];
    if (is_text(field.letter)) {
      put_text(field, bytes);
    } else if (field.letter == 'd') {
      field.second.push_back(static_cast<std::int64_t>(field.first.size()));
      std::uint64_t nonzero = 1;
      bool zero = false;
      for (std::size_t at = 0; at < bytes.size(); at += 8) {
        const std::uint64_t size = number(bytes.data() + at, 8);
        table::multiply(size, nonzero, zero);
        field.first.push_back(static_cast<std::int64_t>(size));
      }
      field.third.push_back(zero ? 0 : static_cast<std::int64_t>(nonzero));
    } else {
      const std::uint64_t value = number(bytes.data(), bytes.size());
      if (value > INT64_MAX) throw Doubt{};
      field.first.push_back(static_cast<std::int64_t>(value));
    }
  }
  ++rows_;
}

void Heads::put_text(Field& field, std::string_view bytes) {
  const bool repeats = field.letter == 't' || field.letter == 'T';
  if (repeats) {
    const std::vector<std::string_view>& all = field.texts.all();
    // Records of one tensor follow each other, and those of another have the same fields.
    const std::int64_t last = field.first.empty() ? -1 : field.first.back();
    const bool same = last >= 0 && all[static_cast<std::size_t>(last)] == bytes;
    std::int64_t code = same ? last : field.texts.guess(last, bytes);
    if (code < 0) {
      const std::size_t known = all.size();
      code = field.texts.code(bytes);
      if (static_cast<std::size_t>(code) == known) {
        field.texts.moved(code, valid(bytes));
      } else {
        field.texts.follows(last, code);
      }
    }
    field.first.push_back(code);
  } else {
    field.names.push_back(valid(bytes));
  }
}

// Keeps a text; Doubt where it is none.
std::string_view Heads::valid(std::string_view text) {
  bool ascii = false;
  if (!cbor::valid_utf8(text, ascii)) throw Doubt{};
  return keep(text);
}

std::string_view Heads::keep(std::string_view text) {
  if (kept_.empty() || kept_.back().capacity() - kept_.back().size() < text.size()) {
    kept_.emplace_back();
    kept_.back().reserve(text.size() < kArena ? kArena : text.size());
  }
  std::string& arena = kept_.back();
  const std::size_t start = arena.size();
  arena.append(text);
  return std::string_view(arena).substr(start);
}

}  // namespace ingot
