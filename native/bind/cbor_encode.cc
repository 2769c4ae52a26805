// Deterministic CBOR (RFC 8949 section 4.2.1); maps keep the given order unless sorting is requested.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "bind/bind.h"
#include "bind/buffer.h"
#include "bind/limited.h"

namespace {

enum Major : std::uint8_t { kUnsigned = 0x00, kNegative = 0x20, kBytes = 0x40, kText = 0x60, kArray = 0x80, kMap = 0xA0 };

[[noreturn]] void refuse(const char* rule, const std::string& message) {
  throw nb::value_error((std::string(rule) + "|" + message).c_str());
}

#if defined(Py_LIMITED_API)
std::string type_name(PyObject* value) { return nb::type_name(reinterpret_cast<PyObject*>(Py_TYPE(value))).c_str(); }
#else
std::string type_name(PyObject* value) { return Py_TYPE(value)->tp_name; }
#endif

class Encoder {
 public:
  Encoder(unsigned max_depth, bool sorted) : max_depth_(max_depth), sorted_(sorted) {}

  void value(PyObject* item, unsigned depth) {
    if (PyUnicode_Check(item)) return text(item);
    if (item == Py_None) return byte(0xF6);
    if (PyBool_Check(item)) return byte(item == Py_True ? 0xF5 : 0xF4);
    if (PyLong_Check(item)) return integer(item);
    if (PyDict_Check(item) && !sorted_) return map(item, depth);
    if (PyList_Check(item) || PyTuple_Check(item)) return array(item, depth);
    if (PyFloat_Check(item)) return number(PyFloat_AS_DOUBLE(item));
    if (PyObject_CheckBuffer(item) && !PyObject_HasAttrString(item, "dtype")) return bytes(item);
    if (PyMapping_Check(item) && PyObject_HasAttrString(item, "items")) return other_map(item, depth);
    refuse("cbor.type", "expected a number, text, bytes, bool, None, list or dict, found " + type_name(item));
  }

  nb::bytes result() const { return nb::bytes(out_.data(), out_.size()); }

 private:
  void byte(unsigned value) { out_.push_back(static_cast<char>(value)); }

  void big_endian(std::uint64_t value, int size) {
    for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) byte(value >> shift & 255);
  }

  void head(Major major, std::uint64_t value) {
    if (value < 24) return byte(major | static_cast<unsigned>(value));
    const int power = value < 0x100 ? 0 : value < 0x10000 ? 1 : value < 0x100000000 ? 2 : 3;
    byte(major | (24u + static_cast<unsigned>(power)));
    big_endian(value, 1 << power);
  }

  void enter(unsigned depth) const {
    if (depth >= max_depth_) refuse("cbor.depth", "expected at most " + std::to_string(max_depth_) + " levels of nesting");
  }

