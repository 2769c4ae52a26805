// One column of records of 16 bytes (a 64-bit key and two floats), gathered and narrowed while the keys are compared.
#include "kernels/floats.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kBlock = 512;  // stays in the first-level cache between the two steps
// Records in files are not aligned; this type tells the compiler so when it vectorizes.
using Word = std::uint32_t __attribute__((aligned(1), may_alias));

struct Differences {
  std::uint32_t key = 0, other = 0, narrow = 0;
};

void gather(const Word* words, std::size_t n, std::uint64_t key, int column, float* out, Differences& seen) {
  const std::uint32_t low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  std::uint32_t keys = 0, others = 0;
  for (std::size_t i = 0; i < n; ++i) {
    keys |= (words[4 * i] ^ low) | (words[4 * i + 1] ^ high);
    others |= words[4 * i + 3 - column];
    out[i] = std::bit_cast<float>(words[4 * i + 2 + column]);
  }
  seen.key |= keys;
  seen.other |= others & 0x7fffffffu;
}

template <Dtype kDtype>
void column_as(const Word* words, std::size_t n, std::uint64_t key, int column, void* out, Differences& seen) {
  alignas(64) float block[kBlock], back[kBlock];
  auto* narrow = static_cast<TypeOf<kDtype>*>(out);
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t count = n - start < kBlock ? n - start : kBlock;
    gather(words + 4 * start, count, key, column, block, seen);
    store_block<kDtype>(block, count, narrow + start);
    load_block<kDtype>(narrow + start, count, back);
    for (std::size_t i = 0; i < count; ++i)
      seen.narrow |= std::bit_cast<std::uint32_t>(block[i]) ^ std::bit_cast<std::uint32_t>(back[i]);
  }
}

}  // namespace

RecordsSeen gather_column(const std::uint8_t* records, std::size_t n, std::uint64_t key, int column, void* out, Dtype type) {
  const Word* words = reinterpret_cast<const Word*>(records);
  Differences seen;
  if (type == Dtype::f16)
    column_as<Dtype::f16>(words, n, key, column, out, seen);
  else if (type == Dtype::bf16)
    column_as<Dtype::bf16>(words, n, key, column, out, seen);
  else
    gather(words, n, key, column, static_cast<float*>(out), seen);
  return {seen.key == 0, seen.other != 0, seen.narrow == 0};
}

}  // namespace ingot::INGOT_ISA
