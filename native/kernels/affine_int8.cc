// y[m, row] for x in 8 bits: blocks of 32 products are added exactly, as integers, then block after block in f32, in
// four parallel sums (spec/affine.md, "Activations in 8 bits"). A vector holds one column of as many rows of weights as
// it has lanes.
#include "kernels/affine_int8.h"

#include "kernels/affine_dots.h"
#include "kernels/affine_gemm_unpack.h"
#include "kernels/affine_int8_few.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kWords = 8;                                // of four columns: a block
constexpr std::size_t kSpanBlocks = kInt8Span * kInt8Sums;
constexpr std::size_t kUnitBytes = kSpanBlocks * kWords * kVectorBytes;
#if defined(__AVX512F__)
constexpr std::size_t kInt8Tile = 12;  // rows of x with sums in registers, of which there are 32
#elif defined(__aarch64__)
constexpr std::size_t kInt8Tile = 8;
#else
constexpr std::size_t kInt8Tile = 4;
#endif
static_assert(kInt8Count % kInt8Tile == 0, "sums are held for whole tiles");

// The column in its block of byte `i` of word `word`, in the order in which codes are unpacked.
constexpr std::size_t column_of(int bits, std::size_t word, std::size_t i) {
  if (bits == 4) return word % 4 * 8 + 2 * i + word / 4;
  if (bits == 2) return word / 4 * 16 + 4 * i + word % 4;
  return 4 * word + i;
}

// The difference between stored bytes and the numbers q.
inline int center_of(const MatmulLayout& layout) {
  const int half = layout.is_signed ? 1 << (layout.bits - 1) : 0;
  return half + layout.zero_point - (kSignedCodes && layout.bits == 8 ? 128 : 0);
}

// A span of blocks of x, and one of its tiles of rows.
struct Position {
  std::size_t four, fours, m, rows;

  Position(const Int8Job& job, std::size_t first, std::size_t row)
      : four(first), fours(job.fours - first < kInt8Span ? job.fours - first : kInt8Span), m(row),
        rows(job.count - row < kInt8Tile ? job.count - row : kInt8Tile) {}

  // The position of block `sum` + 4 * `index` of the span, in blocks of one row.
  std::size_t block(const Int8Job& job, std::size_t sum, std::size_t index) const {
    return (four * job.count + m * fours) * kInt8Sums + (sum * fours + index) * rows;
  }
};

// A block of x as 8-bit integers: x is about step * integer, with magnitudes up to 127. Below 2^-119 all are 0.
using Numbers32 = std::int32_t __attribute__((vector_size(4 * kInt8Block)));
using Floats32 = float __attribute__((vector_size(4 * kInt8Block)));
using Bytes32 = std::int8_t __attribute__((vector_size(kInt8Block)));

struct Rounded {
  Numbers32 numbers{};
  float step = 0;
  std::int32_t sum = 0;

  explicit Rounded(const float* values) {
    constexpr std::uint32_t kTiny = (127 - 119) << 23, kInfinite = 0x7f800000u;
    constexpr float kRound = 0x1.8p23f;  // a unit in the last place is 1: adding it rounds, ties to even
    std::uint32_t largest = 0;
    for (std::size_t k = 0; k < kInt8Block; ++k) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(values[k]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= kInfinite) step = std::bit_cast<float>(0x7fc00000u);
    if (largest >= kInfinite || largest < kTiny) return;
    const float amax = std::bit_cast<float>(largest), factor = 127.0f / amax;
    step = amax / 127.0f;
    Floats32 moved;
    std::memcpy(&moved, values, sizeof moved);
    moved = moved * factor + kRound;
    std::memcpy(&numbers, &moved, sizeof numbers);
    numbers -= std::bit_cast<std::int32_t>(kRound);
    for (std::size_t k = 0; k < kInt8Block; ++k) sum += numbers[k];
  }
};

template <int kBits, std::size_t... kByte>
inline void put_in_order(const Bytes32& all, std::int8_t* out, std::index_sequence<kByte...>) {
  const Bytes32 ordered = __builtin_shufflevector(all, all, column_of(kBits, kByte / 4, kByte % 4)...);
  std::memcpy(out, &ordered, sizeof ordered);
}

// The second half is `apart` bytes after the first.
template <int kBits>
void store_block_of(const Rounded& block, std::int8_t* out, std::size_t apart) {
  constexpr std::size_t half = kInt8Block / 2;
  std::int8_t bytes[kInt8Block];
  put_in_order<kBits>(__builtin_convertvector(block.numbers, Bytes32), bytes, std::make_index_sequence<kInt8Block>{});
  std::memcpy(out, bytes, half);
  std::memcpy(out + apart, bytes + half, half);
}

