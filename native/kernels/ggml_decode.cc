// Decodes ggml's blocks to f32, and from there to f16 or bf16 (spec/gguf.md). The NumPy reference
// and llama.cpp's decoders give the same results.
#include "kernels/floats.h"
#include "kernels/ggml_grids.h"
#include "kernels/ggml_values.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kPiece = 4096;  // values that stay in the first cache

// Prefetches the cache lines of `count` values some distance after `out`; otherwise stores would wait for their lines
// one after the other. A prefetch cannot fault, so the last lines may be past the end.
inline void fetch_ahead(const float* out, std::size_t count) {
  constexpr std::size_t ahead = 4096, line = 64;
  const auto from = reinterpret_cast<std::uintptr_t>(out) + ahead;
  for (std::size_t index = 0; index < count * sizeof(float); index += line)
    __builtin_prefetch(reinterpret_cast<const void*>(from + index), 1);
}

// Writes values to the output; returns whether a number was too large for its type.
class Target {
 public:
  Target(const GgmlTarget& to, bool powers)
      : to_(to), unlimited_(to.type != Dtype::f16 && !powers), past_(powers ? 0xffffffffu : 0x7f800000u) {}

  // The destination of decoded values: the output if its elements are f32, else a buffer.
  float* room(std::size_t first) {
    return to_.type == Dtype::f32 ? static_cast<float*>(to_.out) + first : values_;
  }

  void finish(const float* values, std::size_t first, std::size_t n) {
    if (!unlimited_) look(values, n);
    if (to_.type == Dtype::f16)
      store_block<Dtype::f16>(values, n, static_cast<std::uint16_t*>(to_.out) + first);
    else if (to_.type == Dtype::bf16)
      store_block<Dtype::bf16>(values, n, static_cast<std::uint16_t*>(to_.out) + first);
  }

  bool too_large() const { return too_large_; }

 private:
  // Compares with the smallest magnitude that rounds to infinity. Values that are infinite or NaN because of a scale
  // are ignored.
  void look(const float* values, std::size_t n) {
    const std::uint32_t smallest = to_.type == Dtype::f16    ? 0x477ff000u
                                   : to_.type == Dtype::bf16 ? 0x7f7f8000u
                                                             : 0x7f800000u;
    std::uint32_t result = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t size = std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu;
      result |= static_cast<std::uint32_t>(size >= smallest) & static_cast<std::uint32_t>(size < past_);
    }
    too_large_ |= result != 0;
  }

  const GgmlTarget& to_;
  const bool unlimited_;
  const std::uint32_t past_;
  bool too_large_ = false;
  alignas(64) float values_[kPiece];
};

}  // namespace

bool ggml_decode(Ggml type, const std::uint8_t* in, std::size_t count, const std::int8_t* grid, const GgmlTarget& to) {
  // In all other types, an f16, a small scale and a small integer give less than 2^32.
  Target target(to, type == Ggml::mxfp4);
  with_type(type, [&]<Ggml kType>() {
    constexpr std::size_t elements = kOf<kType>.elements, bytes = kOf<kType>.bytes, at_once = kPiece / elements;
    for (std::size_t start = 0; start < count; start += at_once) {
      const std::size_t end = count - start < at_once ? count : start + at_once;
      float *const room = target.room(start * elements), *values = room;
      for (std::size_t i = start; i < end; ++i, values += elements) {
        if (to.type == Dtype::f32) fetch_ahead(values, elements);
        block<kType>(in + i * bytes, grid, values);
      }
      target.finish(room, start * elements, (end - start) * elements);
    }
  });
  return target.too_large();
}

}  // namespace ingot::INGOT_ISA
