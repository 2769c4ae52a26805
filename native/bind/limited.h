// Functions that CPython's limited API lacks, which wheels for 3.12 and later need, implemented by functions that it has.
#pragma once
#include <Python.h>

#if defined(Py_LIMITED_API)
inline Py_ssize_t ingot_length(PyObject* item) { return PyList_Check(item) ? PyList_Size(item) : PyTuple_Size(item); }
inline PyObject* ingot_item(PyObject* item, Py_ssize_t index) {
  return PyList_Check(item) ? PyList_GetItem(item, index) : PyTuple_GetItem(item, index);
}
#undef PySequence_Fast_GET_SIZE  // macros that use functions outside the limited API
#undef PySequence_Fast_GET_ITEM
#define PySequence_Fast_GET_SIZE ingot_length
#define PySequence_Fast_GET_ITEM ingot_item
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyDict_GET_SIZE PyDict_Size
#define PyFloat_AS_DOUBLE PyFloat_AsDouble
#endif
