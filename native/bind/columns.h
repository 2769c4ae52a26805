// Conversion of native results to Python: texts as str, columns of integers as bytes.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/numbers.h"

namespace ingot::bind {

inline nanobind::object owned(PyObject* object) {
  if (object == nullptr) throw nanobind::python_error();
  return nanobind::steal(object);
}

// The pair (number, count) if all numbers are equal.
inline nanobind::object as_numbers(const table::Numbers& values) {
  if (!values.empty() && values.is_uniform()) return nanobind::make_tuple(values[0], values.size());
  nanobind::object bytes = owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(values.size() * sizeof(std::int64_t))));
  values.copy(reinterpret_cast<std::int64_t*>(PyBytes_AsString(bytes.ptr())));
  return bytes;
}

// The texts are UTF-8.
inline nanobind::object as_list(const std::vector<std::string_view>& texts) {
  nanobind::object list = owned(PyList_New(static_cast<Py_ssize_t>(texts.size())));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    PyObject* text = PyUnicode_FromStringAndSize(texts[i].data(), static_cast<Py_ssize_t>(texts[i].size()));
    if (text == nullptr || PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), text) != 0) throw nanobind::python_error();
  }
  return list;
}

}  // namespace ingot::bind
