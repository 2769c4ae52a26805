// Attention over packed blocks of keys and values, in f32 in a fixed order: spec/kv-cache.md, "Products". Every column
// has a separate sum, so the result depends neither on the width of vectors nor on the number of threads.
#include "kernels/kv_cache.h"

#include "kernels/affine_matmul_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kTile = 4;    // rows of queries, or of attention weights, for which codes are unpacked once
constexpr std::size_t kPiece = 256;  // scales widened at a time

template <std::size_t kBytes>
inline std::uint64_t load_little(const std::uint8_t* from) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < kBytes; ++i) word |= static_cast<std::uint64_t>(from[i]) << (8 * i);
  return word;
}

// The codes of neighbouring columns as numbers, a vector at a time.
template <int kBits>
class Columns {
 public:
  static constexpr std::size_t kBytes = kWidth * kBits / 8;

  Columns() {
    for (std::size_t i = 0; i < kWidth; ++i) shifts_[i] = static_cast<std::uint32_t>(i * kBits % 32);
#if defined(__AVX512F__)
    alignas(64) float table[16];
    for (int i = 0; i < 16; ++i) table[i] = static_cast<float>(i & ((1 << kBits) - 1));
    table_ = _mm512_load_ps(table);
#endif
  }

  Floats look_up(const std::uint8_t* codes) const {
    if constexpr (kBits == 8) {
      using Bytes = std::uint8_t __attribute__((vector_size(kWidth)));
      Bytes bytes;
      std::memcpy(&bytes, codes, sizeof bytes);
      return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
    } else {
      const Words words = spread(codes) >> shifts_;
#if defined(__AVX512F__)
      return _mm512_permutexvar_ps(std::bit_cast<__m512i>(words), table_);  // uses the low four bits only
#else
      return __builtin_convertvector(std::bit_cast<Ints>(words & ((1u << kBits) - 1)), Floats);
#endif
    }
  }

 private:
  // The 32-bit word that contains each lane's code.
  static Words spread(const std::uint8_t* codes) {
    const std::uint64_t word = load_little<kBytes>(codes);
    const Words low = Words{} + static_cast<std::uint32_t>(word);
#if defined(__AVX512F__)
    if constexpr (kBytes > 4)
      return std::bit_cast<Words>(_mm512_mask_set1_epi32(std::bit_cast<__m512i>(low), 0xff00, static_cast<int>(word >> 32)));
#endif
    return low;
  }

  Words shifts_;
#if defined(__AVX512F__)
  __m512 table_;
#endif
};

// The rows of a block: `count` of the coefficients [kTile, kKvMost] of rows of x.
struct Block {
  const std::uint8_t* codes;
  std::size_t row_bytes, rows;
};

// sum over rows of x[m, row] * code[row, column] for kVectors vectors of columns, row after row.
template <int kBits, int kCount, int kVec>
inline void sum_rows(const Columns<kBits>& columns, const Block& block, const float (*x)[kKvMost],
                     Floats (&sums)[kCount][kVec]) {
  for (std::size_t row = 0; row < block.rows; ++row) {
    const std::uint8_t* codes = block.codes + row * block.row_bytes;
    Floats q[kVec];
    for (int v = 0; v < kVec; ++v) q[v] = columns.look_up(codes + v * Columns<kBits>::kBytes);
    for (int m = 0; m < kCount; ++m) {
      const Floats factor = splat(x[m][row]);
      for (int v = 0; v < kVec; ++v) sums[m][v] += factor * q[v];
    }
  }
}

// The destination of the sums of a vector of columns: `shift` of the row is added, and the result is stored or added.
struct Target {
  float* out;
  std::size_t stride;
  const float* shift;
  bool adds;

  void put(int m, std::size_t column, const Floats& sum) const {
    float* to = out + static_cast<std::size_t>(m) * stride + column;
    const Floats value = sum + splat(shift[m]);
    store_floats(to, adds ? load_floats(to) + value : value);
  }
};

template <int kBits, int kCount, int kVec>
inline void some_columns(const Columns<kBits>& columns, Block block, const float (*x)[kKvMost], std::size_t column,
                         const Target& to) {
  Floats sums[kCount][kVec] = {};
  block.codes += column / kWidth * Columns<kBits>::kBytes;
  sum_rows<kBits, kCount, kVec>(columns, block, x, sums);
  for (int m = 0; m < kCount; ++m)
    for (int v = 0; v < kVec; ++v) to.put(m, column + v * kWidth, sums[m][v]);
}

template <int kBits, int kCount>
void all_columns(const Block& block, const float (*x)[kKvMost], std::size_t cols, const Target& to) {
  constexpr int kVec = kCount == 1 ? 4 : 2;
  const Columns<kBits> columns;
  std::size_t column = 0;
  for (; column + kVec * kWidth <= cols; column += kVec * kWidth)
    some_columns<kBits, kCount, kVec>(columns, block, x, column, to);
  for (; column < cols; column += kWidth) some_columns<kBits, kCount, 1>(columns, block, x, column, to);
}

