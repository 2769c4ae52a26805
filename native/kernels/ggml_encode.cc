// f32, f16, bf16 or f64 to ggml's blocks (spec/gguf.md): scales by search, or as the package gguf has them. Equal to the
// NumPy reference.
#include "kernels/ggml_encode.h"

#include "kernels/ggml_exact.h"
#include "kernels/ggml_nest.h"
#include "kernels/ggml_types.h"

namespace ingot::INGOT_ISA {
namespace {

// Types: how many weights have a scale of their own, how many groups a block, what codes stand for, where a search begins.
template <Ggml kType>
struct Type;

struct Range {
  float below, above;
};

struct Alone {  // a block is one group
  static constexpr std::size_t kSize = 32, kGroups = 1;
  static constexpr bool kAffine = false, kBelow = false;
};

template <>
struct Type<Ggml::q4_0> : Alone {
  using Level = Integers<-8, 7>;
  static constexpr float kStarts[] = {-9.2f, -8.8f, -8.4f, -8, -7.6f, -7.2f, -6.8f, 8.4f, 8, 7.6f, 7.2f, 6.8f, 6.4f};
};

template <>
struct Type<Ggml::q5_0> : Alone {
  using Level = Integers<-16, 15>;
  static constexpr float kStarts[] = {-17.2f, -16.8f, -16.4f, -16, -15.6f, -15.2f, -14.8f, 16.4f, 16, 15.6f, 15.2f, 14.8f};
};

template <>
struct Type<Ggml::q8_0> : Alone {
  using Level = Integers<-128, 127>;
  static constexpr float kStarts[] = {-128, -127.5f, 127.25f, 127, 126.75f, 126.5f, 126.25f, 126};
};

template <>
struct Type<Ggml::iq4_nl> : Alone {
  using Level = Iq4;
  static constexpr float kStarts[] = {-143, -135, -127, -119, -111, -103, 129, 121, 113, 105, 97, 91};
};

template <>
struct Type<Ggml::mxfp4> : Alone {
  using Level = E2m1;
};

template <int kMost_>
struct AloneAffine : Alone {
  using Level = Integers<0, kMost_>;
  static constexpr int kMost = kMost_;
  static constexpr bool kAffine = true;
  static constexpr Range kStarts[] = {{0, 0},     {.25f, .25f}, {-.25f, -.25f}, {.5f, .5f},  {-.5f, -.5f}, {.5f, 0},
                                      {0, .5f},   {-.5f, 0},    {0, -.5f},      {.5f, -.5f}, {-.5f, .5f},  {-1, 0},
                                      {0, -1},    {-1, -1}};
};

template <>
struct Type<Ggml::q4_1> : AloneAffine<15> {};
template <>
struct Type<Ggml::q5_1> : AloneAffine<31> {};

// Blocks of 256; steps from kLow to kHigh.
template <std::size_t kSize_, int kLow_, int kHigh_>
struct Steps {
  static constexpr std::size_t kSize = kSize_, kGroups = 256 / kSize_;
  static constexpr float kLow = kLow_, kHigh = kHigh_, kExtreme = kLow_ < 0 ? kLow_ : kHigh_;
  static constexpr bool kAffine = false, kBelow = false;
};

template <>
struct Type<Ggml::q6_k> : Steps<16, -128, 127> {
  using Level = Integers<-32, 31>;
  static constexpr float kStarts[] = {-33.2f, -32.8f, -32.4f, -32, -31.6f, -31.2f, 32, 31.6f, 31.2f, 30.8f};
};

template <>
struct Type<Ggml::q3_k> : Steps<16, -32, 31> {
  using Level = Integers<-4, 3>;
  static constexpr float kStarts[] = {-5, -4.6f, -4.2f, -3.8f, -3.4f, -3, 4, 3.6f, 3.2f, 2.8f, 2.4f};
};

template <>
struct Type<Ggml::iq4_xs> : Steps<32, -32, 31> {
  using Level = Iq4;
  static constexpr auto& kStarts = Type<Ggml::iq4_nl>::kStarts;
};

template <std::size_t kSize, int kMost_, int kHigh>
struct StepsAffine : Steps<kSize, 0, kHigh> {
  using Level = Integers<0, kMost_>;
  static constexpr int kMost = kMost_;
  static constexpr bool kAffine = true, kBelow = true;
  static constexpr Range kStarts[] = {{0, 0},     {.25f, .25f}, {-.25f, -.25f}, {.5f, .5f},  {-.5f, -.5f}, {.5f, 0},
                                      {0, .5f},   {-.5f, 0},    {0, -.5f},      {.5f, -.5f}, {-.5f, .5f},  {-1, 0},
                                      {0, -1},    {-1, -1}};
};

template <>
struct Type<Ggml::q2_k> : StepsAffine<16, 3, 15> {};
template <>
struct Type<Ggml::q4_k> : StepsAffine<32, 15, 63> {};
template <>
struct Type<Ggml::q5_k> : StepsAffine<32, 31, 63> {};

// One value of each group at a time; those past `count` are 0 and weigh as others do.
template <class Tile>
void fill(Tile& tile, const float* x, const float* importance, std::size_t count, std::size_t first, std::size_t cols) {
  constexpr std::size_t size = Tile::kCount;
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    for (std::size_t j = 0; j < size; ++j) tile.x[j][lane] = lane < count ? x[lane * size + j] : 0;
  if (importance != nullptr)
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float* from = importance + (first + lane * size) % cols;
      for (std::size_t j = 0; j < size; ++j) tile.w[j % (sizeof tile.w / sizeof tile.w[0])][lane] = from[j];
    }
}

template <std::size_t kGroups, class Tile>
void bring_near(Tile& tile, Powers& powers) {
  Lanes most;
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats found{};
    for (std::size_t j = 0; j < Tile::kCount; ++j) found = larger(magnitude(tile.value(j, c)), found);
    store(most.of + c, found);
  }
  for (std::size_t block = 0; block < kLanes; block += kGroups) {
    float largest = 0;
    for (std::size_t lane = block; lane < block + kGroups; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    std::uint32_t exponent = std::bit_cast<std::uint32_t>(largest) >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    for (std::size_t lane = block; lane < block + kGroups; ++lane) {
      powers.near[lane] = std::bit_cast<float>((254 - exponent) << 23);
      powers.back[lane] = std::bit_cast<float>(exponent << 23);
    }
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
    store(weight.of + c, ones);
    store(total.of + c, values);
  }
}

// Scale, and offset, of blocks that are one group; then once more the scale for the offset that f16 has.
template <class Type, class Tile>
void settle(const Tile& tile, const Powers& powers, Lanes& scale, Lanes& offset) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    scale[lane] = rounded(scale[lane], powers, lane);
    offset[lane] = rounded(offset[lane], powers, lane);
  }
  if constexpr (Type::kAffine) {
    Sums sums, others;
    measure<typename Type::Level>(tile, scale, offset, sums);
    Lanes other = scale;
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (sums.qq[lane] > 0)
        other[lane] = rounded((sums.xq[lane] - offset[lane] * sums.q[lane]) / sums.qq[lane], powers, lane);
    measure<typename Type::Level>(tile, other, offset, others);
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (others.error[lane] < sums.error[lane]) scale[lane] = other[lane];
  }
}

