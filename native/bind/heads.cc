#include "core/heads.h"

#include <nanobind/stl/string_view.h>

#include "bind/bind.h"
#include "bind/buffer.h"
#include "bind/columns.h"

namespace {

using ingot::Heads;

nb::object take(Heads& heads, nb::handle data, std::uint64_t at, std::uint64_t count) {
  const ingot::bind::Bytes bytes(data);
  try {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return nb::int_(heads.take(text, at, count));
  } catch (const ingot::table::Doubt&) {
    return nb::none();
  }
}

nb::object columns(Heads& heads) {
  nb::list list;
  for (Heads::Field& field : heads.fields()) {
    if (field.letter == 'd') field.second.push_back(static_cast<std::int64_t>(field.first.size()));
    const bool names = field.letter == 'n' || field.letter == 'N';
    list.append(nb::make_tuple(ingot::bind::as_bytes(field.first), ingot::bind::as_bytes(field.second),
                               ingot::bind::as_bytes(field.third),
                               ingot::bind::as_list(names ? field.names : field.texts.all()), nb::list()));
    if (field.letter == 'd') field.second.pop_back();
  }
  return list;
}

}  // namespace

void bind_heads(nb::module_& m) {
  nb::class_<Heads>(m, "Heads", "Heads of records that follow each other, decoded into columns; one thread at a time.")
      .def("__init__",
           [](Heads* heads, std::string_view layout, bool big_endian) {
             if (layout.find_first_not_of("tTnNdIQ>") != std::string_view::npos) throw nb::value_error("expected a layout");
             new (heads) Heads(layout, big_endian);
           },
           nb::arg("layout"), nb::arg("big_endian"))
      .def("take", &take, nb::arg("data"), nb::arg("at"), nb::arg("count"),
           "Take heads that lie in `data` as a whole; return where the next one begins, or None for one in doubt.")
      .def("rows", [](const Heads& heads) { return heads.rows(); })
      .def("columns", &columns);
}
