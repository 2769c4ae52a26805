// Fits the scale, or scale and offset, of each group separately (spec/gguf.md, "Search"): computes codes for several
// initial grids, and for each the scale and offset of least squared error in closed form.
#pragma once
#include <iterator>

#include "kernels/ggml_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

// Limit for values normalized to a maximum of about 1: a group below it counts as zeros.
constexpr float kTiny = 0x1p-60f;
constexpr int kRounds = 2;         // number of final iterations, in which codes and scale are computed alternately

// The number of grids that are tried in one pass over a group: several hide each other's latencies, if there are enough
// registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::size_t kTogether = 2;
#else
constexpr std::size_t kTogether = 1;
#endif

// x = scale * q. With t = x / s = q + r, the best factor is 1 + sum(rq) / sum(qq), and the remaining error is s^2
// (sum(rr) - sum(rq)^2 / sum(qq)). These are sums of residuals, so that no digits cancel.
template <class Level, class Weights>
struct ScaleFit {
  const Weights& tile;
  std::size_t c;
  Floats amax;  // sum of all magnitudes
  Floats error = all(kInfinite), scale{};

  template <std::size_t kMany>
  struct Grids {
    Floats id[kMany], s[kMany];
  };

  template <std::size_t kMany>
  void attempt(const Grids<kMany>& grids) {
    Floats widest = magnitude(grids.id[0]);
    for (std::size_t k = 1; k < kMany; ++k) widest = larger(magnitude(grids.id[k]), widest);
    switch (Level::ends(amax * widest)) {
      case Ends::none:
        return attempt<Ends::none>(grids);
      case Ends::high:
        return attempt<Ends::high>(grids);
      default:
        return attempt<Ends::both>(grids);
    }
  }

  template <Ends kEnds, std::size_t kMany>
  void attempt(const Grids<kMany>& grids) {
    Floats rq[kMany]{}, qq[kMany]{}, rr[kMany]{};
#pragma GCC unroll 2
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c);
#pragma GCC unroll 2
      for (std::size_t k = 0; k < kMany; ++k) {
        Floats r;
        const Floats q = Level::template nearest<kEnds>(x * grids.id[k], r), wq = tile.weighed(q, j, c);
        rq[k] = plus_product<Weights::kWhole && Level::exact(kEnds)>(rq[k], r, wq);
        qq[k] = plus_product<Weights::kWhole>(qq[k], q, wq);
        rr[k] += r * tile.weighed(r, j, c);
      }
    }
#pragma GCC unroll 2
    for (std::size_t k = 0; k < kMany; ++k) {
      const Floats s = grids.s[k], more = qq[k] > 0.0f ? rq[k] / qq[k] : Floats{};
      const Floats residual = (rr[k] - more * rq[k]) * (s * s);
      const auto better = residual < error;
      error = better ? residual : error;
      scale = better ? s + more * s : scale;
    }
  }
};

// `Type::kStarts`: the levels to which the value of the largest magnitude is mapped initially.
template <class Type, class Weights>
void fit_scales(const Weights& tile, Lanes& scale) {
  constexpr std::size_t starts = std::size(Type::kStarts);
  for (std::size_t c = 0; c < kLanes; c += kWidth) {
    Floats amax{}, extreme{};
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c), size = magnitude(x);
      extreme = size > amax ? x : extreme;
      amax = larger(size, amax);
    }
    const auto nothing = amax < kTiny;
    extreme = nothing ? all(1) : extreme;
    const Floats id = 1.0f / extreme;
    using Fit = ScaleFit<typename Type::Level, Weights>;
    Fit fit{tile, c, amax};
    for (std::size_t first = 0; first < starts; first += kTogether) {
      typename Fit::template Grids<kTogether> grids;
      for (std::size_t k = 0; k < kTogether; ++k) {  // the last one is repeated if there are too few
        const float level = Type::kStarts[first + k < starts ? first + k : starts - 1];
        grids.id[k] = id * level;
        grids.s[k] = extreme * (1.0f / level);
      }
      fit.attempt(grids);
    }
    for (int k = 0; k < kRounds; ++k) fit.attempt(typename Fit::template Grids<1>{{inverse(fit.scale)}, {fit.scale}});
    store_floats(scale.values + c, nothing ? Floats{} : fit.scale);
  }
}

// x = offset + scale * q, with an offset of at most 0 if kBelow. As above, r = a + b q by linear regression.
template <class Level, bool kBelow, class Weights>
struct AffineFit {
  const Weights& tile;
  std::size_t c;
  Floats weight, low, high;  // no value exceeds these
  Floats error = all(kInfinite), scale{}, offset{};

  template <std::size_t kMany>
  struct Grids {
    Floats base[kMany], id[kMany], s[kMany];
  };

