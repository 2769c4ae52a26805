// Packed weights of the affine family, with references to Python's arrays.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "bind/products.h"
#include "core/dispatch.h"
#include "kernels/affine_gemm.h"

class PackedMatrix {
 public:
  PackedMatrix(InBytes packed, InArray scales, std::optional<InArray> zeros, std::size_t rows, std::size_t cols,
               std::size_t group, int bits, bool is_signed, bool per_tensor, std::size_t row_bytes, bool offset,
               int zero_point, std::string_view scale_dtype)
      : packed_(packed), scales_(scales), zeros_(zeros) {
    require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "expected 2, 3, 4 or 8 bits");
    require(cols >= 1 && cols <= kMost && rows <= kMost && row_bytes <= kMost && group >= 1, "expected sizes in range");
    require(row_bytes >= (cols * static_cast<std::size_t>(bits) + 7) / 8, "expected rows long enough for their codes");
    require(zero_point >= -(1 << 20) && zero_point <= 1 << 20, "expected a zero point in range");
    const std::size_t per_lane = 32 / static_cast<std::size_t>(bits);
    direct_ = 32 % bits == 0 && bits >= 4 && (per_tensor || group >= cols || group % per_lane == 0);
    in_blocks_ = per_tensor || group >= cols || group % ingot::kGemmBlock == 0;
    require(direct_ || in_blocks_, "expected groups of whole lanes or blocks");
    std::size_t bytes = 0, count = 0;
    require(!__builtin_mul_overflow(rows, row_bytes, &bytes) && packed.size() == bytes,
            "expected rows * row_bytes packed bytes");
    require(!__builtin_mul_overflow(rows, cols / group + (cols % group != 0), &count), "expected fewer groups");
    const ingot::Dtype type = float_type(scale_dtype);
    require(type != ingot::Dtype::f64, "expected scales of type f32, f16 or bf16");
    require_elements(scales, type, "expected aligned scales of the named type");
    require(scales.size() == (per_tensor ? 1 : count), "expected one scale per group");
    if (zeros) {
      require_elements(*zeros, type, "expected aligned zeros of the scales' type");
      require(zeros->size() == scales.size(), "expected one zero per scale");
    }
    group = per_tensor ? cols : std::min(group, cols);
    const ingot::ZeroKind kind = !zeros ? ingot::ZeroKind::none : offset ? ingot::ZeroKind::offset : ingot::ZeroKind::point;
    const std::size_t width = ingot::kLanes * per_lane, blocks = cols / width + (cols % width != 0);
    at_ = {rows, cols, group, row_bytes, bits, is_signed, per_tensor, per_tensor || group >= cols, zero_point, kind,
           per_lane, blocks, (blocks * (per_lane + 1) + 1) * ingot::kLanes};
    weights_ = {packed_.data(), scales_.data(), zeros_ ? zeros_->data() : nullptr, type};
  }

  void matmul(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
              std::string_view bias_dtype, std::size_t threads) const;

  void gemm(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads) const;

  void int8(const InArray& x, const std::optional<InArray>& bias, const OutArray& out, std::string_view dtype,
            std::string_view bias_dtype, std::size_t threads, bool dots) const;

  // Returns whether `multiply_int8` supports these weights.
  bool rounds() const { return in_blocks_ && std::abs(at_.zero_point) <= ingot::kInt8Center; }
  std::size_t rows() const { return at_.rows; }
  std::size_t cols() const { return at_.cols; }
  ingot::Weights weights() const { return {at_, weights_, nullptr, packed_.size()}; }

 private:
  // The allowed ways of adding products with x: except with `plain`, every product of x and a code must be exact in
  // f32.
  ingot::GemmMode mode(const Product& product) const {
    const int half = at_.is_signed ? 1 << (at_.bits - 1) : 0, most = (1 << at_.bits) - 1;
    if (-half - at_.zero_point < -256 || most - half - at_.zero_point > 256) return ingot::GemmMode::plain;
    return INGOT_KERNEL(gemm_mode)(product.x, product.out.type, product.count * at_.cols, ingot::kCodesReach);
  }

  const InBytes packed_;
  const InArray scales_;
  const std::optional<InArray> zeros_;
  ingot::MatmulLayout at_;
  ingot::MatmulWeights weights_;
  bool direct_ = false, in_blocks_ = false;  // the products that support this layout
};
