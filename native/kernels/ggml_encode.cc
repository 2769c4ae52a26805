// Encodes f32, f16, bf16 or f64 to ggml's blocks (spec/gguf.md): scales by search, or as in the package gguf. The
// results equal those of the NumPy reference. This file has the types with one scale per block and no minimum.
#include "kernels/ggml_search.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  if (!from.search && !is_exact(type)) return {GgmlStatus::no_encoder, 0};
  for (const auto one_of : {encode_one_of<Ggml::q4_0, Ggml::q5_0, Ggml::q8_0, Ggml::iq4_nl, Ggml::mxfp4>,
                            ggml_encode_affine, ggml_encode_nested, ggml_encode_nested_affine})
    if (const GgmlStatus status = one_of(type, from, out); status.code != GgmlStatus::no_encoder) return status;
  return {GgmlStatus::no_encoder, 0};
}

}  // namespace ingot::INGOT_ISA
