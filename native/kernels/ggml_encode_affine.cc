// Encodes weights to ggml's blocks: types with a scale and a minimum (kernels/ggml_encode.cc).
#include "kernels/ggml_search.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode_affine(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  return encode_one_of<Ggml::q4_1, Ggml::q5_1>(type, from, out);
}

}  // namespace ingot::INGOT_ISA
