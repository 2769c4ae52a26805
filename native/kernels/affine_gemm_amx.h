// Products of tiles in bf16 (AMX, Intel SDM volume 2, TDPBF16PS). A tile's product adds columns 0, 2, ... 30 of a block one
// after the other, 1, 3, ... 31 likewise, then the two sums, then that to what there is: the order of Unit in affine_gemm.cc.
#pragma once
#if defined(__AVX512F__) && defined(__linux__)
#define INGOT_AMX 1
#include <immintrin.h>

#include "core/matmul.h"

namespace ingot::INGOT_ISA {
namespace {

#define INGOT_TILES __attribute__((target("amx-tile,amx-bf16"), noinline))

constexpr std::size_t kAmxRows = 32;                             // of x: two tiles
constexpr std::size_t kAmxTile = 16 * kGemmBlock;                // values in bf16

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, unused[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

INGOT_TILES inline void amx_begin() {
  const TileConfig config;
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

INGOT_TILES inline void amx_end() { _tile_release(); }

// products[32 rows of x, 32 rows of weights] of blocks one after the other; added to what is there where `more`. The
// compiler does not see what tiles read and write.
INGOT_TILES inline void amx_unit(const std::uint16_t* x, const std::uint16_t* q, std::size_t blocks, bool more, bool both,
                                 float* products, std::size_t stride) {
  asm volatile("" : : : "memory");
  float* low = products + 16 * stride;
  stride *= sizeof(float);
  if (more) {
    _tile_loadd(0, products, stride);
    _tile_loadd(1, products + 16, stride);
    if (both) {
      _tile_loadd(2, low, stride);
      _tile_loadd(3, low + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::size_t b = 0; b < blocks; ++b, x += 2 * kAmxTile, q += 2 * kAmxTile) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, q, 128);
    _tile_loadd(7, q + 32, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, x + kAmxTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, products, stride);
  _tile_stored(1, products + 16, stride);
  if (both) {
    _tile_stored(2, low, stride);
    _tile_stored(3, low + 16, stride);
  }
  asm volatile("" : : : "memory");
}

}  // namespace
}  // namespace ingot::INGOT_ISA
#endif
