#include "core/layer.h"

#include <memory>
#include <vector>

#include "bind/packed_matrix.h"
#include "core/dispatch.h"
#include "core/pool.h"
#include "kernels/layer.h"

namespace {

using ingot::Attend;
using ingot::Dtype;

constexpr std::size_t kTaskRows = 8;                  // values per task
constexpr std::size_t kSmall = std::size_t{1} << 15;  // minimum of values for a second thread

// Calls work(index) for every index below `tasks`.
template <class Work>
void in_tasks(std::size_t tasks, std::size_t threads, const Work& work) {
  const auto call = [](void* self, std::size_t index) { (*static_cast<const Work*>(self))(index); };
  ingot::run_tasks(tasks, std::clamp<std::size_t>(threads, 1, 256), call, const_cast<void*>(static_cast<const void*>(&work)));
}

// Calls work(first, last) for rows of `cols` values.
template <class Work>
void in_rows(std::size_t rows, std::size_t cols, std::size_t threads, const Work& work) {
  in_tasks((rows + kTaskRows - 1) / kTaskRows, rows * cols < kSmall ? 1 : threads, [&](std::size_t index) {
    work(index * kTaskRows, std::min(rows, (index + 1) * kTaskRows));
  });
}

// Rows of values of one type; the values are written later.
class Rows {
 public:
  Rows(std::size_t rows, std::size_t cols, std::size_t size)
      : bytes_(new std::uint8_t[rows * cols * size]), row_(cols * size) {}
  void* row(std::size_t row) const { return bytes_.get() + row * row_; }

 private:
  const std::unique_ptr<std::uint8_t[]> bytes_;
  const std::size_t row_;
};

void attend_all(const Attend& task, std::size_t threads) {
  const std::size_t segments = task.segments(), each = task.rows * task.part();
  std::vector<float> parts(task.heads * segments * each);
  if (task.heads * task.tokens * task.width < kSmall) threads = 1;
  in_tasks(task.heads * segments, threads, [&](std::size_t index) {
    INGOT_KERNEL(attend_segment)(task, index / segments, index % segments, parts.data() + index * each);
  });
  for (std::size_t head = 0; head < task.heads; ++head)
    INGOT_KERNEL(attend_merge)(task, head, parts.data() + head * segments * each);
}

void attend(const InArray& queries, const InArray& keys, const InArray& values, std::size_t tokens, const OutArray& out,
            std::string_view dtype, float scale, std::size_t threads) {
  const Dtype type = float_type(dtype);
  require(type != Dtype::f64, "expected values of type f32, f16 or bf16");
  require(queries.ndim() == 3 && keys.ndim() == 3 && values.ndim() == 3 && out.ndim() == 3, "expected arrays of heads");
  require_elements(queries, type, "expected queries of the named type");
  require_elements(keys, type, "expected keys of the named type");
  require_elements(values, type, "expected values of the named type");
  require_elements(out, type, "expected an output of the named type");
  const std::size_t heads = queries.shape(0), rows = queries.shape(1), width = queries.shape(2);
  require(width % ingot::kAttendColumns == 0 && width <= ingot::kAttendWidth, "expected heads of at most 512 columns, in sixteens");
  require(keys.shape(0) == heads && keys.shape(2) == width, "expected keys [heads, tokens, width]");
  for (std::size_t i = 0; i < 3; ++i) {
    require(values.shape(i) == keys.shape(i), "expected values as keys");
    require(out.shape(i) == queries.shape(i), "expected an output as queries");
  }
  require(tokens >= 1 && tokens <= keys.shape(1), "expected no more tokens than there are keys");
  const Attend task{queries.data(), keys.data(), values.data(), out.data(), heads, rows,
                    width,          tokens,      keys.shape(1), type,       scale};
  if (out.size() == 0) return;
  nb::gil_scoped_release release;
  attend_all(task, threads);
}

// The seven products of a decoder layer, and the operations between them.
class DecoderLayer {
 public:
  DecoderLayer(nb::list matrices, nb::list biases, nb::list norms, nb::list epsilons, std::size_t width,
               std::string_view dtype)
      : matrices_(matrices), width_(width), type_(float_type(dtype)), size_(type_ == Dtype::f32 ? 4 : 2) {
    require(type_ != Dtype::f64, "expected values of type f32, f16 or bf16");
    require(nb::len(matrices) == kCount && nb::len(biases) == kCount, "expected seven matrices, and a bias or None of each");
    require(nb::len(norms) == kNorms && nb::len(epsilons) == kNorms, "expected four norms, and an epsilon of each");
    for (std::size_t i = 0; i < kCount; ++i) {
      opened_[i] = nb::cast<const PackedMatrix*>(matrices[i]);
      require(opened_[i] && opened_[i]->rounds(), "expected matrices that take x in 8 bits");
      biases_[i] = vector_of(biases[i], opened_[i]->rows());
    }
    const std::size_t hidden = opened_[kQuery]->cols(), between = opened_[kGate]->rows(),
                      attended = opened_[kQuery]->rows();
    require(width >= 2 && width % 2 == 0 && width <= ingot::kAttendWidth, "expected heads of at most 512 columns, in pairs");
    require(attended % width == 0 && opened_[kKey]->rows() % width == 0, "expected whole heads");
    require(opened_[kKey]->cols() == hidden && opened_[kValue]->cols() == hidden &&
                opened_[kGate]->cols() == hidden && opened_[kUp]->cols() == hidden &&
                opened_[kOut]->rows() == hidden && opened_[kDown]->rows() == hidden,
            "expected matrices of one hidden size");
    require(
        opened_[kOut]->cols() == attended && opened_[kUp]->rows() == between && opened_[kDown]->cols() == between,
        "expected matrices that follow each other");
    for (std::size_t i = 0; i < kNorms; ++i) {
      norms_[i] = vector_of(norms[i], i == kBefore || i == kBetween ? hidden : width);
      eps_[i] = nb::cast<float>(epsilons[i]);
    }
    require(norms_[kBefore] && norms_[kBetween], "expected norms of both halves of the layer");
  }

