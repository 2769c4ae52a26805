// y[m, row] = sum over k of x[m, k] * w[row, k] from packed codes, in f32 in a fixed order: spec/affine.md,
// "Multiplying". A row's sum depends only on the row and x, so rows can be distributed among threads freely.
#include "kernels/affine_matmul.h"

#include <utility>

#include "kernels/affine_matmul_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kSpan = 16;     // blocks whose scales are expanded to lanes at a time
constexpr std::size_t kRowsHeld = 64;  // rows whose sums are rounded together
constexpr std::size_t kColumns = 4;   // rows of x for which a block is unpacked once

// The positions of the groups of blocks `first` to `last` of a row; they are the same for all rows.
struct Span {
  std::size_t run;          // lanes of a group; 1 if a group is a complete row
  std::size_t begin, end;   // lanes
  std::size_t from, to;     // groups
  std::size_t groups;       // of a row

  Span(const MatmulLayout& layout, std::size_t first, std::size_t last)
      : run(layout.group < layout.per_lane ? 1 : layout.group / layout.per_lane),
        begin(first * kLanes),
        end(last * kLanes),
        from(begin / run),
        to((end - 1) / run + 1),
        groups(layout.cols / layout.group + (layout.cols % layout.group != 0)) {
    if (to > groups) to = groups;
  }
};

// Scales or zeros of the lanes of a span; 0 for lanes past the last group.
struct Spread {
  alignas(64) float lanes[kSpan * kLanes];

  void fill(const Span& span, const void* values, Dtype type, std::size_t row) {
    alignas(64) float sums[kSpan * kLanes + kLanes];
    const std::size_t filled = span.to - span.from;
    load_floats_of(values, type, row * span.groups + span.from, filled, sums);
    switch (span.run) {  // usual groups begin at a span, which begins at a multiple of 16 lanes
      case 4:
        return repeat<4>(sums, filled, span);
      case 8:
        return repeat<8>(sums, filled, span);
      case 16:
        return repeat<16>(sums, filled, span);
      default:
        break;
    }
    for (std::size_t lane = span.begin, g = span.from; lane < span.end; ++g) {
      const std::size_t stop = (g + 1) * span.run < span.end ? (g + 1) * span.run : span.end;
      const float value = g < span.to ? sums[g - span.from] : 0;
      for (; lane < stop; ++lane) lanes[lane - span.begin] = value;
    }
  }

 private:
  // `values` can be read and written in units of 16 floats.
  template <std::size_t kRun>
  void repeat(float* __restrict values, std::size_t filled, const Span& span) {
    const std::size_t count = (span.end - span.begin) / kRun;
    for (; filled < count; ++filled) values[filled] = 0;
#if defined(__AVX512F__)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i group = _mm512_srli_epi32(lane, kRun == 4 ? 2 : kRun == 8 ? 3 : 4);
    for (std::size_t g = 0; g < count; g += kLanes / kRun)
      _mm512_store_ps(lanes + g * kRun, _mm512_permutexvar_ps(group, _mm512_loadu_ps(values + g)));
#else
    using Four = float __attribute__((vector_size(16)));
    for (std::size_t g = 0; g < count; ++g) {
      const Four four = Four{} + values[g];
      for (std::size_t i = 0; i < kRun; i += 4) std::memcpy(lanes + g * kRun + i, &four, sizeof four);
    }
#endif
  }
};

// The sums of rows with `kCount` columns of x. With `kGrouped`, scales differ along the row.
template <int kBits, bool kSigned, bool kGrouped, ZeroKind kZero, int kCount, bool kFused>
class Tile {
 public:
  Tile(const MatmulLayout& layout, const MatmulWeights& weights, const float* prepared)
      : layout_(layout), weights_(weights), x_(prepared), numbers_(layout.zero_point),
        span_(layout, 0, layout.blocks < kSpan ? layout.blocks : kSpan) {}

  // The sums of rows `first` to `last`, at most `kRowsHeld`, which is also the distance between the sums of the columns
  // of x.
  void rows(std::size_t first, std::size_t last, float* out) {
    if constexpr (kCount == 1) {  // x is used only once: rows are read directly
      for (std::size_t row = first; row < last; ++row) {
        Floats sums[1][kVectors] = {};
        for (std::size_t b = 0; b < layout_.blocks; b += kSpan) span(row, b, sums);
        out[row - first] = finish(sum_lanes(sums[0]), row, 0);
      }
    } else {  // a span of x stays in the first-level cache for all rows
      Floats sums[kRowsHeld][kCount][kVectors] = {};
      for (std::size_t b = 0; b < layout_.blocks; b += kSpan)
        for (std::size_t row = first; row < last; ++row) span(row, b, sums[row - first]);
      for (std::size_t row = first; row < last; ++row)
        for (int m = 0; m < kCount; ++m)
          out[m * kRowsHeld + row - first] = finish(sum_lanes(sums[row - first][m]), row, m);
    }
  }

