// Encodes weights to ggml's blocks (spec/gguf.md, "Encoding"), once per instruction set:
// INGOT_KERNEL(ggml_encode)(type, from, out).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/ggml.h"

namespace ingot {

// Rows of complete blocks; `importance` has weights for the squared errors of the `cols` columns, or is null.
struct GgmlSource {
  const void* values;
  Dtype dtype;
  std::size_t blocks, cols;
  const float* importance;
  bool search;  // false: encode like the package gguf
};

struct GgmlStatus {
  enum Code { ok, non_finite, scale_overflow, no_encoder } code;
  std::size_t index;  // index of the value, or of the first value of its block
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