  // Computes queries, keys and values of rows of x, and rotates queries and keys to their positions.
  void project(const InArray& x, const InArray& cosines, const InArray& sines, const OutArray& queries, const OutArray& keys,
               const OutArray& values, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols(), rows = require_rows(x, hidden);
    require(require_rows(cosines, width_) == rows && require_rows(sines, width_) == rows, "expected an angle for each row");
    require_output(queries, rows, opened_[kQuery]->rows());
    require_output(keys, rows, opened_[kKey]->rows());
    require_output(values, rows, opened_[kValue]->rows());
    nb::gil_scoped_release release;
    project_rows(x.data(), rows, cosines.data(), sines.data(), queries.data(), keys.data(), values.data(), threads);
  }

  // Writes the layer's output for the next token of each sequence. Its keys and values are stored after the first
  // `used` tokens, and attention covers all of them.
  void step(const InArray& x, const InArray& cosines, const InArray& sines, const OutArray& keys, const OutArray& values,
            std::size_t used, float scale, const OutArray& out, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols(), rows = require_rows(x, hidden),
                      shared = opened_[kKey]->rows() / width_;
    require(require_rows(cosines, width_) == rows && require_rows(sines, width_) == rows, "expected an angle for each row");
    require_output(out, rows, hidden);
    require(keys.ndim() == 4 && keys.shape(0) == rows && keys.shape(1) == shared && keys.shape(3) == width_,
            "expected keys [sequences, heads, tokens, width]");
    for (std::size_t i = 0; i < 4; ++i) require(values.ndim() == 4 && values.shape(i) == keys.shape(i), "expected values as keys");
    require_elements(keys, type_, "expected keys of the layer's type");
    require_elements(values, type_, "expected values of the layer's type");
    require(used < keys.shape(2), "expected room for a token more");
    require(width_ % ingot::kAttendColumns == 0 && opened_[kQuery]->rows() / width_ % shared == 0,
            "expected heads that can share keys");
    nb::gil_scoped_release release;
    const std::size_t room = keys.shape(2), heads = opened_[kQuery]->rows(), kept = opened_[kKey]->rows();
    const Rows queries(rows, heads, size_), key(rows, kept, size_), value(rows, kept, size_);
    project_rows(x.data(), rows, cosines.data(), sines.data(), queries.row(0), key.row(0), value.row(0), threads);
    for (std::size_t head = 0; head < rows * shared; ++head) {
      std::memcpy(row_of(keys.data(), head * room + used, width_), row_of(key.row(0), head, width_), width_ * size_);
      std::memcpy(row_of(values.data(), head * room + used, width_), row_of(value.row(0), head, width_),
                  width_ * size_);
    }
    const Rows attended(rows, heads, size_);
    attend_all({queries.row(0), keys.data(), values.data(), attended.row(0), rows * shared, heads / kept, width_,
                used + 1, room, type_, scale},
               threads);
    finish_all(attended.row(0), x.data(), rows, out.data(), threads);
  }