template <int kBits>
void prepare(const Int8Job& job, std::size_t tile) {
  alignas(64) float values[kInt8Block];
  const int center = center_of(job.layout);
  const bool is_few = takes_few(job);
  const std::size_t cols = job.layout.cols, from = tile * kInt8Tile;
  for (std::size_t four = 0; four < job.fours; four += kInt8Span) {
    const Position index(job, four, from);
    for (std::size_t m = 0; m < index.rows; ++m)
      for (std::size_t b = 0; b < index.fours * kInt8Sums; ++b) {
        const std::size_t first = (four * kInt8Sums + b) * kInt8Block;
        const std::size_t position = is_few ? ((from + m) * job.fours + four) * kInt8Sums + b
                                            : index.block(job, b % kInt8Sums, b / kInt8Sums) + m;
        const std::size_t remaining = first < cols ? cols - first : 0,
                          held = remaining < kInt8Block ? remaining : kInt8Block;
        load_filled<kInt8Block>(job.x, job.type, (from + m) * cols + (held ? first : 0), held, values);
        const Rounded block(values);
        if (is_few)  // the halves of four blocks together
          store_block_of<kBits>(block,
                                job.codes + position / kInt8Sums * kFourBytes + position % kInt8Sums * kFourBytes / 8,
                                kFourBytes / 2);
        else
          store_block_of<kBits>(block, job.codes + position * kInt8Block, kInt8Block / 2);
        job.steps[position] = block.step;
        job.starts[position] = -center * block.sum;
        if (job.sums) {
          const auto sum = static_cast<float>(block.sum);
          job.sums[position] = job.layout.zero == ZeroKind::offset ? block.step * sum : sum;
        }
      }
  }
}

// Word `kWord` of a block of codes as bytes.
template <int kBits, std::size_t kWord>
inline Words bytes_of(const Words* words, std::uint32_t flip) {
  if constexpr (kBits == 8) return words[kWord] ^ flip;
  else if constexpr (kBits == 4) return ((words[kWord % 4] >> (kWord / 4 * 4)) & 0x0f0f0f0fu) ^ flip;
  else if constexpr (kBits == 2) return ((words[kWord / 4] >> (kWord % 4 * 2)) & 0x03030303u) ^ flip;
  else {
    constexpr std::size_t word = 12 * kWord / 32, shift = 12 * kWord % 32;
    Words four = words[word] >> shift;
    if constexpr (shift > 20) four |= words[word + 1] << (32 - shift);
    return ((four & 7u) | (four & 0x38u) << 5 | (four & 0x1c0u) << 10 | (four & 0xe00u) << 15) ^ flip;
  }
}

template <int kBits, std::size_t... kWord>
inline void store_bytes(const Words* words, std::uint32_t flip, std::uint8_t* out, std::index_sequence<kWord...>) {
  const auto store = [&](const Words& bytes, std::size_t word) { std::memcpy(out + word * kVectorBytes, &bytes, kVectorBytes); };
  (store(bytes_of<kBits, kWord>(words, flip), kWord), ...);
}

// Codes of a vector of rows, `blocks` from `first` on, in the order of sums: blocks 0, 4, 8 ..., 1, 5, ...
template <int kBits>
void unpack_codes(const Int8Job& job, std::size_t row, std::size_t first, std::size_t blocks, std::uint8_t* out) {
  constexpr std::uint32_t half = 0x01010101u * (1u << (kBits - 1));
  const std::uint32_t flip = job.layout.is_signed != (kSignedCodes && kBits == 8) ? half : 0;
  Words turned[kSpanBlocks * kBits + kWidth];
  turn_rows(job.layout, job.weights.packed, row, first * kBits, (first + blocks) * kBits, kSpanBlocks * kBits * 4,
            turned);
  for (std::size_t b = 0; b < blocks; ++b)
    store_bytes<kBits>(turned + b * kBits, flip, out + (b % kInt8Sums * (blocks / kInt8Sums) + b / kInt8Sums) * kWords * kVectorBytes,
                       std::make_index_sequence<kWords>{});
}

// One tile of x and one vector of rows: adds to `sums` [kInt8Sums, tile, kWidth], or stores if it is the first.
struct Unit {
  const std::uint8_t* bytes;
  const float *scales, *zeros;
  const std::int8_t* codes;
  const float* steps;
  const std::int32_t* starts;
  const float* shifts;
  std::size_t fours;
  bool more;
  float* sums;
};

