// Casts between the float types, each rounded once to nearest even.
#include <cstring>

#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 256;

template <Dtype kFrom, Dtype kTo>
void cast_all(const void* source, std::size_t n, void* target) {
  const auto* in = static_cast<const TypeOf<kFrom>*>(source);
  auto* out = static_cast<TypeOf<kTo>*>(target);
  if constexpr (kFrom == kTo) {
    std::memcpy(out, in, n * sizeof *in);
  } else if constexpr (kFrom == Dtype::f32) {
    store_block<kTo>(in, n, out);
  } else if constexpr (kTo == Dtype::f32) {
    load_block<kFrom>(in, n, out);
  } else {
    alignas(64) float block[kBlock];
    for (std::size_t start = 0; start < n; start += kBlock) {
      const std::size_t count = n - start < kBlock ? n - start : kBlock;
      if constexpr (kFrom == Dtype::f64)  // to 16 bits
        for (std::size_t i = 0; i < count; ++i) block[i] = f64_to_odd_f32(in[start + i]);
      else
        load_block<kFrom>(in + start, count, block);
      store_block<kTo>(block, count, out + start);
    }
  }
}

template <Dtype kFrom>
void cast_from(const void* in, std::size_t n, void* out, Dtype to) {
  switch (to) {
    case Dtype::f32:
      return cast_all<kFrom, Dtype::f32>(in, n, out);
    case Dtype::f16:
      return cast_all<kFrom, Dtype::f16>(in, n, out);
    case Dtype::bf16:
      return cast_all<kFrom, Dtype::bf16>(in, n, out);
    case Dtype::f64:
      return cast_all<kFrom, Dtype::f64>(in, n, out);
  }
}

}  // namespace

void cast(const void* in, Dtype from, std::size_t n, void* out, Dtype to) {
  switch (from) {
    case Dtype::f32:
      return cast_from<Dtype::f32>(in, n, out, to);
    case Dtype::f16:
      return cast_from<Dtype::f16>(in, n, out, to);
    case Dtype::bf16:
      return cast_from<Dtype::bf16>(in, n, out, to);
    case Dtype::f64:
      return cast_from<Dtype::f64>(in, n, out, to);
  }
}

}  // namespace ingot::INGOT_ISA
