#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/differences.h"
#include "bind/positions.h"

namespace {

using Floats = In<float>;
using OutFloats = Out<float>;
using OutPositions = Out<std::int64_t>;

int width_of(const OutArray& out, const InArray& like) {
  const int width = static_cast<int>(out.itemsize());
  require((width == 2 || width == 4) && like.itemsize() == out.itemsize(), "expected elements of 2 or 4 bytes");
  return width;
}

std::int32_t top_prune(const OutPositions& positions, const OutFloats& values, std::size_t count) {
  require(values.size() == positions.size(), "expected as many positions as values");
  require(count >= 1 && count <= values.size(), "expected to keep between one value and all");
  require(apart(positions, values), "expected positions and values apart");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(top_prune)(positions.data(), values.data(), values.size(), count);
}

std::tuple<std::size_t, float, float> top_of(const InArray& tuned, const Base& base, std::string_view dtype,
                                             const OutPositions& positions, const OutFloats& largest) {
  const ingot::Differences of = differences_in(tuned, base, dtype);
  require(largest.size() == positions.size(), "expected as many positions as values");
  require(largest.size() >= 1 && largest.size() <= of.count, "expected to keep between one value and all");
  nb::gil_scoped_release release;
  const ingot::TopFound found = INGOT_KERNEL(top_of)(of, largest.size(), positions.data(), largest.data());
  return {found.bad, found.others.low, found.others.high};
}

std::tuple<std::size_t, std::size_t, float, float, std::int64_t, float> top_collect(
    const InArray& tuned, const Base& base, std::string_view dtype, std::int32_t bound, std::int64_t offset,
    const OutPositions& positions, const OutFloats& largest) {
  const ingot::Differences of = differences_in(tuned, base, dtype);
  require(largest.size() == positions.size(), "expected as many positions as values");
  const ingot::TopPlaces to{bound, 0, offset, positions.data(), largest.data(), largest.size()};
  nb::gil_scoped_release release;
  const ingot::TopFound found = INGOT_KERNEL(top_collect)(of, to);
  return {found.count, found.bad, found.others.low, found.others.high, found.last, found.last_value};
}

std::tuple<float, float> range_between(const Floats& values, const Positions& skipped) {
  const Followed sorted(skipped, values.size());
  nb::gil_scoped_release release;
  const ingot::FloatRange range =
      INGOT_KERNEL(range_between)(values.data(), values.size(), sorted.data(), sorted.size());
  return {range.low, range.high};
}

void int4_encode(const InArray& tuned, const Base& base, std::string_view dtype, std::optional<float> before,
                 const Positions& skipped, float low, float divisor, float factor, const OutBytes& packed) {
  const ingot::Differences of = differences_in(tuned, base, dtype);
  const Followed sorted(skipped, of.count);
  require(packed.size() == (of.count + (before ? 1 : 0) - skipped.size() + 1) / 2, "expected a byte for two codes");
  nb::gil_scoped_release release;
  INGOT_KERNEL(int4_encode)
  (of, before ? &*before : nullptr, sorted.data(), sorted.size(), {low, divisor, factor}, packed.data());
}

void int4_decode(const InBytes& packed, std::size_t first, const InArray& table, const Positions& positions,
                 const InArray& values, bool gaps, const OutArray& out) {
  require(table.size() == 16, "expected sixteen values");
  const int width = width_of(out, table);
  require(width_of(out, values) == width, "expected values of the output's width");
  const Followed sorted(positions, out.size());
  const ingot::Placed outliers = sorted.with(values);
  const std::size_t codes = out.size() - (gaps ? positions.size() : 0);
  require(first < 2 && (first + codes + 1) / 2 <= packed.size(), "expected a code for every other element");
  nb::gil_scoped_release release;
  INGOT_KERNEL(int4_decode)(packed.data(), first, table.data(), outliers, gaps, out.size(), out.data(), width);
}

std::size_t sign_encode(const InArray& tuned, const Base& base, std::string_view dtype, const OutFloats& sums,
                        const OutBytes& bits) {
  const ingot::Differences of = differences_in(tuned, base, dtype);
  const std::size_t rows = sums.size(), cols = rows ? of.count / rows : 0;
  require(rows * cols == of.count, "expected rows of one length");
  require(!base || cols % 8 == 0, "expected rows of whole bytes");
  require(bits.size() == (of.count + 7) / 8, "expected a bit for every value");
  nb::gil_scoped_release release;
  return INGOT_KERNEL(sign_encode)(of, rows, cols, sums.data(), bits.data());
}

void sign_decode(const InBytes& bits, std::size_t first, const InArray& scales, const OutArray& out) {
  const int width = width_of(out, scales);
  const std::size_t rows = scales.size(), cols = rows ? out.size() / rows : 0;
  require(rows * cols == out.size(), "expected rows of one length");
  require(first < 8 && (first + out.size() + 7) / 8 <= bits.size(), "expected a bit for every element");
  nb::gil_scoped_release release;
  INGOT_KERNEL(sign_decode)(bits.data(), first, scales.data(), rows, cols, out.data(), width);
}

void place_values(const Positions& positions, const InArray& values, const OutArray& out) {
  const int width = width_of(out, values);
  const Followed sorted(positions, out.size());
  const ingot::Placed what = sorted.with(values);
  nb::gil_scoped_release release;
  INGOT_KERNEL(place_values)(what, out.data(), width);
}

std::size_t first_unordered(const Positions& positions, std::int64_t last, std::int64_t limit) {
  nb::gil_scoped_release release;
  return INGOT_KERNEL(first_unordered)(positions.data(), positions.size(), last, limit);
}

}  // namespace