  // Writes the layer's output from its input and the output of attention.
  void finish(const InArray& attended, const InArray& x, const OutArray& out, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols(), heads = opened_[kOut]->cols(),
                      rows = require_rows(x, hidden);
    require(require_rows(attended, heads) == rows, "expected what each row attended to");
    require_output(out, rows, hidden);
    nb::gil_scoped_release release;
    finish_all(attended.data(), x.data(), rows, out.data(), threads);
  }

 private:
  enum : std::size_t { kQuery, kKey, kValue, kOut, kGate, kUp, kDown, kCount };
  enum : std::size_t { kBefore, kBetween, kQueryHeads, kKeyHeads, kNorms };  // the last two: as kQuery and kKey

  const void* row_of(const void* values, std::size_t row, std::size_t cols) const {
    return static_cast<const std::uint8_t*>(values) + row * cols * size_;
  }
  void* row_of(void* values, std::size_t row, std::size_t cols) const {
    return static_cast<std::uint8_t*>(values) + row * cols * size_;
  }

  // Accepts None.
  std::optional<InArray> vector_of(nb::handle given, std::size_t size) const {
    if (given.is_none()) return std::nullopt;
    const InArray result = nb::cast<InArray>(given);
    require_elements(result, type_, "expected aligned biases and norms of the named type");
    require(result.ndim() == 1 && result.size() == size,
            "expected a bias for each row, a weight of a norm for each column");
    return result;
  }

  template <class Array>
  std::size_t require_rows(const Array& x, std::size_t cols) const {
    require(x.ndim() == 2 && x.shape(1) == cols, "expected rows of as many columns as the layer has");
    require_elements(x, type_, "expected values of the layer's type");
    return x.shape(0);
  }

  void require_output(const OutArray& out, std::size_t rows, std::size_t cols) const {
    require(require_rows(out, cols) == rows, "expected an output for each row");
  }

  void multiply(std::size_t which, const void* x, std::size_t rows, void* out, std::size_t threads) const {
    const bool dots = ingot::has_dots(ingot::current_isa());
    const void* bias = biases_[which] ? biases_[which]->data() : nullptr;
    ingot::multiply_int8(opened_[which]->weights(), x, rows, {bias, type_, out, type_}, dots, threads);
  }

  void norm(std::size_t which, const void* x, std::size_t rows, const Rows& out, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols();
    in_rows(rows, hidden, threads, [&](std::size_t first, std::size_t last) {
      for (std::size_t row = first; row < last; ++row)
        INGOT_KERNEL(rms_norm)(row_of(x, row, hidden), norms_[which]->data(), type_, hidden, eps_[which], out.row(row));
    });
  }

  // Applies the norm of each head in a row, if there is one, then the rotation to the position.
  void turn(std::size_t which, void* row, const void* cosines, const void* sines) const {
    const std::size_t heads = opened_[which]->rows() / width_, norm = kQueryHeads + which;
    if (norms_[norm])
      for (std::size_t head = 0; head < heads; ++head) {
        void* values = row_of(row, head, width_);
        INGOT_KERNEL(rms_norm)(values, norms_[norm]->data(), type_, width_, eps_[norm], values);
      }
    INGOT_KERNEL(rotate_heads)(row, cosines, sines, type_, heads, width_);
  }