 private:
  static constexpr int kSteps = 32 / kBits;
  static constexpr std::size_t kAhead = 2048;  // bytes to prefetch; processors do not prefetch across pages

  // Adds blocks from `first` on of a row.
  void span(std::size_t row, std::size_t first, Floats (&held)[kCount][kVectors]) {
    const std::uint8_t* codes = weights_.packed + row * layout_.row_bytes;
    const std::size_t blocks = layout_.blocks, whole = layout_.row_bytes / kBlockBytes;
    const std::size_t last = blocks - first < kSpan ? blocks : first + kSpan;
    const std::size_t ahead = kCount == 1 ? kAhead : 2 * layout_.row_bytes;
    if constexpr (kGrouped) {
      if (blocks > kSpan) span_ = Span(layout_, first, last);
      scales_.fill(span_, weights_.scales, weights_.scale_type, row);
      if (kZero != ZeroKind::none) zeros_.fill(span_, weights_.zeros, weights_.scale_type, row);
    }
    Floats sums[kCount][kVectors];
    std::memcpy(sums, held, sizeof sums);
    const std::size_t stop = last < whole ? last : whole;
    for (std::size_t b = first; b < stop; ++b) {  // without calls, so that the sums stay in registers
      __builtin_prefetch(codes + b * kBlockBytes + ahead);
      block(codes + b * kBlockBytes, b, b - first, sums);
    }
    if (stop < last) {  // the last block of all
      alignas(64) std::uint8_t tail[kBlockBytes] = {};
      std::memcpy(tail, codes + stop * kBlockBytes, layout_.row_bytes - stop * kBlockBytes);
      block(tail, stop, stop - first, sums);
    }
    std::memcpy(held, sums, sizeof sums);
  }

  void block(const std::uint8_t* codes, std::size_t b, std::size_t local, Floats (&sums)[kCount][kVectors]) {
    for (std::size_t h = 0; h < kVectors; ++h) {
      const Words words = load_words(codes + h * kVectorBytes);
      block_of(words, b, local, h, sums, std::make_integer_sequence<int, kSteps>{});
    }
  }

  template <int... kStep>
  void block_of(const Words& words, std::size_t b, std::size_t local, std::size_t h,
                Floats (&sums)[kCount][kVectors], std::integer_sequence<int, kStep...>) {
    const Floats q[kSteps] = {numbers_.template look_up<kBits * kStep>(words)...};
    for (int m = 0; m < kCount; ++m) {
      const float* x = x_ + m * layout_.prepared + b * (kSteps + 1) * kLanes + h * kWidth;
      Floats part = sum_products<kFused, kSteps>(x, q);
      if constexpr (kGrouped) {
        const Floats scale = load_floats(scales_.lanes + local * kLanes + h * kWidth);
        if constexpr (kZero == ZeroKind::none) {
          part = scale * part;
        } else {
          const Floats shift = load_floats(zeros_.lanes + local * kLanes + h * kWidth) * load_floats(x + kSteps * kLanes);
          part = kZero == ZeroKind::point ? scale * (part - shift) : scale * part + shift;
        }
      }
      sums[m][h] += part;
    }
  }

  float finish(float sum, std::size_t row, int m) const {
    if constexpr (kGrouped) return sum;
    const std::size_t index = layout_.per_tensor ? 0 : row;
    const float scale = load_at(weights_.scales, weights_.scale_type, index);
    if (layout_.zero == ZeroKind::none) return scale * sum;
    const float zero = load_at(weights_.zeros, weights_.scale_type, index);
    const float shift = zero * x_[(m + 1) * layout_.prepared - kLanes];
    return layout_.zero == ZeroKind::point ? scale * (sum - shift) : scale * sum + shift;
  }

  const MatmulLayout layout_;
  const MatmulWeights weights_;
  const float* x_;
  const Numbers<kBits, kSigned> numbers_;
  Span span_;  // the current scale, if rows have several
  Spread scales_, zeros_;
};

