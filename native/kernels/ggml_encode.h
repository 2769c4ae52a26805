// Weights to ggml's blocks (spec/gguf.md, "Encoding"), once per instruction set: INGOT_KERNEL(ggml_encode)(type, from, out).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/ggml.h"

namespace ingot {

// Whole blocks; `importance` is what squared errors of the `cols` columns weigh, if anything was said.
struct GgmlSource {
  const void* values;
  Dtype dtype;
  std::size_t blocks, cols;
  const float* importance;
  bool search;  // or as the package gguf encodes
};

struct GgmlStatus {
  enum Code { ok, non_finite, scale_overflow, no_encoder } code;
  std::size_t index;  // of the value, or of the first one of its block
};

namespace baseline {
GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out);
}
namespace v3 {
GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out);
}
namespace v4 {
GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out);
}

}  // namespace ingot
