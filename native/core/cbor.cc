#include "core/cbor.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace ingot::cbor {
namespace {

// RFC 8949 appendix D: half precision to double, exactly.
double half_to_double(std::uint32_t half) {
  const std::uint32_t exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;
  double value;
  if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa), -24);
  } else if (exponent != 31) {
    value = std::ldexp(static_cast<double>(mantissa + 1024), static_cast<int>(exponent) - 25);
  } else {
    value = mantissa == 0 ? HUGE_VAL : std::nan("");
  }
  return (half & 0x8000) ? -value : value;
}

// Returns whether half precision represents a number that is not NaN.
bool fits_half(double value) {
  if (value == 0 || std::isinf(value)) return true;
  int exponent = 0;
  std::frexp(value, &exponent);  // [0.5, 1) * 2**exponent
  if (exponent > 16) return false;
  const double scaled = std::ldexp(value, exponent < -13 ? 24 : 11 - exponent);
  return scaled == std::trunc(scaled);
}

// Bytes of a multi-byte UTF-8 sequence that starts at `p`, 0 if it is ill-formed (RFC 3629 section 4).
std::size_t sequence(const unsigned char* p, std::size_t remaining) {
  const unsigned lead = p[0];
  const auto tail = [&](std::size_t index, unsigned low = 0x80, unsigned high = 0xbf) {
    return index < remaining && p[index] >= low && p[index] <= high;
  };
  if (lead >= 0xc2 && lead <= 0xdf) return tail(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const unsigned low = lead == 0xe0 ? 0xa0 : 0x80, high = lead == 0xed ? 0x9f : 0xbf;
    return tail(1, low, high) && tail(2) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const unsigned low = lead == 0xf0 ? 0x90 : 0x80, high = lead == 0xf4 ? 0x8f : 0xbf;
    return tail(1, low, high) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

bool valid_utf8(std::string_view text, bool& ascii) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const std::size_t size = text.size();
  std::size_t index = 0;
  ascii = true;
  while (index < size) {
    std::uint64_t word;
    if (size - index >= 8 && (std::memcpy(&word, p + index, 8), (word & 0x8080808080808080u) == 0)) {
      index += 8;
    } else if (p[index] < 0x80) {
      ++index;
    } else {
      ascii = false;
      const std::size_t step = sequence(p + index, size - index);
      if (step == 0) return false;
      index += step;
    }
  }
  return true;
}

std::uint64_t Cursor::argument(std::size_t start, unsigned major, unsigned info) {
  if (info < 24) return info;
  if (info == 31) {
    throw Error("cbor.indefinite-length", start, "expected a definite length, found an indefinite one or a break");
  }
  if (info > 27) throw Error("cbor.reserved", start, "expected a defined head, found reserved additional information");
  const std::size_t width = std::size_t{1} << (info - 24);
  if (remaining() < width) throw Error("cbor.truncated", start, "the bytes end inside a head");
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value = value << 8 | data_[position_ + i];
  position_ += width;
  const bool fits_less = width == 1 ? value < 24 : value >> 4 * width == 0;
  if (limits_.deterministic && major < 6 && fits_less) {
    throw Error("cbor.not-shortest", start, "expected a number in its shortest form, found a longer one");
  }
  return value;
}

void Cursor::string(Item& item) {
  if (item.value > remaining()) {
    throw Error(
        "cbor.length", item.offset,
        "expected a string of at most " + std::to_string(remaining()) + " bytes, found " + std::to_string(item.value));
  }
  item.bytes = std::string_view(reinterpret_cast<const char*>(data_ + position_), static_cast<std::size_t>(item.value));
  position_ += item.bytes.size();
  if (item.type == Type::kText && !valid_utf8(item.bytes, item.ascii)) {
    throw Error("cbor.utf8", item.offset, "expected a text string in UTF-8, found other bytes");
  }
}

void Cursor::simple(Item& item, unsigned info) {
  switch (info) {
    case 20: item.type = Type::kFalse; return;
    case 21: item.type = Type::kTrue; return;
    case 22: item.type = Type::kNull; return;
    case 25: item.real = half_to_double(static_cast<std::uint32_t>(item.value)); break;
    case 26: item.real = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(item.value))); break;
    case 27: item.real = std::bit_cast<double>(item.value); break;
    default: throw Error("cbor.simple", item.offset, "expected false, true, null or a float, found another simple value");
  }
  item.type = Type::kFloat;
  if (!limits_.deterministic) return;
  const bool wide = std::isnan(item.real) ? info != 25 || item.value != 0x7e00
                    : info == 27          ? static_cast<double>(static_cast<float>(item.real)) == item.real
                                          : info == 26 && fits_half(item.real);
  if (wide) throw Error("cbor.not-shortest", item.offset, "expected a float in its shortest form, and NaN in one form only");
}

Item Cursor::next() {
  const std::size_t start = position_;
  if (remaining() == 0) throw Error("cbor.truncated", start, "the bytes end where an item should begin");
  if (++items_ > limits_.items) {
    throw Error("cbor.items", start, "expected at most " + std::to_string(limits_.items) + " items");
  }
  const unsigned initial = data_[position_++], info = initial & 31;
  Item item{};
  item.offset = start;
  item.value = argument(start, initial >> 5, info);
  switch (initial >> 5) {
    case 0: item.type = Type::kUnsigned; return item;
    case 1: item.type = Type::kNegative; return item;
    case 2: item.type = Type::kBytes; string(item); return item;
    case 3: item.type = Type::kText; string(item); return item;
    case 4: item.type = Type::kArray; break;
    case 5: item.type = Type::kMap; break;
    case 6: throw Error("cbor.tag", start, "expected no tags, found one");
    default: simple(item, info); return item;
  }
  // Every element has at least one byte, every pair two: a larger count is refused before memory is allocated for it.
  const std::size_t limit = item.type == Type::kMap ? remaining() / 2 : remaining();
  if (item.value > limit) {
    throw Error(
        "cbor.length", start,
        "expected at most " + std::to_string(limit) + " elements in what is left, found " + std::to_string(item.value));
  }
  return item;
}

Item Cursor::key() {
  const Item item = next();
  if (item.type != Type::kText) throw Error("cbor.key-type", item.offset, "expected a text string as key of a map");
  return item;
}

void Cursor::enter(const Item& container) {
  if (++depth_ > limits_.depth) {
    throw Error("cbor.depth", container.offset, "expected at most " + std::to_string(limits_.depth) + " levels of nesting");
  }
}

void Cursor::finish() const {
  if (remaining() != 0) {
    throw Error("cbor.trailing-bytes", position_,
                "expected the end, found " + std::to_string(remaining()) + " more bytes");
  }
}

}  // namespace ingot::cbor
