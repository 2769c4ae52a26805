// Products with a matrix of the affine family that stays packed (spec/affine.md, "Multiplying"). Plain data only, as in
// core/dtype.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/tile.h"

namespace ingot {

constexpr std::size_t kLanes = 16;       // partial sums of a row
constexpr std::size_t kBlockBytes = 64;  // of packed codes: 4 bytes for each lane

enum class ZeroKind : int { none = 0, point = 1, offset = 2 };  // w = s * q, s * (q - z), s * q + z

// Codes in rows of `row_bytes`, lowest bits first; four or eight bits. `group` is a multiple of the codes in four
// bytes, or at least `cols`.
struct MatmulLayout {
  std::size_t rows;
  std::size_t cols;
  std::size_t group;
  std::size_t row_bytes;
  int bits;
  bool is_signed;
  bool per_tensor;  // one scale (and zero) for all rows
  bool one_scale;   // one scale per row: per-tensor scales, or groups of at least a row
  int zero_point;   // subtracted from every code, in addition to `zeros`
  ZeroKind zero;
  std::size_t per_lane;  // codes in four bytes: 32 / bits
  std::size_t blocks;    // blocks of 16 * per_lane columns; the last one is padded
  std::size_t prepared;  // f32 values of one prepared column of x: (blocks * (per_lane + 1) + 1) * 16; per block the
                         // steps, then their sums, lane by lane; at the end the sum of all
};

struct MatmulWeights {
  const std::uint8_t* packed;
  const void* scales;
  const void* zeros;  // null if `zero` is kNone
  Dtype scale_type;
};

// The output of y[m, row]; `bias` [rows] may be null.
struct MatmulOutput {
  const void* bias;
  Dtype bias_type;
  void* values;
  Dtype type;
};

// Many rows of x at a time (spec/affine.md, "Many rows").
constexpr std::size_t kGemmBlock = 32;   // columns that are added before the scale can change
constexpr std::size_t kGemmSpan = 8;     // blocks of weights that are unpacked at a time
constexpr std::size_t kGemmParts = 4;    // short groups whose products are scaled together
static_assert(kGemmSpan * kGemmBlock == kTileCols);
constexpr std::size_t kGemmRows = 64;    // rows of weights per task
constexpr std::size_t kGemmCount = 256;  // rows of x that share unpacked weights

// The instructions that add products. All give the bits of `plain` if the products of x and codes are exact.
enum class GemmMode : int {
  plain = 0,  // multiply, round, add
  fused = 1,  // fused multiply-add
  tiles = 2,  // Intel's AMX, for bf16
  dots = 3,   // pairs of bf16 in one instruction (AVX512_BF16)
};

// The range of magnitudes of x, as powers of two, in which that holds: for codes, and for 16-bit weights from
// 2^-kValuesReach to 2^kValuesReach. Sums are then multiples of 2^-126.
constexpr std::uint32_t kCodesReach = 118, kBesideValuesReach = 72, kValuesReach = 40;

struct GemmJob {
  MatmulLayout layout;
  MatmulWeights weights;
  MatmulOutput out;
  const void* x;
  Dtype type;
  std::size_t count;         // rows of x, at most kGemmCount
  std::size_t blocks;        // of a row
  std::size_t groups;        // of a row
  GemmMode mode;
  std::size_t tile;          // rows of x that are packed together: gemm_tile
  const TileSource* source;  // null: codes of the affine family
  void* packed;              // x in the order of use, at most 4 bytes per value
  float* sums;               // sums of x [groups, kGemmCount], if there are zeros
};

// The scratch memory of one thread.
struct alignas(64) GemmScratch {
  float values[32 * kGemmSpan * kGemmBlock];  // of up to 32 rows of the weights, as f32 or pairs of bf16
  float decoded[32 * kGemmSpan * kGemmBlock];  // the same rows as stored, if a source decodes them
  float parts[kGemmParts * 32 * 32];          // products of short groups, for some rows of x
  float products[kGemmCount * kGemmRows];     // products of the current group, if it has several blocks
  float totals[kGemmCount * kGemmRows];
  float scales[kGemmSpan * kGemmRows];
  float zeros[kGemmSpan * kGemmRows];
};

}  // namespace ingot
