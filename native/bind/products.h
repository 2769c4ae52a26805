// Arguments of products with packed weights: rows of x, a bias, and the output.
#pragma once
#include <optional>

#include "bind/arrays.h"
#include "core/products.h"

void bind_tile_matmul(nb::module_& m);

constexpr std::size_t kMost = std::size_t{1} << 56;  // keeps products with bits and element sizes below 2^63

struct Product {
  // Throws ValueError if sizes or types are inconsistent.
  Product(const ingot::MatmulLayout& at, const InArray& rows, const std::optional<InArray>& bias, const OutArray& to,
          std::string_view dtype, std::string_view bias_dtype) {
    const ingot::Dtype type = float_type(dtype), bias_type = float_type(bias_dtype);
    require(rows.ndim() == 2, "expected rows of x");
    require(type != ingot::Dtype::f64 && bias_type != ingot::Dtype::f64, "expected values of type f32, f16 or bf16");
    require(rows.shape(1) == at.cols, "expected x of as many columns as the weights");
    require(to.ndim() == 2 && to.shape(0) == rows.shape(0) && to.shape(1) == at.rows, "expected an output of x's rows x rows");
    require_elements(rows, type, "expected aligned values of the named type");
    require_elements(to, type, "expected an aligned output of the named type");
    if (bias) {
      require(bias->ndim() == 1 && bias->shape(0) == at.rows, "expected one bias per row");
      require_elements(*bias, bias_type, "expected an aligned bias of the named type");
    }
    x = rows.data();
    count = rows.shape(0);
    out = {bias ? bias->data() : nullptr, bias_type, to.data(), type};
  }

  const void* x;
  std::size_t count;
  ingot::MatmulOutput out;
};
