#include "bind/bind.h"
#include "bind/products.h"

NB_MODULE(_native, m) {
  m.doc() = "Ingot's native core: kernels, checksums, strict CBOR. Called by ingot.core and ingot.codecs only.";
  bind_affine(m);
  bind_affine_matmul(m);
  bind_tile_matmul(m);
  bind_affine_zeros(m);
  bind_ggml(m);
  bind_heap(m);
  bind_isa(m);
  bind_checksum(m);
  bind_cbor(m);
  bind_cbor_encode(m);
  bind_delta(m);
  bind_delta_add(m);
  bind_entropy(m);
  bind_floats(m);
  bind_kv_cache(m);
  bind_layer(m);
  bind_mapping(m);
  bind_palette(m);
  bind_pool(m);
  bind_records(m);
  bind_rounding(m);
  bind_scaled(m);
  bind_spans(m);
  bind_symbols(m);
  bind_table(m);
  bind_tca_tbe(m);
  bind_trellis(m);
  bind_wdelta(m);
  bind_words(m);
}
