#include "core/heads.h"

#include <bit>
#include <cstring>

#include "core/cbor.h"

namespace ingot {
namespace {

using table::Doubt;

constexpr std::size_t kArena = 1 << 16;

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
  while (count-- > 0 && at < data.size() && measure(data, at)) {
    put();
    at = next_;
  }
  return at;
}

// Finds the bytes of each field, and where the next head begins; false where they are not all there.
bool Heads::measure(std::string_view data, std::uint64_t at) {
  const auto piece = [&](std::uint64_t size, std::string_view& out) {
    if (size > data.size() - at) return false;
    out = data.substr(static_cast<std::size_t>(at), static_cast<std::size_t>(size));
    at += size;
    return true;
  };
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < fields_.size(); ++i) {
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
    if (code < 0 && (code = field.texts.find(bytes)) >= 0) field.texts.follows(last, code);
    if (code >= 0) {
      field.first.push_back(code);
      return;
    }
  }
  bool ascii = false;
  if (!cbor::valid_utf8(bytes, ascii)) throw Doubt{};
  if (repeats) {
    field.first.push_back(field.texts.code(keep(bytes)));
  } else {
    field.names.push_back(keep(bytes));
  }
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