// The power of two of least error, of three.
template <class Tile>
void fit_powers(const Tile& tile, const Powers& powers, Lanes& scale, Head* heads) {
  const Lanes none{};
  Lanes least;
  for (std::size_t lane = 0; lane < kLanes; ++lane) least[lane] = kInfinite;
  for (const int away : {-2, -1, -3}) {
    Lanes tried;
    Sums sums;
    std::uint16_t found[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const int power = static_cast<int>(std::bit_cast<std::uint32_t>(powers.back[lane]) >> 23) + away;
      found[lane] = static_cast<std::uint16_t>(power > 0 ? power : 0);
      const std::uint32_t e = found[lane];
      tried[lane] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23) * powers.near[lane];
    }
    measure<E2m1>(tile, tried, none, sums);
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      if (sums.error[lane] < least[lane]) {
        least[lane] = sums.error[lane];
        scale[lane] = tried[lane];
        heads[lane].d = found[lane];
      }
  }
}

// Searches sixteen groups and packs the first `blocks` blocks; returns which of them has no room for its scale, or
// `blocks`.
template <Ggml kType, bool kWeighted>
std::size_t search(const float* x, const float* importance, std::size_t first, std::size_t cols, std::size_t blocks,
                   Byte* out) {
  using Of = Type<kType>;
  Tile<Of::kSize, kWeighted> tile;
  Powers powers;
  Lanes weight, total, scale{}, offset{};
  Head heads[kLanes];
  Nested nested;
  fill(tile, x, importance, blocks * Of::kGroups, first, cols);
  bring_near<Of::kGroups>(tile, powers);
  sum_up(tile, weight, total);
  if constexpr (kType == Ggml::mxfp4) {
    fit_powers(tile, powers, scale, heads);
  } else {
    if constexpr (Of::kAffine)
      fit_affine<Of>(tile, weight, scale, offset);
    else
      fit_scales<Of>(tile, scale);
    if constexpr (Of::kGroups == 1) {
      settle<Of>(tile, powers, scale, offset);
    } else {
      nested = nest<Of>(tile, weight, total, powers, scale, offset);
      nested.products(scale, offset);
    }
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t lane = block * Of::kGroups;
      const bool alone = Of::kGroups == 1;
      const float d = alone ? scale[lane] : nested.d[lane], least = alone ? offset[lane] : nested.least[lane];
      if (!is_finite(d) || !is_finite(least)) return block;
      heads[block] = {half_bits(d, powers, lane), half_bits(least, powers, lane), nested.steps.of + lane,
                      nested.minimums.of + lane};
    }
  }
  Byte codes[kLanes * Of::kSize];
  codes_of<typename Of::Level>(tile, scale, offset, codes);
  constexpr std::size_t elements = Of::kSize * Of::kGroups, bytes = kGgmlBlocks[static_cast<int>(kType)].bytes;
  for (std::size_t block = 0; block < blocks; ++block)
    pack<kType>(heads[block], codes + block * elements, out + block * bytes);
  return blocks;
}

