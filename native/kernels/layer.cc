// The operations of a decoder layer between its products: RMS norm, rotary positions, SiLU gates, sums, attention of a
// few queries. They compute in f32 in a fixed order, with sixteen partial sums for sums over columns, and round as
// transformers does.
#include "kernels/layer.h"

#include <cmath>

#include "kernels/exponential.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kPiece = 256;   // values that are processed at a time
static_assert(kPiece % kLanes == 0 && kAttendTokens % kLanes == 0);

// Calls `work.operator()<type>()`.
template <class Work>
inline void with_type(Dtype type, const Work& work) {
  switch (type) {
    case Dtype::f16:
      return work.template operator()<Dtype::f16>();
    case Dtype::bf16:
      return work.template operator()<Dtype::bf16>();
    default:
      return work.template operator()<Dtype::f32>();
  }
}

// Converts values of one type to floats and back.
template <Dtype kDtype>
struct Values {
  using Type = TypeOf<kDtype>;

  static const Type* cast(const void* from, std::size_t first = 0) { return static_cast<const Type*>(from) + first; }
  static Type* cast(void* from, std::size_t first = 0) { return static_cast<Type*>(from) + first; }

  // Loads up to one piece of values, padded with zeros.
  static void load(const void* from, std::size_t first, std::size_t filled, float (&values)[kPiece]) {
    load_block<kDtype>(cast(from, first), filled, values);
    for (std::size_t i = filled; i < kPiece; ++i) values[i] = 0;
  }

  static void round(float* values, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) values[i] = Element<kDtype>::load(Element<kDtype>::store(values[i]));
  }
};

// Calls work(first, held) for pieces of `n` values.
template <class Work>
inline void in_pieces(std::size_t n, const Work& work) {
  for (std::size_t first = 0; first < n; first += kPiece) work(first, n - first < kPiece ? n - first : kPiece);
}

// Calls work.operator()<type>(some, others) for pieces of two arrays, then stores the first.
template <class Work>
inline void combine(const void* x, const void* y, Dtype type, std::size_t n, void* out, const Work& work) {
  with_type(type, [&]<Dtype kDtype>() {
    alignas(64) float batch[kPiece], others[kPiece];
    in_pieces(n, [&](std::size_t first, std::size_t filled) {
      Values<kDtype>::load(x, first, filled, batch);
      Values<kDtype>::load(y, first, filled, others);
      work.template operator()<kDtype>(batch, others);
      store_block<kDtype>(batch, filled, Values<kDtype>::cast(out, first));
    });
  });
}

inline Floats silu(Floats x) { return x / (splat(1) + exponential(-x)); }

// Attention of `kRows` rows of a head in one segment of tokens.
template <Dtype kDtype, std::size_t kRows>
class Segment {
 public:
  Segment(const Attend& task, std::size_t head, std::size_t segment, std::size_t row)
      : task_(task), first_(segment * kAttendTokens),
        count_(task.tokens - first_ < kAttendTokens ? task.tokens - first_ : kAttendTokens) {
    const auto* queries = Values<kDtype>::cast(task.queries, (head * task.rows + row) * task.width);
    for (std::size_t m = 0; m < kRows; ++m) {
      load_block<kDtype>(queries + m * task.width, task.width, query_[m]);
      for (std::size_t i = 0; i < task.width; ++i) query_[m][i] *= task.scale;
    }
    offset_ = (head * task.capacity + first_) * task.width;
  }

  void run(float* parts) {
    score();
    for (std::size_t m = 0; m < kRows; ++m) weigh(m, parts + m * task_.part());
    std::size_t column = 0;
    for (; column + 4 * kLanes <= task_.width; column += 4 * kLanes) mix<4>(column, parts);
    for (; column < task_.width; column += kLanes) mix<1>(column, parts);
  }

