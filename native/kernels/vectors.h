// GCC's and Clang's vector types of the machine's width, for loops that compilers translate badly from plain arrays:
// loops with several running values. The order of elements is the same at any width; only the number of elements per
// vector differs.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ingot::INGOT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

using Doubles = double __attribute__((vector_size(kVectorBytes)));
using Longs = std::int64_t __attribute__((vector_size(kVectorBytes)));
using Ints = std::int32_t __attribute__((vector_size(kVectorBytes)));

}  // namespace
}  // namespace ingot::INGOT_ISA
