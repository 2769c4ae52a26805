#include "core/cbor.h"

#include <array>
#include <cstring>
#include <string>

#include "bind/bind.h"
#include "bind/buffer.h"

namespace {

using ingot::cbor::Cursor;
using ingot::cbor::Error;
using ingot::cbor::Item;
using ingot::cbor::Type;

// Takes ownership of a new reference; throws the pending Python error if it is null.
nb::object own(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

// A manifest repeats a few short strings ("dtype", "bf16", ...) for every tensor: each is created and hashed once.
class Strings {
 public:
  nb::object get(std::string_view text, bool ascii) {
    if (!ascii) return own(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "strict"));
    if (text.size() > kLongest) return make(text);
    std::uint32_t hash = 2166136261u;  // FNV-1a
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    nb::object& slot = slots_[(hash ^ hash >> 15) % slots_.size()];
    if (!slot.is_valid() || !same(slot.ptr(), text)) slot = make(text);
    return slot;
  }

 private:
  static constexpr std::size_t kLongest = 24;

#if defined(Py_LIMITED_API)
  static nb::object make(std::string_view text) {
    return own(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  }
  static bool same(PyObject* result, std::string_view text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(result, &size);
    if (data == nullptr) throw nb::python_error();
    return std::string_view(data, static_cast<std::size_t>(size)) == text;
  }
#else
  static nb::object make(std::string_view text) {
    nb::object made = own(PyUnicode_New(static_cast<Py_ssize_t>(text.size()), 127));
    std::memcpy(PyUnicode_DATA(made.ptr()), text.data(), text.size());
    return made;
  }
  static bool same(PyObject* result, std::string_view text) {
    return static_cast<std::size_t>(PyUnicode_GET_LENGTH(result)) == text.size() &&
           std::memcmp(PyUnicode_DATA(result), text.data(), text.size()) == 0;
  }
#endif

  std::array<nb::object, 512> slots_;
};

class Builder {
 public:
  Builder(const std::uint8_t* data, std::size_t size, ingot::cbor::Limits limits)
      : cursor_(data, size, limits), deterministic_(limits.deterministic) {}

  nb::object run() {
    nb::object root = value();
    cursor_.finish();
    return root;
  }

 private:
  // Recursion ends at the depth limit.
  nb::object value() {
    const Item item = cursor_.next();
    switch (item.type) {
      case Type::kUnsigned: return own(PyLong_FromUnsignedLongLong(item.value));
      case Type::kNegative: return negative(item.value);
      case Type::kBytes:
        return own(PyBytes_FromStringAndSize(item.bytes.data(), static_cast<Py_ssize_t>(item.bytes.size())));
      case Type::kText: return strings_.get(item.bytes, item.ascii);
      case Type::kFalse: return nb::borrow(Py_False);
      case Type::kTrue: return nb::borrow(Py_True);
      case Type::kNull: return nb::none();
      case Type::kFloat: return own(PyFloat_FromDouble(item.real));
      case Type::kArray: return array(item);
      case Type::kMap: break;
    }
    return map(item);
  }

  static nb::object negative(std::uint64_t n) {  // -1 - n
    if (n < std::uint64_t{1} << 63) return own(PyLong_FromLongLong(-1 - static_cast<long long>(n)));
    const nb::object positive = own(PyLong_FromUnsignedLongLong(n));
    return own(PyNumber_Invert(positive.ptr()));
  }

  nb::object array(const Item& item) {
    cursor_.enter(item);
    nb::object list = own(PyList_New(0));
    for (std::uint64_t i = 0; i < item.value; ++i) {
      if (PyList_Append(list.ptr(), value().ptr()) != 0) throw nb::python_error();
    }
    cursor_.leave();
    return list;
  }

  nb::object map(const Item& item) {
    cursor_.enter(item);
    nb::object dict = own(PyDict_New());
    std::string_view last;
    for (std::uint64_t i = 0; i < item.value; ++i) {
      const Item key = cursor_.key();
      if (deterministic_ && i != 0 && ingot::cbor::in_order(key.bytes, last)) {
        throw Error("cbor.key-order", key.offset, "expected the keys of a map in bytewise order of what encodes them");
      }
      last = key.bytes;
      const nb::object name = strings_.get(key.bytes, key.ascii);
      if (PyDict_SetItem(dict.ptr(), name.ptr(), value().ptr()) != 0) throw nb::python_error();
      if (static_cast<std::uint64_t>(PyDict_Size(dict.ptr())) != i + 1) {
        throw Error("cbor.duplicate-key", key.offset, "expected every key of a map once, found one twice");
      }
    }
    cursor_.leave();
    return dict;
  }

  Cursor cursor_;
  bool deterministic_;
  Strings strings_;
};

nb::object cbor_loads(nb::handle data, std::uint32_t max_depth, std::uint64_t max_items, bool deterministic) {
  const ingot::bind::Bytes bytes(data);
  try {
    return Builder(bytes.data(), bytes.size(), {max_depth, max_items, deterministic}).run();
  } catch (const Error& error) {
    const std::string text = std::string(error.rule) + "|" + std::to_string(error.offset) + "|" + error.what();
    throw nb::value_error(text.c_str());
  }
}

}  // namespace

void bind_cbor(nb::module_& m) {
  define(m, "cbor_loads", &cbor_loads, nb::arg("data"), nb::arg("max_depth"), nb::arg("max_items"),
         nb::arg("deterministic"),
        "Decode strict CBOR; ValueError('rule|offset|message') where it is not.");
}
