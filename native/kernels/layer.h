// Declarations of the kernels of a decoder layer, once per instruction set, as in kernels.h.
#pragma once
#include "core/layer.h"

#define INGOT_DECLARE_LAYER(isa)                                                                        \
  namespace ingot::isa {                                                                                \
  void rms_norm(const void* x, const void* weight, Dtype type, std::size_t cols, float eps, void* out); \
  void add_values(const void* x, const void* y, Dtype type, std::size_t n, void* out);                  \
  void gate_values(const void* gate, const void* up, Dtype type, std::size_t n, void* out);             \
  void rotate_heads(void* x, const void* cosines, const void* sines, Dtype type, std::size_t heads,     \
                    std::size_t width);                                                                 \
  void attend_segment(const Attend& task, std::size_t head, std::size_t segment, float* parts);         \
  void attend_merge(const Attend& task, std::size_t head, const float* parts);                          \
  }

INGOT_DECLARE_LAYER(baseline)
INGOT_DECLARE_LAYER(v3)
INGOT_DECLARE_LAYER(v4)
