// The scale, or scale and offset, of each group by itself (spec/gguf.md, "Search"): codes for some grids to begin with, and
// for each the scale and offset of least squared error in closed form.
#pragma once
#include "kernels/ggml_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr float kTiny = 0x1p-60f;  // of values whose largest is about 1: a group below it is zeros
constexpr int kRounds = 2;         // how often codes and scale are found from each other in the end

// x = scale * q. With t = x / s = q + r the best factor is 1 + sum(rq) / sum(qq), which leaves
// s^2 (sum(rr) - sum(rq)^2 / sum(qq)): sums of what is left, so that no digits cancel.
template <class Level, class Weights>
struct ScaleFit {
  const Weights& tile;
  std::size_t c;
  Floats error = all(kInfinite), scale{};

  void attempt(Floats id, Floats s) {
    Floats rq{}, qq{}, rr{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats t = tile.value(j, c) * id, q = Level::nearest(t), r = t - q;
      const Floats wq = tile.weighed(q, j, c);
      rq += r * wq;
      qq += q * wq;
      rr += r * tile.weighed(r, j, c);
    }
    const Floats more = qq > 0.0f ? rq / qq : Floats{};
    const Floats left = (rr - more * rq) * (s * s);
    const auto better = left < error;
    error = better ? left : error;
    scale = better ? s + more * s : scale;
  }
};

// `Type::kStarts`: levels that the value of the largest magnitude is put on to begin with.
template <class Type, class Weights>
void fit_scales(const Weights& tile, Lanes& scale) {
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats most{}, extreme{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c), size = magnitude(x);
      extreme = size > most ? x : extreme;
      most = larger(size, most);
    }
    const auto nothing = most < kTiny;
    extreme = nothing ? all(1) : extreme;
    const Floats id = 1.0f / extreme;
    ScaleFit<typename Type::Level, Weights> fit{tile, c};
    for (const float level : Type::kStarts) fit.attempt(id * level, extreme * (1.0f / level));
    for (int k = 0; k < kRounds; ++k) fit.attempt(inverse(fit.scale), fit.scale);
    store(scale.of + c, nothing ? Floats{} : fit.scale);
  }
}

// x = offset + scale * q, the offset not above 0 if kBelow. As above, r = a + b q by linear regression.
template <class Level, bool kBelow, class Weights>
struct AffineFit {
  const Weights& tile;
  std::size_t c;
  Floats weight;
  Floats error = all(kInfinite), scale{}, offset{};

  void attempt(Floats base, Floats id, Floats s) {
    Floats sq{}, qq{}, sr{}, rq{}, rr{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats t = (tile.value(j, c) - base) * id, q = Level::nearest(t), r = t - q;
      const Floats wq = tile.weighed(q, j, c), wr = tile.weighed(r, j, c);
      sq += wq;
      qq += q * wq;
      sr += wr;
      rq += q * wr;
      rr += r * wr;
    }
    const Floats spread = weight * qq - sq * sq;
    Floats b = spread > 0x1p-20f * (weight * qq) ? (weight * rq - sr * sq) / spread : Floats{};
    const Floats a = weight > 0.0f ? (sr - b * sq) / weight : Floats{};
    Floats left = (rr - a * sr - b * rq) * (s * s);
    Floats to = base + a * s;
    if constexpr (kBelow) {  // where it would be above 0 it is 0, and all that is left is u = r + base / s
      const auto above = to > 0.0f;
      const Floats e = base * id, uq = rq + e * sq, uu = rr + (e * sr + e * (sr + e * weight));
      const Floats other = qq > 0.0f ? uq / qq : Floats{};
      left = above ? (uu - other * uq) * (s * s) : left;
      b = above ? other : b;
      to = above ? Floats{} : to;
    }
    const Floats times = s + b * s;
    const auto better = (left < error) & (times > 0.0f);
    error = better ? left : error;
    scale = better ? times : scale;
    offset = better ? to : offset;
  }
};

// `Type::kStarts`: how many levels the range goes past the lowest and the highest one to begin with.
template <class Type, class Weights>
void fit_affine(const Weights& tile, const Lanes& weight, Lanes& scale, Lanes& offset) {
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats low = tile.value(0, c), high = low;
    for (std::size_t j = 1; j < Weights::kCount; ++j) {
      low = smaller(tile.value(j, c), low);
      high = larger(tile.value(j, c), high);
    }
    if constexpr (Type::kBelow) low = smaller(low, Floats{});
    const auto flat = high - low < kTiny;
    const Floats range = flat ? all(1) : high - low, id = 1.0f / range;
    AffineFit<typename Type::Level, Type::kBelow, Weights> fit{tile, c, load(weight.of + c)};
    for (const auto& [below, above] : Type::kStarts) {
      const float steps = static_cast<float>(Type::kMost) + below + above;
      const Floats s = range * (1.0f / steps);
      fit.attempt(low + s * below, id * steps, s);
    }
    for (int k = 0; k < kRounds; ++k) fit.attempt(fit.offset, inverse(fit.scale), fit.scale);
    store(scale.of + c, flat ? Floats{} : fit.scale);
    store(offset.of + c, flat ? low + 0.0f : fit.offset);  // no minus zero
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
