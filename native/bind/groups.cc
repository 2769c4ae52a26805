#include "core/groups.h"

#include "bind/bind.h"
#include "bind/buffer.h"
#include "bind/columns.h"

namespace {

using ingot::Groups;
using ingot::bind::as_list;
using ingot::bind::as_numbers;

// The names are those of a list, which is kept.
std::vector<std::string_view> views_of(const nb::list& names) {
  std::vector<std::string_view> views;
  views.reserve(names.size());
  for (const nb::handle name : names) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
    if (text == nullptr) throw nb::python_error();
    views.emplace_back(text, static_cast<std::size_t>(size));
  }
  return views;
}

nb::object take(Groups& groups, nb::handle data) {
  const ingot::bind::Bytes bytes(data);
  try {
    return nb::int_(groups.take({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
  } catch (const ingot::table::Doubt&) {
    return nb::none();
  }
}

nb::object found(Groups& groups) {
  try {
    groups.finish();
  } catch (const ingot::table::Doubt&) {
    return nb::none();
  }
  const Groups::Kinds& kinds = groups.kinds();
  nb::list columns;
  for (const auto* each : {&groups.rows(), &groups.groups(), &groups.starts(), &groups.begins(), &groups.members(), &kinds.field,
                           &kinds.dtype, &kinds.elements, &kinds.length, &kinds.size}) {
    columns.append(as_numbers(*each));
  }
  return nb::make_tuple(columns, as_list(kinds.fields.all()), as_list(kinds.dtypes.all()));
}

}  // namespace

void bind_groups(nb::module_& m) {
  nb::class_<Groups>(m, "Groups", "Records of tensors whose names are known; one thread at a time.")
      .def(
          "__init__",
          [](Groups* groups, nb::list names, std::uint64_t start) { new (groups) Groups(views_of(names), start); },
          nb::arg("names"), nb::arg("start"), nb::keep_alive<1, 2>())
      .def("take", &take, nb::arg("data"),
           "Take heads that lie in `data` as a whole; return how far the next one is, or None for one in doubt.")
      .def("longest", [](const Groups& groups) { return groups.longest(); })
      .def("found", &found,
           "Rows, groups and starts by tensor, begins and members by group, and by kind of head field, dtype, elements, length "
           "and size; the texts of fields and dtypes; None where one is in doubt.");
}