template <int kBits, bool kSigned, bool kGrouped, ZeroKind kZero, int kCount, bool kFused>
void tile(const MatmulLayout& layout, const MatmulWeights& weights, const float* prepared, std::size_t first,
          std::size_t last, float* out) {
  Tile<kBits, kSigned, kGrouped, kZero, kCount, kFused>(layout, weights, prepared).rows(first, last, out);
}

using TileFn = void (*)(const MatmulLayout&, const MatmulWeights&, const float*, std::size_t, std::size_t, float*);

template <int kBits, bool kSigned, int kCount, bool kFused>
TileFn tile_for(const MatmulLayout& layout) {
  if (layout.one_scale) return tile<kBits, kSigned, false, ZeroKind::none, kCount, kFused>;
  switch (layout.zero) {
    case ZeroKind::point:
      return tile<kBits, kSigned, true, ZeroKind::point, kCount, kFused>;
    case ZeroKind::offset:
      return tile<kBits, kSigned, true, ZeroKind::offset, kCount, kFused>;
    default:
      return tile<kBits, kSigned, true, ZeroKind::none, kCount, kFused>;
  }
}

template <int kCount, bool kFused>
TileFn tile_of(const MatmulLayout& layout) {
  if (layout.bits == 4)
    return layout.is_signed ? tile_for<4, true, kCount, kFused>(layout) : tile_for<4, false, kCount, kFused>(layout);
  return layout.is_signed ? tile_for<8, true, kCount, kFused>(layout) : tile_for<8, false, kCount, kFused>(layout);
}

// One block of x: values ordered by lane, then by step; then each lane's sum.
template <int kSteps>
void prepare_block(const float* __restrict values, float* __restrict out) {
  for (int step = 0; step < kSteps; ++step)
    for (std::size_t lane = 0; lane < kLanes; ++lane) out[step * kLanes + lane] = values[lane * kSteps + step];
  for (std::size_t h = 0; h < kLanes; h += kWidth) {
    Floats steps[kSteps];
    for (int step = 0; step < kSteps; ++step) steps[step] = load_floats(out + step * kLanes + h);
    store_floats(out + kSteps * kLanes + h, sum_steps<kSteps>(steps));
  }
}

}  // namespace

void matmul_prepare(const MatmulLayout& layout, const void* x, Dtype type, std::size_t count, float* prepared) {
  const std::size_t blocks = layout.blocks, width = kLanes * layout.per_lane, steps = layout.per_lane;
  alignas(64) float values[kLanes * 8];
  for (std::size_t m = 0; m < count; ++m) {
    Floats total[kVectors] = {};
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t from = b * width, held = layout.cols - from < width ? layout.cols - from : width;
      load_floats_of(x, type, m * layout.cols + from, held, values);
      for (std::size_t i = held; i < width; ++i) values[i] = 0;
      steps == 8 ? prepare_block<8>(values, prepared) : prepare_block<4>(values, prepared);
      for (std::size_t h = 0; h < kVectors; ++h) total[h] += load_floats(prepared + steps * kLanes + h * kWidth);
      prepared += (steps + 1) * kLanes;
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) prepared[lane] = 0;
    prepared[0] = sum_lanes(total);
    prepared += kLanes;
  }
}

void matmul_rows(const MatmulLayout& layout, const MatmulWeights& weights, const float* prepared, std::size_t count,
                 bool exact, std::size_t first, std::size_t last, const MatmulOutput& out) {
  const TileFn single = tile_of<1, false>(layout),
               several = exact ? tile_of<kColumns, true>(layout) : tile_of<kColumns, false>(layout);
  alignas(64) float sums[kColumns][kRowsHeld], bias[kRowsHeld];
  for (; first < last; first += kRowsHeld) {
    const std::size_t stop = last - first < kRowsHeld ? last : first + kRowsHeld, rows = stop - first;
    if (out.bias) load_floats_of(out.bias, out.bias_type, first, rows, bias);
    for (std::size_t m = 0; m < count;) {
      const std::size_t done = count - m < kColumns ? 1 : kColumns;
      (done == 1 ? single : several)(layout, weights, prepared + m * layout.prepared, first, stop, sums[0]);
      for (std::size_t i = 0; i < done; ++i, ++m) {
        if (out.bias)
          for (std::size_t k = 0; k < rows; ++k) sums[i][k] += bias[k];
        store_values(sums[i], rows, out, m * layout.rows + first);
      }
    }
  }
}

}  // namespace ingot::INGOT_ISA