  void text(PyObject* item) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(item, &size);
    if (data == nullptr) {
      PyErr_Clear();
      refuse("cbor.utf8", "expected text that UTF-8 can hold, found lone surrogates");
    }
    head(kText, static_cast<std::uint64_t>(size));
    out_.append(data, static_cast<std::size_t>(size));
  }

  void integer(PyObject* item) {
    int overflow = 0;
    const long long small = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (small == -1 && PyErr_Occurred()) throw nb::python_error();
    if (overflow == 0)
      return small >= 0 ? head(kUnsigned, static_cast<std::uint64_t>(small))
                        : head(kNegative, static_cast<std::uint64_t>(-(small + 1)));
    const nb::object magnitude = overflow > 0 ? nb::borrow(item) : nb::steal(PyNumber_Invert(item));  // ~x is -1 - x
    if (!magnitude.is_valid()) throw nb::python_error();
    const unsigned long long large = PyLong_AsUnsignedLongLong(magnitude.ptr());
    if (PyErr_Occurred()) {
      PyErr_Clear();
      refuse("cbor.integer", "expected an integer of 64 bits and a sign, found a larger one");
    }
    head(overflow > 0 ? kUnsigned : kNegative, large);
  }

  // Returns whether half precision represents a value that is not NaN, and sets its bits.
  static bool is_half(double value, std::uint16_t& half) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 48 & 0x8000);
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
    if (bits << 1 == 0 || (exponent == 1024 && fraction == 0)) {
      half = static_cast<std::uint16_t>(sign | (exponent == 1024 ? 0x7C00 : 0));
      return true;
    }
    if (exponent > 15 || exponent < -24) return false;
    const bool normal = exponent >= -14;
    const std::uint64_t digits = normal ? fraction : fraction | std::uint64_t{1} << 52;
    const int dropped = normal ? 42 : 28 - exponent;
    if (digits & ((std::uint64_t{1} << dropped) - 1)) return false;
    half = static_cast<std::uint16_t>(sign | (normal ? (exponent + 15) << 10 : 0) | digits >> dropped);
    return true;
  }

  // Uses the shortest of half, single and double precision that represents the value; all NaN have one encoding.
  void number(double value) {
    if (std::isnan(value)) return byte(0xF9), byte(0x7E), byte(0x00);
    std::uint16_t half = 0;
    if (is_half(value, half)) {
      byte(0xF9);
      return big_endian(half, 2);
    }
    const float single = static_cast<float>(value);
    if (static_cast<double>(single) == value) {
      byte(0xFA);
      return big_endian(std::bit_cast<std::uint32_t>(single), 4);
    }
    byte(0xFB);
    big_endian(std::bit_cast<std::uint64_t>(value), 8);
  }

  void bytes(PyObject* item) {
    const ingot::bind::Bytes data(item);
    head(kBytes, data.size());
    out_.append(reinterpret_cast<const char*>(data.data()), data.size());
  }

  void array(PyObject* item, unsigned depth) {
    enter(depth);
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(item);  // of a list or tuple
    head(kArray, static_cast<std::uint64_t>(size));
    Py_ssize_t done = 0;
    for (; done < PySequence_Fast_GET_SIZE(item); ++done) {
      const nb::object held = nb::borrow(PySequence_Fast_GET_ITEM(item, done));
      value(held.ptr(), depth + 1);
    }
    unchanged(done == size && PySequence_Fast_GET_SIZE(item) == size);
  }

  // Encoding an element may run arbitrary Python code (attributes, mappings, buffers), which may change the container.
  static void unchanged(bool holds) {
    if (!holds) refuse("cbor.changed", "expected lists and dicts that stay unchanged while they are encoded");
  }

  void entry(PyObject* key, PyObject* element, unsigned depth) {
    const nb::object name = nb::borrow(key), held = nb::borrow(element);
    if (!PyUnicode_Check(key)) refuse("cbor.key-type", "expected text as key of a map, found " + type_name(key));
    text(key);
    value(element, depth + 1);
  }

  void map(PyObject* item, unsigned depth) {
    enter(depth);
    const Py_ssize_t size = PyDict_GET_SIZE(item);
    head(kMap, static_cast<std::uint64_t>(size));
    PyObject *key = nullptr, *element = nullptr;
    Py_ssize_t position = 0, done = 0;
    for (; done <= size && PyDict_Next(item, &position, &key, &element); ++done) entry(key, element, depth);
    unchanged(done == size && PyDict_GET_SIZE(item) == size);
  }

  void other_map(PyObject* item, unsigned depth) {
    enter(depth);
    const nb::object items = nb::steal(PyMapping_Items(item));
    if (!items.is_valid()) throw nb::python_error();
    // The mapping may have returned its internal list.
    const nb::object pairs = nb::steal(PySequence_Tuple(items.ptr()));
    if (!pairs.is_valid()) throw nb::python_error();
    const Py_ssize_t size = PyTuple_GET_SIZE(pairs.ptr());
    head(kMap, static_cast<std::uint64_t>(size));
    std::vector<PyObject*> order;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* pair = PyTuple_GET_ITEM(pairs.ptr(), i);
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
        refuse("cbor.type", "expected pairs as a mapping's items, found " + type_name(pair));
      order.push_back(pair);
    }
    if (sorted_) sort(order);
    for (PyObject* pair : order) entry(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), depth);
  }

  // Sorts pairs by the bytes of their encoded keys: by length, which is in the head, then by content.
  static void sort(std::vector<PyObject*>& pairs) {
    const auto bytes = [](PyObject* pair) {
      Py_ssize_t size = 0;
      const char* data = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(pair, 0), &size);
      return std::string_view(data, static_cast<std::size_t>(size));
    };
    for (PyObject* pair : pairs) {
      PyObject* key = PyTuple_GET_ITEM(pair, 0);
      if (!PyUnicode_Check(key)) refuse("cbor.key-type", "expected text as key of a map, found " + type_name(key));
      if (PyUnicode_AsUTF8AndSize(key, nullptr) == nullptr) {
        PyErr_Clear();
        refuse("cbor.utf8", "expected text that UTF-8 can hold, found lone surrogates");
      }
    }
    std::sort(pairs.begin(), pairs.end(), [&](PyObject* first, PyObject* other) {
      const std::string_view a = bytes(first), b = bytes(other);
      return a.size() != b.size() ? a.size() < b.size() : a < b;
    });
  }

  unsigned max_depth_;
  bool sorted_;
  std::string out_;
};

}  // namespace

void bind_cbor_encode(nb::module_& m) {
  define(
      m, "cbor_dumps",
      [](nb::handle value, unsigned max_depth, bool sorted) {
        Encoder encoder(max_depth, sorted);
        encoder.value(value.ptr(), 0);
        return encoder.result();
      },
      nb::arg("value").none(), nb::arg("max_depth"), nb::arg("sorted"),
      "Encode as deterministic CBOR; raises ValueError(\"rule|message\").");
}
