#include "core/table.h"

#include <nanobind/stl/string_view.h>

#include <iterator>
#include <string>

#include "bind/bind.h"
#include "bind/buffer.h"
#include "bind/columns.h"

namespace {

using ingot::bind::as_list;
using ingot::bind::as_numbers;
using ingot::table::Column;
using ingot::table::Doubt;
using ingot::table::Type;
using ingot::table::Schema;
using ingot::table::Table;

Type kind_of(std::string_view name) {
  constexpr std::string_view kNames[] = {"number", "text", "place", "sizes", "pair", "any", "struct", "map"};
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<Type>(i);
  }
  throw nb::value_error("expected a kind of column");
}

// A schema as (kind, optional, key, inner); the recursion ends because the schema is Ingot's own.
Schema schema_of(nb::handle said) {
  const auto row = nb::cast<nb::tuple>(said);
  Schema schema{kind_of(nb::cast<const char*>(row[0])), nb::cast<bool>(row[1]), nb::cast<const char*>(row[2]), {}};
  for (const nb::handle each : nb::cast<nb::tuple>(row[3])) schema.inner.push_back(schema_of(each));
  if (schema.inner.size() > 64) throw nb::value_error("expected at most 64 fields");
  if (schema.type == Type::kMap && schema.inner.size() != 1)
    throw nb::value_error("expected a map of one kind of values");
  return schema;
}

nb::object column_of(const Column& column) {
  nb::list inner;
  for (const Column& item : column.inner) inner.append(column_of(item));
  return nb::make_tuple(as_numbers(column.first), as_numbers(column.second), as_numbers(column.third),
                        as_list(column.texts.all()), inner);
}

nb::object table_cbor(nb::handle data, nb::handle schema, std::string_view under, std::uint32_t depth, std::uint64_t items,
                      bool deterministic) {
  const ingot::bind::Bytes bytes(data);
  const Schema row = schema_of(schema);
  try {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const Table table = ingot::table::read_cbor(text, row, under, {depth, items, deterministic});
    return nb::make_tuple(table.begin, table.end, as_list(table.names), column_of(table.rows));
  } catch (const Doubt&) {
    return nb::none();
  }
}

}  // namespace

void bind_table(nb::module_& m) {
  define(m, "table_cbor", &table_cbor, nb::arg("data"), nb::arg("schema"), nb::arg("under"), nb::arg("max_depth"),
         nb::arg("max_items"), nb::arg("deterministic"),
         "Decode a map of structs in strict CBOR: (begin, end, names, columns), or None where the strict parser has to look.");
}
