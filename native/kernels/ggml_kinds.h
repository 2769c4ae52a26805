// Properties of each ggml type that the block encoders use (spec/gguf.md, "Search").
#pragma once
#include "kernels/ggml_lanes.h"

namespace ingot::INGOT_ISA {
namespace {

// A type defines: the number of weights per scale, the number of groups per block, the values of codes, and the initial
// candidates of the search.
template <Ggml kType>
struct Type;

struct Range {
  float below, above;
};

struct Alone {  // a block is one group
  static constexpr std::size_t kSize = 32, kGroups = 1;
  static constexpr bool kAffine = false, kBelow = false;
};

template <>
struct Type<Ggml::q4_0> : Alone {
  using Level = Integers<-8, 7>;
  static constexpr float kStarts[] = {-9.2f, -8.8f, -8.4f, -8, -7.6f, -7.2f, -6.8f, 8.4f, 8, 7.6f, 7.2f, 6.8f, 6.4f};
};

template <>
struct Type<Ggml::q5_0> : Alone {
  using Level = Integers<-16, 15>;
  static constexpr float kStarts[] = {-17.2f, -16.8f, -16.4f, -16, -15.6f, -15.2f, -14.8f, 16.4f, 16, 15.6f, 15.2f, 14.8f};
};

template <>
struct Type<Ggml::q8_0> : Alone {
  using Level = Integers<-128, 127>;
  static constexpr float kStarts[] = {-128, -127.5f, 127.25f, 127, 126.75f, 126.5f, 126.25f, 126};
};

template <>
struct Type<Ggml::iq4_nl> : Alone {
  using Level = Iq4;
  static constexpr float kStarts[] = {-143, -135, -127, -119, -111, -103, 129, 121, 113, 105, 97, 91};
};

template <>
struct Type<Ggml::mxfp4> : Alone {
  using Level = E2m1;
};

template <int kMost_>
struct AloneAffine : Alone {
  using Level = Integers<0, kMost_>;
  static constexpr int kMost = kMost_;
  static constexpr bool kAffine = true;
  static constexpr Range kStarts[] = {{0, 0},     {.25f, .25f}, {-.25f, -.25f}, {.5f, .5f},  {-.5f, -.5f}, {.5f, 0},
                                      {0, .5f},   {-.5f, 0},    {0, -.5f},      {.5f, -.5f}, {-.5f, .5f},  {-1, 0},
                                      {0, -1},    {-1, -1}};
};

template <>
struct Type<Ggml::q4_1> : AloneAffine<15> {};
template <>
struct Type<Ggml::q5_1> : AloneAffine<31> {};

// Blocks of 256; steps from kLow to kHigh.
template <std::size_t kSize_, int kLow_, int kHigh_>
struct Steps {
  static constexpr std::size_t kSize = kSize_, kGroups = 256 / kSize_;
  static constexpr float kLow = kLow_, kHigh = kHigh_, kExtreme = kLow_ < 0 ? kLow_ : kHigh_;
  static constexpr bool kAffine = false, kBelow = false;
};

template <>
struct Type<Ggml::q6_k> : Steps<16, -128, 127> {
  using Level = Integers<-32, 31>;
  static constexpr float kStarts[] = {-33.2f, -32.8f, -32.4f, -32, -31.6f, -31.2f, 32, 31.6f, 31.2f, 30.8f};
};

template <>
struct Type<Ggml::q3_k> : Steps<16, -32, 31> {
  using Level = Integers<-4, 3>;
  static constexpr float kStarts[] = {-5, -4.6f, -4.2f, -3.8f, -3.4f, -3, 4, 3.6f, 3.2f, 2.8f, 2.4f};
};

template <>
struct Type<Ggml::iq4_xs> : Steps<32, -32, 31> {
  using Level = Iq4;
  static constexpr auto& kStarts = Type<Ggml::iq4_nl>::kStarts;
};

template <std::size_t kSize, int kMost_, int kHigh>
struct StepsAffine : Steps<kSize, 0, kHigh> {
  using Level = Integers<0, kMost_>;
  static constexpr int kMost = kMost_;
  static constexpr bool kAffine = true, kBelow = true;
  static constexpr Range kStarts[] = {{0, 0},     {.25f, .25f}, {-.25f, -.25f}, {.5f, .5f},  {-.5f, -.5f}, {.5f, 0},
                                      {0, .5f},   {-.5f, 0},    {0, -.5f},      {.5f, -.5f}, {-.5f, .5f},  {-1, 0},
                                      {0, -1},    {-1, -1}};
};

template <>
struct Type<Ggml::q2_k> : StepsAffine<16, 3, 15> {};
template <>
struct Type<Ggml::q4_k> : StepsAffine<32, 15, 63> {};
template <>
struct Type<Ggml::q5_k> : StepsAffine<32, 31, 63> {};

}  // namespace
}  // namespace ingot::INGOT_ISA