template <int kBits, bool kDots, ZeroKind kZero, std::size_t kRows>
void unit(const Unit& unit) {
  using Sum = Dots<kBits, kDots>;
  const std::uint8_t* bytes = unit.bytes;
  const std::int8_t* x = unit.codes;
  const float *steps = unit.steps, *scales = unit.scales, *shifts = unit.shifts, *zeros = unit.zeros;
  const std::int32_t* starts = unit.starts;
  for (std::size_t sum = 0; sum < kInt8Sums; ++sum) {
    float* buffer = unit.sums + sum * kInt8Tile * kWidth;
    Floats sums[kRows];
    for (std::size_t m = 0; m < kRows; ++m) sums[m] = unit.more ? load_floats(buffer + m * kWidth) : Floats{};
    for (std::size_t b = 0; b < unit.fours; ++b) {
      Ints result[kRows];
      for (std::size_t m = 0; m < kRows; ++m) result[m] = Sum::begin(starts[m]);
      if constexpr (Sum::kByBlocks) {
        Sum::template add_block<kRows>(result, bytes, x);
      } else {
#pragma GCC unroll 8
        for (std::size_t word = 0; word < kWords; ++word) {
          Words codes;
          std::memcpy(&codes, bytes + word * kVectorBytes, sizeof codes);
          for (std::size_t m = 0; m < kRows; ++m) result[m] = Sum::add(result[m], codes, x + m * kInt8Block + word * 4);
        }
      }
      const Floats scale = load_floats(scales);
      for (std::size_t m = 0; m < kRows; ++m) {
        Floats value = Sum::total(result[m], starts[m]);
        if constexpr (kZero == ZeroKind::point) value = fused_once(load_floats(zeros), splat(-shifts[m]), value);
        sums[m] = fused_once(scale * splat(steps[m]), value, sums[m]);
        if constexpr (kZero == ZeroKind::offset) sums[m] = fused_once(load_floats(zeros), splat(shifts[m]), sums[m]);
      }
      bytes += kWords * kVectorBytes, x += kRows * kInt8Block, scales += kWidth, steps += kRows, starts += kRows;
      if constexpr (kZero != ZeroKind::none) zeros += kWidth, shifts += kRows;
    }
    for (std::size_t m = 0; m < kRows; ++m) store_floats(buffer + m * kWidth, sums[m]);
  }
}

using UnitFn = void (*)(const Unit&);

template <int kBits, bool kDots, ZeroKind kZero, std::size_t... kLess>
UnitFn unit_of_rows(std::size_t rows, std::index_sequence<kLess...>) {
  constexpr UnitFn table[] = {unit<kBits, kDots, kZero, kLess + 1>...};
  return table[rows - 1];
}

template <int kBits, bool kDots>
UnitFn unit_for(ZeroKind zero, std::size_t rows) {
  constexpr auto all = std::make_index_sequence<kInt8Tile>{};
  switch (zero) {
    case ZeroKind::point:
      return unit_of_rows<kBits, kDots, ZeroKind::point>(rows, all);
    case ZeroKind::offset:
      return unit_of_rows<kBits, kDots, ZeroKind::offset>(rows, all);
    default:
      return unit_of_rows<kBits, kDots, ZeroKind::none>(rows, all);
  }
}

UnitFn unit_of(const Int8Job& job, std::size_t rows) {
#if defined(__AVX512F__)
  // The caller uses these kernels only with dot products. They have no sums in 16 bits: one for all widths of codes.
  return unit_for<4, true>(job.layout.zero, rows);
#else
#if defined(__aarch64__)
  if (job.dots) return unit_for<4, true>(job.layout.zero, rows);
#endif
  return job.layout.bits == 8 ? unit_for<8, false>(job.layout.zero, rows) : unit_for<4, false>(job.layout.zero, rows);
#endif
}

using UnpackFn = void (*)(const Int8Job&, std::size_t, std::size_t, std::size_t, std::uint8_t*);

UnpackFn unpack_of_bits(int bits) {
  return bits == 2 ? unpack_codes<2> : bits == 3 ? unpack_codes<3> : bits == 4 ? unpack_codes<4> : unpack_codes<8>;
}

// The rows of the weights of a task, a span of blocks at a time.
class Int8Product {
 public:
  Int8Product(const Int8Job& job, std::size_t first, std::size_t last, Int8Scratch& scratch)
      : job_(job), first_(first), rows_(last - first), units_((rows_ + kWidth - 1) / kWidth), s_(scratch) {}

  void run() {
    const UnpackFn unpack = unpack_of_bits(job_.layout.bits);
    for (std::size_t four = 0; four < job_.fours; four += kInt8Span) {
      const std::size_t blocks = Position(job_, four, 0).fours * kInt8Sums;
      for (std::size_t n = 0; n < units_; ++n)
        unpack(job_, first_ + n * kWidth, four * kInt8Sums, blocks, s_.bytes + n * kUnitBytes);
      spread(job_.weights.scales, four * kInt8Sums, blocks, s_.scales);
      if (job_.layout.zero != ZeroKind::none) spread(job_.weights.zeros, four * kInt8Sums, blocks, s_.zeros);
      for (std::size_t m = 0; m < job_.count; m += kInt8Tile) multiply(Position(job_, four, m));
    }
    finish();
  }

