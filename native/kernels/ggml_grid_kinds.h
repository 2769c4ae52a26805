// Properties of the ggml types whose codes are entries of a grid: IQ1, IQ2 and IQ3 (spec/gguf.md, "Grid types").
#pragma once
#include "core/ggml.h"

namespace ingot::INGOT_ISA {
namespace {

// How the signs of eight consecutive values are stored.
enum class Signs {
  free,    // one bit for each value
  even,    // seven bits: the number of negative values is even
  inside,  // entries have signs; values are shifted by an eighth up or down
};

template <Ggml kType>
struct GridType;

// kDims: values of an entry. kLevels: magnitudes of a value. kScaled: values that share a scale. kSteps: number of
// scales. A scale is d * (2 * step + 1) * kUnit. kStarts: the levels to which the search first maps the largest
// magnitude of a group.
struct Iq2 {
  static constexpr std::size_t kDims = 8, kLevels = 3;
  static constexpr float kMagnitudes[] = {8, 25, 43}, kUnit = 0.125f;
  static constexpr int kSteps = 16;
  static constexpr float kStarts[] = {50, 45, 41, 37, 33, 29};
};

template <>
struct GridType<Ggml::iq2_xxs> : Iq2 {
  static constexpr std::size_t kEntries = 256, kScaled = 32;
  static constexpr Signs kSigns = Signs::even;
};

template <>
struct GridType<Ggml::iq2_xs> : Iq2 {
  static constexpr std::size_t kEntries = 512, kScaled = 16;
  static constexpr Signs kSigns = Signs::even;
};

template <>
struct GridType<Ggml::iq2_s> : Iq2 {
  static constexpr std::size_t kEntries = 1024, kScaled = 16;
  static constexpr Signs kSigns = Signs::free;
};

struct Iq3 {
  static constexpr std::size_t kDims = 4, kLevels = 8, kScaled = 32;
  static constexpr int kSteps = 16;
};

template <>
struct GridType<Ggml::iq3_xxs> : Iq3 {
  static constexpr std::size_t kEntries = 256;
  static constexpr float kMagnitudes[] = {4, 12, 20, 28, 36, 44, 52, 62}, kUnit = 0.25f;
  static constexpr Signs kSigns = Signs::even;
  static constexpr float kStarts[] = {72, 66, 61, 56, 51, 46};
};

template <>
struct GridType<Ggml::iq3_s> : Iq3 {
  static constexpr std::size_t kEntries = 512;
  static constexpr float kMagnitudes[] = {1, 3, 5, 7, 9, 11, 13, 15}, kUnit = 1;
  static constexpr Signs kSigns = Signs::free;
  static constexpr float kStarts[] = {17.5f, 16.25f, 15, 13.75f, 12.5f, 11.25f};
};

struct Iq1 {
  static constexpr std::size_t kDims = 8, kLevels = 3, kEntries = 2048;
  static constexpr float kMagnitudes[] = {-1, 0, 1}, kUnit = 1, kShift = 0.125f;
  static constexpr int kSteps = 8;
  static constexpr Signs kSigns = Signs::inside;
  static constexpr float kStarts[] = {2.3f, 2, 1.75f, 1.5f, 1.3f, 1.1f};
};

template <>
struct GridType<Ggml::iq1_s> : Iq1 {
  static constexpr std::size_t kScaled = 32, kShifted = 32;  // kShifted: values that have one shift
};

template <>
struct GridType<Ggml::iq1_m> : Iq1 {
  static constexpr std::size_t kScaled = 16, kShifted = 8;
};

}  // namespace
}  // namespace ingot::INGOT_ISA
