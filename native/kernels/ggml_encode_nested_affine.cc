// Encodes weights to ggml's blocks: types with integers times a scale and a minimum (kernels/ggml_encode.cc).
#include "kernels/ggml_search.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode_nested_affine(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  return encode_one_of<Ggml::q2_k, Ggml::q4_k, Ggml::q5_k>(type, from, out);
}

}  // namespace ingot::INGOT_ISA
