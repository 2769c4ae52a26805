// Composition of ggml's blocks from codes and numbers that another kernel has chosen (kernels/rounding.cc).
#include "core/ggml.h"

#include "kernels/ggml_kinds.h"
#include "kernels/ggml_pack.h"
#include "kernels/ggml_types.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

template <Ggml kType>
void compose(const GgmlNumbers& from, std::size_t count, std::uint8_t* out) {
  constexpr std::size_t groups = Type<kType>::kGroups;
  const std::size_t nested = groups > 1 ? groups : 0;
  for (std::size_t i = 0; i < count; ++i) {
    Head head{from.d[i], from.dmin ? from.dmin[i] : std::uint16_t{0}};
    if (nested != 0) head.steps = from.steps + i * nested;
    if (from.minimums != nullptr) head.minimums = from.minimums + i * nested;
    pack<kType>(head, from.codes + i * kOf<kType>.elements, out + i * kOf<kType>.bytes);
  }
}

template <Ggml... kTypes>
bool compose_one_of(Ggml type, const GgmlNumbers& from, std::size_t count, std::uint8_t* out) {
  return ((type == kTypes ? (compose<kTypes>(from, count, out), true) : false) || ...);
}

}  // namespace

bool ggml_compose(Ggml type, const GgmlNumbers& from, std::size_t count, std::uint8_t* out) {
  using enum Ggml;
  return compose_one_of<q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs>(type, from, count, out);
}

}  // namespace ingot::INGOT_ISA