 private:
  void score() {
    const auto* keys = Values<kDtype>::cast(task_.keys, offset_);
    alignas(64) float key[kAttendWidth];
    for (std::size_t token = 0; token < count_; ++token) {
      load_block<kDtype>(keys + token * task_.width, task_.width, key);
      Floats sums[kRows][kVectors] = {};
      for (std::size_t i = 0; i < task_.width; i += kWidth) {
        const Floats values = load_floats(key + i);
        for (std::size_t m = 0; m < kRows; ++m) sums[m][i / kWidth % kVectors] += load_floats(query_[m] + i) * values;
      }
      for (std::size_t m = 0; m < kRows; ++m) scores_[m][token] = sum_lanes(sums[m]);
    }
  }

  // Converts scores to exponentials; past the last token they are 0.
  void weigh(std::size_t m, float* part) {
    float* scores = scores_[m];
    float amax = scores[0];
    for (std::size_t token = 1; token < count_; ++token) amax = scores[token] > amax ? scores[token] : amax;
    Floats sums[kVectors] = {};
    for (std::size_t token = 0; token < count_; token += kLanes) {
      for (std::size_t v = 0; v < kVectors; ++v)
        store_floats(scores + token + v * kWidth, exponential(load_floats(scores + token + v * kWidth) - splat(amax)));
      for (std::size_t i = count_ - token; i < kLanes; ++i) scores[token + i] = 0;
      for (std::size_t v = 0; v < kVectors; ++v) sums[v] += load_floats(scores + token + v * kWidth);
    }
    part[0] = amax, part[1] = sum_lanes(sums);
  }

  // Weighted sums of values in `kSixteens` * 16 columns, token after token.
  template <std::size_t kSixteens>
  void mix(std::size_t column, float* parts) {
    const auto* values = Values<kDtype>::cast(task_.values, offset_ + column);
    Floats sums[kRows][kSixteens * kVectors] = {};
    alignas(64) float value[kSixteens * kLanes];
    for (std::size_t token = 0; token < count_; ++token) {
      const auto* from = values + token * task_.width;
      for (std::size_t i = 0; i < kSixteens * kLanes; ++i) value[i] = Element<kDtype>::load(from[i]);
      for (std::size_t m = 0; m < kRows; ++m) {
        const Floats weight = splat(scores_[m][token]);
        for (std::size_t v = 0; v < kSixteens * kVectors; ++v) sums[m][v] += weight * load_floats(value + v * kWidth);
      }
    }
    for (std::size_t m = 0; m < kRows; ++m)
      for (std::size_t v = 0; v < kSixteens * kVectors; ++v)
        store_floats(parts + m * task_.part() + 2 + column + v * kWidth, sums[m][v]);
  }

  const Attend& task_;
  const std::size_t first_, count_;
  std::size_t offset_;
  alignas(64) float query_[kRows][kAttendWidth];
  alignas(64) float scores_[kRows][kAttendTokens] = {};
};

template <Dtype kDtype>
void segment_of(const Attend& task, std::size_t head, std::size_t segment, float* parts) {
  std::size_t row = 0;
  const auto rows = [&]<std::size_t kRows>() {  // queries that share loads of keys and values
    for (; row + kRows <= task.rows; row += kRows)
      Segment<kDtype, kRows>(task, head, segment, row).run(parts + row * task.part());
  };
#if defined(__AVX512F__)
  rows.template operator()<6>();  // sums of 64 columns each: 24 of 32 registers
#endif
  rows.template operator()<4>();
  rows.template operator()<2>();
  rows.template operator()<1>();
}

}  // namespace

void rms_norm(const void* x, const void* weight, Dtype type, std::size_t cols, float eps, void* out) {
  with_type(type, [&]<Dtype kDtype>() {
    alignas(64) float values[kPiece], weights[kPiece];
    Floats sums[kVectors] = {};
    in_pieces(cols, [&](std::size_t first, std::size_t filled) {
      Values<kDtype>::load(x, first, filled, values);
      for (std::size_t i = 0; i < kPiece; i += kWidth) {
        const Floats partial = load_floats(values + i);
        sums[i / kWidth % kVectors] += partial * partial;
      }
    });
    const float scale = 1.0f / std::sqrt(sum_lanes(sums) / static_cast<float>(cols) + eps);
    in_pieces(cols, [&](std::size_t first, std::size_t filled) {
      Values<kDtype>::load(x, first, filled, values);
      Values<kDtype>::load(weight, first, filled, weights);
      for (std::size_t i = 0; i < kPiece; ++i) values[i] *= scale;
      Values<kDtype>::round(values, kPiece);
      for (std::size_t i = 0; i < kPiece; ++i) values[i] = weights[i] * values[i];
      store_block<kDtype>(values, filled, Values<kDtype>::cast(out, first));
    });
  });
}

