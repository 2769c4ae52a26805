// The search for scales, with groups in parallel, and the loop over a tensor's blocks (spec/gguf.md, "Search"). Types
// are distributed over several files, because each takes seconds to compile.
#pragma once
#include <algorithm>

#include "kernels/ggml_encode.h"
#include "kernels/ggml_exact.h"
#include "kernels/ggml_kinds.h"
#include "kernels/ggml_nest.h"
#include "kernels/ggml_types.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode_affine(Ggml type, const GgmlSource& from, std::uint8_t* out);
GgmlStatus ggml_encode_nested_affine(Ggml type, const GgmlSource& from, std::uint8_t* out);
GgmlStatus ggml_encode_nested(Ggml type, const GgmlSource& from, std::uint8_t* out);

namespace {

// One value of each group at a time.
template <class Tile>
void fill(Tile& tile, const float* x, const float* importance, std::size_t first, std::size_t cols) {
  constexpr std::size_t size = Tile::kCount;
  turn<size>([=](std::size_t lane) { return x + lane * size; }, tile.x);
  if constexpr (!Tile::kWhole)
    turn<size>([=](std::size_t lane) { return importance + (first + lane * size) % cols; }, tile.w);
}

template <std::size_t kGroups, class Tile>
void bring_near(Tile& tile, Powers& powers) {
  Lanes limit;
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats result{};
    for (std::size_t j = 0; j < Tile::kCount; ++j) result = larger(magnitude(tile.value(j, c)), result);
    store_floats(limit.values + c, result);
  }
  if constexpr (kGroups > 1)
    for (std::size_t block = 0; block < kLanes; block += kGroups) {
      const float largest = *std::max_element(limit.values + block, limit.values + block + kGroups);
      std::fill_n(limit.values + block, kGroups, largest);
    }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    std::uint32_t exponent = std::bit_cast<std::uint32_t>(limit[lane]) >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    powers.near[lane] = std::bit_cast<float>((254 - exponent) << 23);
    powers.back[lane] = std::bit_cast<float>(exponent << 23);
  }
  for (std::size_t j = 0; j < Tile::kCount; ++j)
    for (std::size_t lane = 0; lane < kLanes; ++lane) tile.x[j][lane] *= powers.near[lane];
}

// Weighted sums of 1 and of the values.
template <class Tile>
void sum_up(const Tile& tile, Lanes& weight, Lanes& total) {
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats ones{}, values{};
    for (std::size_t j = 0; j < Tile::kCount; ++j) {
      ones += tile.weighed(all(1), j, c);
      values += tile.weighed(tile.value(j, c), j, c);
    }
    store_floats(weight.values + c, ones);
    store_floats(total.values + c, values);
  }
}

// Scale, and offset, of blocks that are one group; then the scale again, for the offset rounded to f16.
template <class Type, class Tile>
void settle(const Tile& tile, const Powers& powers, Lanes& scale, Lanes& offset) {
  round(scale, powers);
  round(offset, powers);
  if constexpr (Type::kAffine) {
    Sums sums, others;
    measure<typename Type::Level>(tile, scale, offset, sums);
    Lanes other = scale;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float fitted = (sums.xq[lane] - offset[lane] * sums.q[lane]) / sums.qq[lane];
      other[lane] = sums.qq[lane] > 0 ? fitted : other[lane];
    }
    round(other, powers);  // a value of f16 stays unchanged
    measure<typename Type::Level>(tile, other, offset, others);
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (others.error[lane] < sums.error[lane]) scale[lane] = other[lane];
  }
}

// The best of three powers of two.
template <class Tile>
void fit_powers(const Tile& tile, const Powers& powers, Lanes& scale, Head* heads) {
  const Lanes none{};
  Lanes smallest;
  for (std::size_t lane = 0; lane < kLanes; ++lane) smallest[lane] = kInfinite;
  for (const int away : {-2, -1, -3}) {
    Lanes tried;
    Sums sums;
    std::uint16_t results[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const int power = static_cast<int>(std::bit_cast<std::uint32_t>(powers.back[lane]) >> 23) + away;
      results[lane] = static_cast<std::uint16_t>(power > 0 ? power : 0);
      const std::uint32_t e = results[lane];
      tried[lane] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23) * powers.near[lane];
    }
    measure<E2m1>(tile, tried, none, sums);
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (sums.error[lane] < smallest[lane]) {
        smallest[lane] = sums.error[lane];
        scale[lane] = tried[lane];
        heads[lane].d = results[lane];
      }
  }
}

