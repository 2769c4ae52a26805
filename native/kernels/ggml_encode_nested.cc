// Encodes weights to ggml's blocks: types with integers times a scale (kernels/ggml_encode.cc).
#include "kernels/ggml_search.h"

namespace ingot::INGOT_ISA {

GgmlStatus ggml_encode_nested(Ggml type, const GgmlSource& from, std::uint8_t* out) {
  return encode_one_of<Ggml::q3_k, Ggml::q6_k, Ggml::iq4_xs>(type, from, out);
}

}  // namespace ingot::INGOT_ISA
