#include "core/spans.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/buffer.h"

namespace {

using ingot::bind::Bytes;
using ingot::spans::Pattern;

std::string_view text_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Offsets of texts, from the last byte of each.
using Endings = std::array<std::vector<std::string>, 256>;

bool ends_with(std::string_view text, const Endings& endings) {
  if (text.empty()) return false;
  const std::vector<std::string>& ends = endings[static_cast<std::uint8_t>(text.back())];
  return std::any_of(ends.begin(), ends.end(), [&](const std::string& end) { return text.ends_with(end); });
}

void spelled(nb::handle data, In<std::int64_t> starts, In<std::int64_t> lengths, nb::handle forms, nb::bytes digits, Out<bool> out) {
  require(starts.size() == lengths.size() && starts.size() == out.size(), "expected a length and a place for each start");
  const Bytes bytes(data);
  const std::string_view text = text_of(bytes);
  std::vector<Pattern> sorted;
  std::vector<nb::bytes> storage;
  for (const nb::handle each : nb::cast<nb::sequence>(forms)) {
    const auto pattern = nb::cast<nb::tuple>(each);
    storage.push_back(nb::cast<nb::bytes>(pattern[0]));
    sorted.push_back({{storage.back().c_str(), storage.back().size()}, nb::cast<std::size_t>(pattern[1])});
  }
  bool is_digit[256] = {};
  for (std::size_t i = 0; i < digits.size(); ++i) is_digit[static_cast<std::uint8_t>(digits.c_str()[i])] = true;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto start = static_cast<std::uint64_t>(starts(i)), length = static_cast<std::uint64_t>(lengths(i));
    if (starts(i) < 0) {
      out(i) = true;  // absent
    } else if (start > text.size() || length > text.size() - start) {
      out(i) = false;
    } else {
      out(i) = ingot::spans::spelled(text.substr(start, length), sorted, is_digit);
    }
  }
}

void same(nb::handle data, In<std::int64_t> starts, InBytes rows, Out<bool> out) {
  const std::size_t count = starts.size();
  require(out.size() == count && (count == 0 ? rows.size() == 0 : rows.size() % count == 0), "expected rows of one size");
  const Bytes bytes(data);
  ingot::spans::same(text_of(bytes), starts.data(), reinterpret_cast<const char*>(rows.data()), count,
                     count == 0 ? 0 : rows.size() / count, out.data());
}

bool zeros(nb::handle data, In<std::int64_t> starts, In<std::int64_t> lengths) {
  require(starts.size() == lengths.size(), "expected a length for each start");
  const Bytes bytes(data);
  return ingot::spans::zeros(text_of(bytes), starts.data(), lengths.data(), starts.size());
}

bool any_ends(nb::handle names, nb::handle endings) {
  Endings ends;
  for (const nb::handle each : nb::cast<nb::sequence>(endings)) {
    const std::string text = nb::cast<const char*>(each);
    require(!text.empty(), "expected endings");
    ends[static_cast<std::uint8_t>(text.back())].push_back(text);
  }
  for (const nb::handle each : nb::cast<nb::list>(names)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(each.ptr(), &size);
    if (text == nullptr) {  // half of a surrogate pair has no UTF-8 encoding
      if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError) == 0) throw nb::python_error();
      PyErr_Clear();
      const auto parts = nb::steal<nb::bytes>(PyUnicode_AsEncodedString(each.ptr(), "utf-8", "surrogatepass"));
      if (!parts.is_valid()) throw nb::python_error();
      if (ends_with(std::string_view(parts.c_str(), parts.size()), ends)) return true;
    } else if (ends_with(std::string_view(text, static_cast<std::size_t>(size)), ends)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void bind_spans(nb::module_& m) {
  define(m, "spelled", &spelled, nb::arg("data"), nb::arg("starts"), nb::arg("lengths"), nb::arg("forms"), nb::arg("digits"),
         nb::arg("out"), "Tell which texts are absent (start below 0) or match a form: a prefix and its number of digits.");
  define(m, "same", &same, nb::arg("data"), nb::arg("starts"), nb::arg("rows"), nb::arg("out"),
         "Tell which rows of bytes, all of one size, are those at their places in `data`.");
  define(m, "zeros", &zeros, nb::arg("data"), nb::arg("starts"), nb::arg("lengths"),
         "Whether these spans lie in `data` and hold nothing but zeros.");
  define(m, "any_ends", &any_ends, nb::arg("names"), nb::arg("endings"), "Whether any of a list of texts ends with one of these.");
}
