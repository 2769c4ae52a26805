#include "core/many.h"

#include <cstring>

#include "bind/arrays.h"
#include "bind/buffer.h"

namespace {

using Numbers = In<std::int64_t>;

// Where pieces of a buffer lie; each of them is proven to lie inside.
void require_inside(const Numbers& starts, const Numbers& lengths, std::size_t size) {
  require(starts.size() == lengths.size(), "expected as many lengths as starts");
  const auto most = static_cast<std::int64_t>(size);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::int64_t start = starts.data()[i], length = lengths.data()[i];
    require(start >= 0 && length >= 0 && start <= most && length <= most - start, "expected pieces inside the buffer");
  }
}

void take_each(const InBytes& data, const Numbers& starts, const nb::list& outs) {
  require(starts.size() == outs.size(), "expected an output for each start");
  for (std::size_t i = 0; i < starts.size(); ++i) {
    Py_buffer view;
    if (PyObject_GetBuffer(outs[i].ptr(), &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    const auto start = static_cast<std::uint64_t>(starts.data()[i]), size = static_cast<std::uint64_t>(view.len);
    const bool inside = start <= data.size() && size <= data.size() - start;
    if (inside && size) std::memcpy(view.buf, data.data() + start, size);
    PyBuffer_Release(&view);
    require(inside, "expected pieces inside the buffer");
  }
}

void prove_each(const InBytes& data, const Numbers& starts, const Numbers& lengths, nb::handle spelled, const Numbers& begins,
                const Numbers& sizes, const OutBytes& proven) {
  const ingot::bind::Bytes text(spelled);
  require_inside(starts, lengths, data.size());
  require_inside(begins, sizes, text.size());
  require(begins.size() == starts.size() && proven.size() == starts.size(), "expected a digest and a flag for each piece");
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::string_view digest(reinterpret_cast<const char*>(text.data()) + begins.data()[i],
                                  static_cast<std::size_t>(sizes.data()[i]));
    proven.data()[i] = ingot::proves(digest, data.data() + starts.data()[i], static_cast<std::size_t>(lengths.data()[i]));
  }
}

void placed_each(const InBytes& data, const Numbers& positions, const Numbers& values, const Numbers& counts,
                 const Numbers& limits, const OutBytes& sound) {
  const std::size_t n = counts.size();
  require(positions.size() == n && values.size() == n && limits.size() == n && sound.size() == n,
          "expected as many of each");
  const auto size = static_cast<std::int64_t>(data.size());
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t count = counts.data()[i], at = positions.data()[i], what = values.data()[i];
    require(count >= 0 && at >= 0 && what >= 0 && at <= size && what <= size && count <= (size - at) / 8 &&
                count <= (size - what) / 4,
            "expected positions and values inside the buffer");
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < n; ++i) {
    const auto count = static_cast<std::size_t>(counts.data()[i]);
    sound.data()[i] = ingot::ascend(data.data() + positions.data()[i], count, limits.data()[i]) &&
                      ingot::finite(data.data() + values.data()[i], count);
  }
}

}  // namespace

void bind_many(nb::module_& m) {
  define(m, "take_each", &take_each, nb::arg("data"), nb::arg("starts"), nb::arg("outs"),
         "Fill each buffer of a list from its start in `data`.");
  define(m, "prove_each", &prove_each, nb::arg("data"), nb::arg("starts"), nb::arg("lengths"), nb::arg("text"),
         nb::arg("begins"), nb::arg("sizes"), nb::arg("proven"),
         "Compare slices of `data` with the digests in `text`. A flag is true only for a CRC-32C in the spelling that Ingot "
         "writes; the caller compares the others.");
  define(m, "placed_each", &placed_each, nb::arg("data"), nb::arg("positions"), nb::arg("values"), nb::arg("counts"),
         nb::arg("limits"), nb::arg("sound"),
         "Tell of i64 positions and f32 values that lie in `data` whether the positions ascend from 0 to below the limit, "
         "and whether all values are finite.");
}