void add_values(const void* x, const void* y, Dtype type, std::size_t n, void* out) {
  combine(x, y, type, n, out, []<Dtype kDtype>(float* listed, float* others) {
    for (std::size_t i = 0; i < kPiece; ++i) listed[i] += others[i];
  });
}

void gate_values(const void* gate, const void* up, Dtype type, std::size_t n, void* out) {
  combine(gate, up, type, n, out, []<Dtype kDtype>(float* gates, float* values) {
    for (std::size_t i = 0; i < kPiece; i += kWidth) store_floats(gates + i, silu(load_floats(gates + i)));
    Values<kDtype>::round(gates, kPiece);
    for (std::size_t i = 0; i < kPiece; ++i) gates[i] *= values[i];
  });
}

void rotate_heads(void* x, const void* cosines, const void* sines, Dtype type, std::size_t heads, std::size_t width) {
  with_type(type, [&]<Dtype kDtype>() {
    alignas(64) float c[kAttendWidth], s[kAttendWidth], own[kAttendWidth], turned[kAttendWidth];
    load_block<kDtype>(Values<kDtype>::cast(cosines), width, c);
    load_block<kDtype>(Values<kDtype>::cast(sines), width, s);
    for (std::size_t head = 0; head < heads; ++head) {
      auto* values = Values<kDtype>::cast(x, head * width);
      load_block<kDtype>(values, width, own);
      for (std::size_t i = 0; i < width / 2; ++i) turned[i] = -own[i + width / 2] * s[i];
      for (std::size_t i = width / 2; i < width; ++i) turned[i] = own[i - width / 2] * s[i];
      for (std::size_t i = 0; i < width; ++i) own[i] *= c[i];
      Values<kDtype>::round(own, width);
      Values<kDtype>::round(turned, width);
      for (std::size_t i = 0; i < width; ++i) own[i] += turned[i];
      store_block<kDtype>(own, width, values);
    }
  });
}

void attend_segment(const Attend& task, std::size_t head, std::size_t segment, float* parts) {
  with_type(task.type, [&]<Dtype kDtype>() { segment_of<kDtype>(task, head, segment, parts); });
}

// Processes segment after segment; `parts` has the results of the first, then of the others.
void attend_merge(const Attend& task, std::size_t head, const float* parts) {
  alignas(64) float sums[kAttendWidth];
  for (std::size_t row = 0; row < task.rows; ++row) {
    const auto part = [&](std::size_t segment) { return parts + (segment * task.rows + row) * task.part(); };
    float amax = part(0)[0], whole = 0;
    for (std::size_t i = 1; i < task.segments(); ++i) amax = part(i)[0] > amax ? part(i)[0] : amax;
    for (std::size_t i = 0; i < task.width; ++i) sums[i] = 0;
    for (std::size_t segment = 0; segment < task.segments(); ++segment) {
      const float* values = part(segment);
      const float weight = exponential(splat(values[0] - amax))[0];
      whole += values[1] * weight;
      for (std::size_t i = 0; i < task.width; ++i) sums[i] += values[2 + i] * weight;
    }
    for (std::size_t i = 0; i < task.width; ++i) sums[i] /= whole;
    with_type(task.type, [&]<Dtype kDtype>() {
      store_block<kDtype>(sums, task.width, Values<kDtype>::cast(task.out, (head * task.rows + row) * task.width));
    });
  }
}

}  // namespace ingot::INGOT_ISA