  template <std::size_t kMany>
  void attempt(const Grids<kMany>& grids) {
    Floats smallest = (low - grids.base[0]) * grids.id[0], largest = (high - grids.base[0]) * grids.id[0];
    for (std::size_t k = 1; k < kMany; ++k) {
      smallest = smaller((low - grids.base[k]) * grids.id[k], smallest);
      largest = larger((high - grids.base[k]) * grids.id[k], largest);
    }
    switch (Level::ends(smallest, largest)) {
      case Ends::none:
        return attempt<Ends::none>(grids);
      case Ends::near:
        return attempt<Ends::near>(grids);
      default:
        return attempt<Ends::both>(grids);
    }
  }

  template <Ends kEnds, std::size_t kMany>
  void attempt(const Grids<kMany>& grids) {
    Floats sq[kMany]{}, qq[kMany]{}, sr[kMany]{}, rq[kMany]{}, rr[kMany]{};
#pragma GCC unroll 2
    for (std::size_t j = 0; j < Weights::kCount; ++j) {
      const Floats x = tile.value(j, c);
#pragma GCC unroll 2
      for (std::size_t k = 0; k < kMany; ++k) {
        Floats r;
        const Floats q = Level::template nearest<kEnds>((x - grids.base[k]) * grids.id[k], r);
        const Floats wq = tile.weighed(q, j, c), wr = tile.weighed(r, j, c);
        sq[k] += wq;
        qq[k] = plus_product<Weights::kWhole>(qq[k], q, wq);
        sr[k] += wr;
        rq[k] = plus_product<Weights::kWhole && Level::exact(kEnds)>(rq[k], q, wr);
        rr[k] += r * wr;
      }
    }
#pragma GCC unroll 2
    for (std::size_t k = 0; k < kMany; ++k) choose(grids.base[k], grids.id[k], grids.s[k], {sq[k], qq[k], sr[k], rq[k], rr[k]});
  }

  struct Totals {
    Floats sq, qq, sr, rq, rr;
  };

  void choose(Floats base, Floats id, Floats s, const Totals& input) {
    const auto [sq, qq, sr, rq, rr] = input;
    const Floats spread = weight * qq - sq * sq;
    Floats b = spread > 0x1p-20f * (weight * qq) ? (weight * rq - sr * sq) / spread : Floats{};
    const Floats remainder = sr - b * sq;
    Floats a;
    if constexpr (Weights::kWhole)
      a = remainder * (1.0f / Weights::kCount);  // exact for a power of two
    else
      a = weight > 0.0f ? remainder / weight : Floats{};
    Floats residual = (rr - a * sr - b * rq) * (s * s);
    Floats to = base + a * s;
    if constexpr (kBelow) {  // if it would be above 0 it is 0, and the residual is u = r + base / s
      const auto above = to > 0.0f;
      const Floats e = base * id, uq = rq + e * sq, uu = rr + (e * sr + e * (sr + e * weight));
      const Floats other = qq > 0.0f ? uq / qq : Floats{};
      residual = above ? (uu - other * uq) * (s * s) : residual;
      b = above ? other : b;
      to = above ? Floats{} : to;
    }
    const Floats times = s + b * s;
    const auto better = (residual < error) & (times > 0.0f);
    error = better ? residual : error;
    scale = better ? times : scale;
    offset = better ? to : offset;
  }
};

// `Type::kStarts`: the number of levels by which the initial range exceeds the lowest and the highest level.
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
    using Fit = AffineFit<typename Type::Level, Type::kBelow, Weights>;
    Fit fit{tile, c, load_floats(weight.values + c), low, high};
    constexpr std::size_t starts = std::size(Type::kStarts);
    for (std::size_t first = 0; first < starts; first += kTogether) {
      typename Fit::template Grids<kTogether> grids;
      for (std::size_t k = 0; k < kTogether; ++k) {  // the last one is repeated if there are too few
        const auto [below, above] = Type::kStarts[first + k < starts ? first + k : starts - 1];
        const float steps = static_cast<float>(Type::kMost) + below + above;
        grids.s[k] = range * (1.0f / steps);
        grids.base[k] = low + grids.s[k] * below;
        grids.id[k] = id * steps;
      }
      fit.attempt(grids);
    }
    for (int k = 0; k < kRounds; ++k)
      fit.attempt(typename Fit::template Grids<1>{{fit.offset}, {inverse(fit.scale)}, {fit.scale}});
    store_floats(scale.values + c, flat ? Floats{} : fit.scale);
    store_floats(offset.values + c, flat ? low + 0.0f : fit.offset);  // avoids -0
  }
}

}  // namespace
}  // namespace ingot::INGOT_ISA