// Searches sixteen groups and packs the first `blocks` blocks; returns the index of a block whose scale cannot be
// represented, or `blocks`.
template <Ggml kType, bool kWeighted>
std::size_t search(const float* x, const float* importance, std::size_t first, std::size_t cols, std::size_t blocks,
                   Byte* out) {
  using Traits = Type<kType>;
  Tile<Traits::kSize, kWeighted> tile;
  Powers powers;
  Lanes weight, total, scale{}, offset{};
  Head heads[kLanes];
  Nested nested;
  fill(tile, x, importance, first, cols);
  bring_near<Traits::kGroups>(tile, powers);
  if constexpr (Traits::kAffine || Traits::kGroups > 1) sum_up(tile, weight, total);
  if constexpr (kType == Ggml::mxfp4) {
    fit_powers(tile, powers, scale, heads);
  } else {
    if constexpr (Traits::kAffine)
      fit_affine<Traits>(tile, weight, scale, offset);
    else
      fit_scales<Traits>(tile, scale);
    if constexpr (Traits::kGroups == 1) {
      settle<Traits>(tile, powers, scale, offset);
    } else {
      nested = nest<Traits>(tile, weight, total, powers, scale, offset);
      nested.products(scale, offset);
    }
    const Lanes &d = Traits::kGroups == 1 ? scale : nested.d, &dmin = Traits::kGroups == 1 ? offset : nested.dmin;
    std::uint16_t d_bits[kLanes], least_bits[kLanes];
    half_bits(d, powers, d_bits);
    half_bits(dmin, powers, least_bits);
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t lane = block * Traits::kGroups;
      if (!is_finite(d[lane]) || !is_finite(dmin[lane])) return block;
      heads[block] = {d_bits[lane], least_bits[lane], nested.steps.values + lane, nested.minimums.values + lane};
    }
  }
  Byte codes[kLanes * Traits::kSize];
  codes_of<typename Traits::Level>(tile, scale, offset, codes);
  constexpr std::size_t elements = Traits::kSize * Traits::kGroups, bytes = kGgmlBlocks[static_cast<int>(kType)].bytes;
  for (std::size_t block = 0; block < blocks; ++block)
    pack<kType>(heads[block], codes + block * elements, out + block * bytes);
  return blocks;
}

template <Dtype kDtype>
void widen(const void* values, std::size_t first, std::size_t count, float* out) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(values) + first;
  // The number of values is a multiple of a block's.
  for (std::size_t i = 0; i < count; i += 32) load_block<kDtype>(in + i, 32, out + i);
}

void widen(const GgmlSource& from, std::size_t first, std::size_t count, float* out) {
  switch (from.dtype) {
    case Dtype::f16:
      return widen<Dtype::f16>(from.values, first, count, out);
    case Dtype::bf16:
      return widen<Dtype::bf16>(from.values, first, count, out);
    case Dtype::f64:
      return widen<Dtype::f64>(from.values, first, count, out);
    default:
      return widen<Dtype::f32>(from.values, first, count, out);
  }
}

inline bool all_finite(const float* x, std::size_t count) {
  std::uint32_t result = 0;
  for (std::size_t i = 0; i < count; ++i)
    result |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u);
  return result == 0;
}

template <Ggml kType>
GgmlStatus encode(const GgmlSource& from, Byte* out) {
  using Traits = Type<kType>;
  constexpr std::size_t elements = Traits::kSize * Traits::kGroups, bytes = kGgmlBlocks[static_cast<int>(kType)].bytes;
  constexpr std::size_t at_once = kLanes / Traits::kGroups;
  alignas(64) float widened[at_once * elements];
  for (std::size_t start = 0; start < from.blocks; start += at_once, out += at_once * bytes) {
    const std::size_t count = from.blocks - start < at_once ? from.blocks - start : at_once, first = start * elements;
    const float* x = widened;
    if (from.dtype == Dtype::f32 && count == at_once) {
      x = static_cast<const float*>(from.values) + first;
    } else {
      widen(from, first, count * elements, widened);
      std::fill(widened + count * elements, std::end(widened), 0.0f);
    }
    if (!all_finite(x, count * elements)) {
      std::size_t bad = 0;
      while (is_finite(x[bad])) ++bad;
      return {GgmlStatus::non_finite, first + bad};
    }
    std::size_t done = 0;
    if (from.search) {
      done = from.importance == nullptr ? search<kType, false>(x, nullptr, first, from.cols, count, out)
                                        : search<kType, true>(x, from.importance, first, from.cols, count, out);
    } else {
      if constexpr (is_exact(kType))
        while (done < count && exact<kType>(x + done * elements, out + done * bytes)) ++done;
    }
    if (done < count) return {GgmlStatus::scale_overflow, first + done * elements};
  }
  return {GgmlStatus::ok, 0};
}

template <Ggml... kTypes>
GgmlStatus encode_one_of(Ggml type, const GgmlSource& from, Byte* out) {
  GgmlStatus status{GgmlStatus::no_encoder, 0};
  ((type == kTypes ? void(status = encode<kTypes>(from, out)) : void()), ...);
  return status;
}

}  // namespace
}  // namespace ingot::INGOT_ISA