template <Dtype kDtype>
void widen(const void* values, std::size_t first, std::size_t count, float* out) {
  const auto* in = static_cast<const TypeOf<kDtype>*>(values) + first;
  for (std::size_t i = 0; i < count; i += 32) load_block<kDtype>(in + i, 32, out + i);  // blocks are multiples of it
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

template <Ggml kType>
GgmlStatus encode(const GgmlSource& from, Byte* out) {
  using Of = Type<kType>;
  constexpr std::size_t elements = Of::kSize * Of::kGroups, bytes = kGgmlBlocks[static_cast<int>(kType)].bytes;
  constexpr std::size_t at_once = kLanes / Of::kGroups;
  alignas(64) float x[at_once * elements];
  for (std::size_t start = 0; start < from.blocks; start += at_once, out += at_once * bytes) {
    const std::size_t count = from.blocks - start < at_once ? from.blocks - start : at_once, first = start * elements;
    widen(from, first, count * elements, x);
    std::size_t bad = 0;
    while (bad < count * elements && is_finite(x[bad])) ++bad;
    if (bad < count * elements) return {GgmlStatus::non_finite, first + bad};
    std::size_t done = 0;
    if (from.search) {
      done = from.importance == nullptr ? search<kType, false>(x, nullptr, first, from.cols, count, out)
                                        : search<kType, true>(x, from.importance, first, from.cols, count, out);
    } else {
      while (done < count && exact(kType, x + done * elements, out + done * bytes)) ++done;
    }
    if (done < count) return {GgmlStatus::scale_overflow, first + done * elements};
  }
  return {GgmlStatus::ok, 0};
}

}  // namespace

GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  GgmlStatus status{GgmlStatus::no_encoder, 0};
  if (!from.search && !is_exact(type)) return status;
  with_type(type, [&]<Ggml kType>() requires requires { Type<kType>::kSize; } { status = encode<kType>(from, out); });
  return status;
}

}  // namespace ingot::INGOT_ISA