 private:
  static constexpr std::size_t kHeld = kInt8Sums * kInt8Tile * kWidth;  // sums of a tile and a vector of rows

  float* sums_of(std::size_t m, std::size_t n) const { return s_.sums + (m / kInt8Tile * units_ + n) * kHeld; }

  void multiply(const Position& index) {
    const UnitFn unit = unit_of(job_, index.rows);
    const std::size_t position = index.block(job_, 0, 0);
    for (std::size_t n = 0; n < units_; ++n)
      unit({s_.bytes + n * kUnitBytes, s_.scales + n * kSpanBlocks * kWidth, s_.zeros + n * kSpanBlocks * kWidth,
            job_.codes + position * kInt8Block, job_.steps + position, job_.starts + position,
            job_.sums ? job_.sums + position : nullptr, index.fours, index.four != 0, sums_of(index.m, n)});
  }

  // Scales of every block of every row, in the order of sums; 0 past the last group.
  void spread(const void* values, std::size_t first, std::size_t blocks, float* out) const {
    const std::size_t per_group = job_.groups == 1 ? job_.fours * kInt8Sums : job_.layout.group / kInt8Block;
    const std::size_t from = first / per_group, all = (first + blocks - 1) / per_group + 1;
    const std::size_t to = all < job_.groups ? all : job_.groups, fours = blocks / kInt8Sums;
    alignas(64) float sums[kWidth][kSpanBlocks + kWidth];
    Words turned[kSpanBlocks + kWidth];
    for (std::size_t n = 0; n < units_; ++n, out += kSpanBlocks * kWidth) {
      for (std::size_t i = 0; i < kWidth; ++i) {
        // Arbitrary: it is not stored.
        const std::size_t row = n * kWidth + i, held = first_ + (row < rows_ ? row : rows_ - 1);
        load_floats_of(values, job_.weights.scale_type, job_.layout.per_tensor ? 0 : held * job_.groups + from,
                       to - from, sums[i]);
        for (std::size_t g = to - from; g < all - from; ++g) sums[i][g] = 0;
      }
      for (std::size_t g = 0; g < all - from; g += kWidth) {
        Words rows[kWidth];
        for (std::size_t i = 0; i < kWidth; ++i) rows[i] = std::bit_cast<Words>(load_floats(sums[i] + g));
        transpose(rows);
        std::memcpy(turned + g, rows, sizeof rows);
      }
      std::size_t remaining = per_group - first % per_group, group = 0;
      for (std::size_t b = 0; b < blocks; ++b, --remaining) {
        if (remaining == 0) remaining = per_group, ++group;
        store_floats(out + (b % kInt8Sums * fours + b / kInt8Sums) * kWidth, std::bit_cast<Floats>(turned[group]));
      }
    }
  }

  void finish() const {
    alignas(64) float bias[kInt8Rows], values[kInt8Rows];
    if (job_.out.bias) load_floats_of(job_.out.bias, job_.out.bias_type, first_, rows_, bias);
    for (std::size_t m = 0; m < job_.count; ++m) {
      for (std::size_t n = 0; n < units_; ++n) {
        const float* sums = sums_of(m, n) + m % kInt8Tile * kWidth;
        const auto sum = [&](std::size_t i) { return load_floats(sums + i * kInt8Tile * kWidth); };
        store_floats(values + n * kWidth, (sum(0) + sum(2)) + (sum(1) + sum(3)));
      }
      if (job_.out.bias)
        for (std::size_t row = 0; row < rows_; ++row) values[row] += bias[row];
      store_values(values, rows_, job_.out, m * job_.layout.rows + first_);
    }
  }

  const Int8Job& job_;
  const std::size_t first_, rows_, units_;
  Int8Scratch& s_;
};

}  // namespace

// Number of rows of x that are prepared, and multiplied, together.
std::size_t int8_tile() { return kInt8Tile; }

void int8_prepare(const Int8Job& job, std::size_t tile) {
  switch (job.layout.bits) {
    case 2:
      return prepare<2>(job, tile);
    case 4:
      return prepare<4>(job, tile);
    default:
      return prepare<8>(job, tile);
  }
}

void int8_rows(const Int8Job& job, std::size_t first, std::size_t last, Int8Scratch& scratch) {
#if INGOT_INT8_FEW
  if (takes_few(job)) return few_rows(job, first, last);
#endif
  Int8Product(job, first, last, scratch).run();
}

}  // namespace ingot::INGOT_ISA
