// Two arrays of one type whose differences kernels compute.
#pragma once
#include "bind/arrays.h"
#include "core/wdelta.h"

// Returns whether two arrays share no byte.
template <class First, class Other>
bool apart(const First& single, const Other& other) {
  const auto first = reinterpret_cast<std::uintptr_t>(single.data()),
             second = reinterpret_cast<std::uintptr_t>(other.data());
  return first + single.nbytes() <= second || second + other.nbytes() <= first;
}

using Base = std::optional<InArray>;

// f16 and bf16 are passed as uint16; without a base, `tuned` contains the f32 differences.
inline ingot::Differences differences_in(const InArray& tuned, const Base& base, std::string_view dtype) {
  const ingot::Dtype type = float_type(dtype);
  require(type != ingot::Dtype::f64 && (base || type == ingot::Dtype::f32), "expected elements of f32, f16 or bf16");
  require_elements(tuned, type, "expected an aligned fine-tune of the named type");
  if (base) {
    require_elements(*base, type, "expected an aligned base of the named type");
    require(base->size() == tuned.size(), "expected as many elements in both");
  }
  return {tuned.data(), base ? base->data() : nullptr, tuned.size(), type};
}