void bind_wdelta(nb::module_& m) {
  define(m, "top_prune", &top_prune, nb::arg("positions"), nb::arg("values"), nb::arg("count"),
        "Move the `count` values of the largest magnitudes, of equal ones the first, and their positions to the beginning, "
        "in their order; returns the least of these magnitudes as bits.");
  define(m, "range_between", &range_between, nb::arg("values"), nb::arg("skipped"),
        "Return the least and the largest value but for those at `skipped`; (inf, -inf) where none is left.");
  define(m, "top_of", &top_of, nb::arg("tuned"), nb::arg("base").none(), nb::arg("dtype"), nb::arg("positions"), nb::arg("kept"),
        "Keep the differences tuned - base in f32 (with no base, tuned itself) of the largest magnitudes, enough to fill "
        "`kept`; of equal magnitudes the first. Returns the index of the first NaN or infinity, or the number of elements, and "
        "the least and largest of the other differences, (inf, -inf) where no other is left; a zero may have either sign.");
  define(m, "top_collect", &top_collect, nb::arg("tuned"), nb::arg("base").none(), nb::arg("dtype"), nb::arg("bound"),
        nb::arg("offset"), nb::arg("positions"), nb::arg("kept"),
        "Write differences whose magnitude as bits is above `bound`, and their positions from `offset` on; returns how many "
        "(more than there is room for if they do not fit), the first that is not finite or the number of differences, "
        "and of all others the least, the largest, the last position (-1 without any) and its value.");
  define(m, "int4_encode", &int4_encode, nb::arg("tuned"), nb::arg("base").none(), nb::arg("dtype"), nb::arg("before").none(),
        nb::arg("skipped"), nb::arg("low"), nb::arg("divisor"), nb::arg("factor"), nb::arg("packed"),
        "Pack codes (d - low) / divisor * factor of the value `before` and of all differences d = tuned - base (`tuned` "
        "without a base) but those at `skipped`, the first in the high bits.");
  define(m, "int4_decode", &int4_decode, nb::arg("packed"), nb::arg("first"), nb::arg("table"), nb::arg("positions"),
        nb::arg("values"), nb::arg("gaps"), nb::arg("out"),
        "Look codes up in a table of 16; `values` go to `positions`, which have no codes where `gaps`.");
  define(m, "sign_encode", &sign_encode, nb::arg("tuned"), nb::arg("base").none(), nb::arg("dtype"), nb::arg("sums"),
        nb::arg("bits"),
        "Sum the magnitudes of each row of tuned - base (of `tuned` without a base, else rows of a multiple of eight) as NumPy "
        "does and pack one bit per value; returns the index of the first NaN or infinity or the number of values.");
  define(m, "sign_decode", &sign_decode, nb::arg("bits"), nb::arg("first"), nb::arg("scales"), nb::arg("out"),
        "Give every element its row's scale, negated where its bit is 0.");
  define(m, "place_values", &place_values, nb::arg("positions"), nb::arg("values"), nb::arg("out"),
        "Put values at ascending positions.");
  define(m, "first_unordered", &first_unordered, nb::arg("positions"), nb::arg("last"), nb::arg("limit"),
        "Return the index of the first position that is not above the one before (`last` for the first) or not below "
        "`limit`; the number of positions if there is none.");
}
