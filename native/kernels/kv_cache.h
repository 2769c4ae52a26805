// Declarations, once per instruction set, as in kernels.h.
#pragma once
#include "core/isa.h"
#include "core/kv_cache.h"

#define INGOT_DECLARE_KV(isa)                                                                                         \
  namespace ingot::isa {                                                                                              \
  void kv_scores(const KvBlocks& kv, const float* queries, std::size_t count, std::size_t head, std::size_t first,    \
                 std::size_t last, float* out, std::size_t stride);                                                   \
  void kv_values(const KvBlocks& kv, const float* weights, std::size_t stride, std::size_t count, std::size_t head,   \
                 std::size_t group, float* out);                                                                      \
  }

INGOT_DECLARE_KV(baseline)
INGOT_DECLARE_KV(v3)
INGOT_DECLARE_KV(v4)