template <int kBits>
void product_of(const Block& block, const float (*x)[kKvMost], std::size_t count, std::size_t cols, const Target& to) {
  switch (count) {
    case 1:
      return all_columns<kBits, 1>(block, x, cols, to);
    case 2:
      return all_columns<kBits, 2>(block, x, cols, to);
    case 3:
      return all_columns<kBits, 3>(block, x, cols, to);
    default:
      return all_columns<kBits, 4>(block, x, cols, to);
  }
}

void product(int bits, const Block& block, const float (*x)[kKvMost], std::size_t count, std::size_t cols,
             const Target& to) {
  if (bits == 2) return product_of<2>(block, x, count, cols, to);
  if (bits == 4) return product_of<4>(block, x, count, cols, to);
  product_of<8>(block, x, count, cols, to);
}

// Element i is added to partial sum i % 16; the partial sums are added in halves.
float sum_products(const float* a, const float* b, std::size_t n) {
  alignas(64) float sums[kKvLanes] = {};
  const std::size_t full = n / kKvLanes * kKvLanes;
  for (std::size_t i = 0; i < full; i += kKvLanes)
    for (std::size_t lane = 0; lane < kKvLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (std::size_t i = full; i < n; ++i) sums[i - full] += a[i] * b[i];
  for (std::size_t half = kKvLanes / 2; half; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

// The scales, or zeros, of one group of columns: a value for each row.
void column_of(const std::uint16_t* from, std::size_t rows, std::size_t groups, std::size_t group, float* out) {
  if (groups == 1) return load_floats_of(from, Dtype::f16, 0, rows, out);
  alignas(64) float chunk[kPiece];
  const std::size_t n = rows * groups;
  std::size_t next = group;
  for (std::size_t start = 0; start < n; start += kPiece) {
    const std::size_t filled = n - start < kPiece ? n - start : kPiece;
    load_floats_of(from, Dtype::f16, start, filled, chunk);
    for (; next < start + filled; next += groups) *out++ = chunk[next - start];
  }
}

// The coefficients of up to kTile rows of x for a group of a block.
struct Factors {
  alignas(64) float scales[kKvMost], zeros[kKvMost];
  alignas(64) float factors[kTile][kKvMost];
  float shift[kTile];

  void load(const KvBlocks& kv, std::size_t block, std::size_t group) {
    const std::size_t first = block * kv.rows * kv.groups;
    column_of(kv.scales + first, kv.rows, kv.groups, group, scales);
    column_of(kv.zeros + first, kv.rows, kv.groups, group, zeros);
  }

  void times(const float* x, std::size_t stride, std::size_t count, std::size_t rows) {
    for (std::size_t m = 0; m < count; ++m, x += stride) {
      for (std::size_t i = 0; i < rows; ++i) factors[m][i] = x[i] * scales[i];
      shift[m] = sum_products(x, zeros, rows);
    }
  }
};

}  // namespace

void kv_scores(const KvBlocks& kv, const float* queries, std::size_t count, std::size_t head, std::size_t first,
               std::size_t last, float* out, std::size_t stride) {
  Factors factors;
  queries += head * count * kv.rows;
  out += head * count * stride;
  for (std::size_t b = first; b < last; ++b) {
    const std::size_t block = head * kv.capacity + b;
    const Block codes{kv.packed + block * kv.rows * kv.row_bytes, kv.row_bytes, kv.rows};
    factors.load(kv, block, 0);
    for (std::size_t m = 0; m < count; m += kTile) {
      const std::size_t batch = count - m < kTile ? count - m : kTile;
      factors.times(queries + m * kv.rows, kv.rows, batch, kv.rows);
      product(kv.bits, codes, factors.factors, batch, kv.cols,
              {out + m * stride + b * kv.cols, stride, factors.shift, false});
    }
  }
}

void kv_values(const KvBlocks& kv, const float* weights, std::size_t stride, std::size_t count, std::size_t head,
               std::size_t group, float* out) {
  Factors factors;
  const std::size_t from = group * kv.group, cols = kv.cols - from < kv.group ? kv.cols - from : kv.group;
  weights += head * count * stride;
  out += head * count * kv.cols + from;
  for (std::size_t b = 0; b < kv.count; ++b) {
    const std::size_t block = head * kv.capacity + b;
    const std::size_t start = from * static_cast<std::size_t>(kv.bits) / 8;
    const Block codes{kv.packed + block * kv.rows * kv.row_bytes + start, kv.row_bytes, kv.rows};
    factors.load(kv, block, group);
    for (std::size_t m = 0; m < count; m += kTile) {
      const std::size_t batch = count - m < kTile ? count - m : kTile;
      factors.times(weights + m * stride + b * kv.rows, stride, batch, kv.rows);
      product(kv.bits, codes, factors.factors, batch, cols, {out + m * kv.cols, kv.cols, factors.shift, b != 0});
    }
  }
}

}  // namespace ingot::INGOT_ISA