  void project_rows(const void* x, std::size_t rows, const void* cosines, const void* sines, void* queries, void* keys,
                    void* values, std::size_t threads) const {
    const Rows normal(rows, opened_[kQuery]->cols(), size_);
    norm(kBefore, x, rows, normal, threads);
    multiply(kQuery, normal.row(0), rows, queries, threads);
    multiply(kKey, normal.row(0), rows, keys, threads);
    multiply(kValue, normal.row(0), rows, values, threads);
    in_rows(rows, opened_[kQuery]->rows(), threads, [&](std::size_t first, std::size_t last) {
      for (std::size_t row = first; row < last; ++row)
        for (const std::size_t which : {kQuery, kKey})
          turn(which, row_of(which == kQuery ? queries : keys, row, opened_[which]->rows()),
               row_of(cosines, row, width_), row_of(sines, row, width_));
    });
  }

  void finish_all(const void* attended, const void* x, std::size_t rows, void* out, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols(), heads = opened_[kOut]->cols();
    for (std::size_t first = 0; first < rows; first += ingot::kInt8Count)
      finish_rows(row_of(attended, first, heads), row_of(x, first, hidden), std::min(rows - first, ingot::kInt8Count),
                  row_of(out, first, hidden), threads);
  }

  void finish_rows(const void* attended, const void* x, std::size_t rows, void* out, std::size_t threads) const {
    const std::size_t hidden = opened_[kQuery]->cols(), between = opened_[kGate]->rows();
    const Rows normal(rows, hidden, size_), gates(rows, between, size_), ups(rows, between, size_);
    const auto add = [&](const void* single, const void* other) {
      in_rows(rows, hidden, threads, [&](std::size_t first, std::size_t last) {
        INGOT_KERNEL(add_values)
        (row_of(single, first, hidden), row_of(other, first, hidden), type_, (last - first) * hidden,
         row_of(out, first, hidden));
      });
    };
    multiply(kOut, attended, rows, normal.row(0), threads);
    add(x, normal.row(0));
    norm(kBetween, out, rows, normal, threads);
    multiply(kGate, normal.row(0), rows, gates.row(0), threads);
    multiply(kUp, normal.row(0), rows, ups.row(0), threads);
    in_rows(rows, between, threads, [&](std::size_t first, std::size_t last) {
      INGOT_KERNEL(gate_values)(gates.row(first), ups.row(first), type_, (last - first) * between, gates.row(first));
    });
    multiply(kDown, gates.row(0), rows, normal.row(0), threads);
    add(out, normal.row(0));
  }

  const nb::list matrices_;  // keeps the arrays alive
  const PackedMatrix* opened_[kCount];
  std::optional<InArray> biases_[kCount];
  std::optional<InArray> norms_[kNorms];
  float eps_[kNorms];
  const std::size_t width_;
  const Dtype type_;
  const std::size_t size_;
};

}  // namespace

void bind_layer(nb::module_& m) {
  define(m, "attend", &attend, nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("tokens"), nb::arg("out"),
         nb::arg("dtype"), nb::arg("scale"), nb::arg("threads"),
         "Attention of queries [heads, rows, width] to the first tokens of keys and values [heads, capacity, width].");
  nb::class_<DecoderLayer>(m, "DecoderLayer", "A decoder layer, of x in 8 bits.")
      .def(nb::init<nb::list, nb::list, nb::list, nb::list, std::size_t, std::string_view>(), nb::arg("matrices"),
           nb::arg("biases"), nb::arg("norms"), nb::arg("epsilons"), nb::arg("width"), nb::arg("dtype"))
      .def("project", guarded(&DecoderLayer::project), nb::arg("x"), nb::arg("cosines"), nb::arg("sines"), nb::arg("queries"),
           nb::arg("keys"), nb::arg("values"), nb::arg("threads"), "Queries, keys and values of rows of x.")
      .def("finish", guarded(&DecoderLayer::finish), nb::arg("attended"), nb::arg("x"), nb::arg("out"), nb::arg("threads"),
           "Write the layer's output, computed from the output of attention and the layer's input.")
      .def("step", guarded(&DecoderLayer::step), nb::arg("x"), nb::arg("cosines"), nb::arg("sines"), nb::arg("keys"),
           nb::arg("values"), nb::arg("used"), nb::arg("scale"), nb::arg("out"), nb::arg("threads"),
           "Write the layer's output for one more token of each sequence; store its keys and values after the `used` ones.");
}
